// Quantized weights among an operator's inputs.
#pragma once

#include <optional>
#include <string>

#include "matmul.h"
#include "op.h"
#include "pages.h"

namespace onnxport::op {

struct Weights {
  Tensor quants;  // [n][blocks][block_size * bits / 8], uint8
  Tensor scales;  // [n][blocks], float, float16, or uint8, which are E8M0
};

inline Scales::Type scale_type(ort::ElementType type) {
  if (type == ort::kUint8) return Scales::kE8M0;
  return type == ort::kFloat16 ? Scales::kFloat16 : Scales::kFloat;
}

// The scales, as pack_weights takes them.
inline Scales stored_scales(const Weights& weights, ort::ElementType type) {
  return {weights.scales.data, scale_type(type)};
}

// What the inputs are called in messages; the scales follow the quants.
struct WeightInputs {
  size_t quants;
  const char* quants_name;
  const char* scales_name;
};

int64_t read_attribute(const Api& api, const ort::KernelInfo* info, const char* name);

// Whether a flag is there and set.
bool has_flag(const Api& api, const ort::KernelInfo* info, const char* name);

// A floating attribute; `other` where there is none.
float read_float(const Api& api, const ort::KernelInfo* info, const char* name, float other);

// A string; `other` where there is none. Throws a Failure where it is something else, or is long.
std::string read_text(const Api& api, const ort::KernelInfo* info, const char* op,
                      const char* name, const char* other);

// The weights of a product. Throws a Failure where they are no initializers, or have another size.
Weights read_weights(const Api& api, const ort::KernelInfo* info, const char* op,
                     const MatMul& product, const WeightInputs& inputs);

// A product's bias, an initializer [n]; null where the node has none that is constant. Throws a
// Failure where it has another size.
const float* read_bias(const Api& api, const ort::KernelInfo* info, const char* op,
                       const MatMul& product, size_t input, const char* name = "bias");

// The inputs that a product has one of at most: zero points, uint8, or offsets, float16.
struct ZeroInputs {
  size_t zero_points, offsets;
  const char* zero_points_name;
  const char* offsets_name;
};

// A product's zero points or offsets, an initializer [n][stored_zero_bytes], which is what it then
// has_offsets for; null where the node has none that is constant. Throws a Failure where they have
// another size, or both are there.
const uint8_t* read_zeros(const Api& api, const ort::KernelInfo* info, const char* op,
                          MatMul& product, const ZeroInputs& inputs);

// Throws a Failure where the node has zero points or offsets that were no initializer.
void refuse_zeros(const Api& api, const ort::KernelContext* context, const char* op,
                  const MatMul& product, const ZeroInputs& inputs);

// Makes room for the packed zeros of so many such products, lets `pack` fill it, and returns it.
template <class Pack>
const uint16_t* pack_zeros_into(std::optional<WeightMemory>& memory, const MatMul& product,
                                Pack pack, int64_t count = 1) {
  memory.emplace(static_cast<size_t>(count * packed_zeros(product)) * sizeof(uint16_t));
  auto* packed = reinterpret_cast<uint16_t*>(memory->data());
  pack(packed);
  return packed;
}

// So many floats that the node has as an initializer, as they are stored: they stay where they are
// for as long as the session lives. Throws a Failure where they are no initializer, or not so many.
const void* read_floats(const Api& api, const ort::KernelInfo* info, const char* op, size_t input,
                        const char* name, int64_t count);

// Throws a Failure where the node has this input: it was no initializer when the session was made.
void refuse_input(const Api& api, const ort::KernelContext* context, const char* op, size_t input,
                  const char* name);

// The runtime keeps weights as they were for as long as the session lives. Where it mapped them
// from the artifact, they need not stay in memory once they are packed.
void forget_weights(const Weights& weights, ort::ElementType scales);

// The node's activations, input 0, with `depth` numbers a row. Throws a Failure if they have not.
Tensor read_activations(const Api& api, const ort::KernelContext* context, const char* op,
                        int64_t depth);

int64_t elements(const Tensor& tensor);

// The attribute of the norm; NAN where there is none. Throws a Failure where it is no epsilon.
float read_epsilon(const Api& api, const ort::KernelInfo* info, const char* op);

// Gives a call whose norm has its epsilon the rest of it, if the node has one: skip is the input
// `first`, gamma the next one, and the residual the output 1. Throws a Failure where one of them is
// missing, or does not fit the activations. Where the node has an output 2, that is what was
// normalized.
void read_norm(const Api& api, ort::KernelContext* context, const char* op, const Tensor& input,
               size_t first, MatMul& call);

// An operator of products: its first inputs are required; all others, and what read_norm gives
// beside the output, a node may do without. Its name, its inputs' types and its kernels are still
// to be set.
template <size_t kRequiredInputs, size_t kInputs>
ort::CustomOp product_operator() {
  ort::CustomOp op = base_operator();
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return kInputs; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{3}; };
  op.input_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index < kRequiredInputs ? ort::kRequired : ort::kOptional;
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index == 0 ? ort::kRequired : ort::kOptional;
  };
  return op;
}

}  // namespace onnxport::op
