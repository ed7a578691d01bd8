// AddLora: what LoRA adapters add to a product's outputs, or that alone. Each token has the slot of its
// own adapter, or 0; where all have 0 nothing is added. Adapters in integers come with scales, others
// without; activations are quantized for these, as for weights of `bits` bits in blocks of `block_size`
// inputs. Free of any runtime: ONNX Runtime's operator and OpenVINO's both call this.
#pragma once

#include <initializer_list>

#include "attention.h"
#include "lora.h"
#include "tensor.h"

namespace onnxport {

constexpr size_t kAdapterInputs = 4;  // slots of tokens, ranks, weights, and scales of integers

// How adapters come: int32 [rows], int32 [slots + 1][layers][projections], [slots][numbers], and
// float [slots + 1][layers][projections][max_rank], which only integers have.
struct AdapterInputs {
  Tensor slots, ranks, weights, scales;
};

// One node; the depth of its place is a call's.
struct AddLora {
  LoraType type;  // of adapters
  LoraPlace place;
  int64_t max_rank;
};

struct AddLoraCall {
  const AddLora* node;
  AdapterInputs adapters;
  Tensor activations;  // float [rows][depth]
  Tensor output;       // float [rows][columns of all projections]
  bool is_added;       // to the product that the output holds; false: it is set
  ParallelFor parallel_for;
  void* context;
};

// Lets `place` have the parts that its columns are. Here, for libraries that have no kernel.
inline void count_parts(LoraPlace& place) {
  place.parts = 0;
  for (size_t part = 0; part < kLoraParts; part++)
    if (place.columns[part] > 0) place.parts = static_cast<int64_t>(part) + 1;
}

// Throws an InvalidInput unless a place and the largest rank can be those of a slot.
void check_place(const char* op, const LoraPlace& place, int64_t max_rank);

// The adapters of a call's rows. Throws an InvalidInput where an input does not fit the others or
// the places, or a token's slot or rank is none: a call would read elsewhere.
LoraSlots check_adapters(const char* op, const AdapterInputs& inputs, LoraType type,
                         int64_t max_rank, int64_t rows,
                         std::initializer_list<LoraPlace> places);

// Throws an InvalidInput for a node that no call can be of.
void check_node(const AddLora& node);

// Adds, or sets. Throws an InvalidInput for a call that does not fit; a failing parallel_for's own result is
// handed back.
int add_lora(const AddLoraCall& call);

}  // namespace onnxport
