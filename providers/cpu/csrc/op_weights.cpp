// What operators with quantized weights have in common: reading and checking them.
#include "op_weights.h"

#include <algorithm>
#include <cmath>

#include "pages.h"

namespace onnxport::op {
namespace {

Tensor constant(const Api& api, const ort::KernelInfo* info, const char* op, size_t input,
                const char* name) {
  int is_constant = 0;
  const ort::Value* value = nullptr;
  check(api.constant_input(info, input, &is_constant, &value));
  if (!is_constant) fail(api, ort::kNotImplemented, "%s: %s must be an initializer", op, name);
  return describe(api, name, value);
}

void expect_elements(const Api& api, const char* op, const char* name, const Tensor& tensor,
                     int64_t wanted) {
  if (elements(tensor) != wanted)
    fail(api, ort::kInvalidArgument, "%s: %s must have %lld elements, found %lld", op, name,
         static_cast<long long>(wanted), static_cast<long long>(elements(tensor)));
}

// So many elements that are an initializer; null where there is none.
const void* optional_constant(const Api& api, const ort::KernelInfo* info, const char* op,
                              size_t input, const char* name, int64_t count) {
  int is_constant = 0;
  const ort::Value* value = nullptr;
  check(api.constant_input(info, input, &is_constant, &value));
  if (!is_constant) return nullptr;
  const Tensor tensor = describe(api, name, value);
  expect_elements(api, op, name, tensor, count);
  return tensor.data;
}

}  // namespace

int64_t elements(const Tensor& tensor) {
  int64_t count = 1;
  for (size_t i = 0; i < tensor.rank; i++) count *= tensor.dims[i];
  return count;
}

int64_t read_attribute(const Api& api, const ort::KernelInfo* info, const char* name) {
  int64_t value = 0;
  check(api.attribute(info, name, &value));
  return value;
}

bool has_flag(const Api& api, const ort::KernelInfo* info, const char* name) {
  int64_t value = 0;
  Status* status = api.attribute(info, name, &value);
  if (status) api.release(status);
  return !status && value != 0;
}

float read_float(const Api& api, const ort::KernelInfo* info, const char* name, float other) {
  float value = 0;
  Status* status = api.attribute(info, name, &value);
  if (!status) return value;
  api.release(status);
  return other;
}

std::string read_text(const Api& api, const ort::KernelInfo* info, const char* op,
                      const char* name, const char* other) {
  char text[64];
  size_t size = sizeof text;
  Status* status = api.attribute(info, name, text, &size);
  if (!status) return text;
  api.release(status);
  if (size > sizeof text)
    fail(api, ort::kInvalidArgument, "%s: %s is %zu characters long", op, name, size - 1);
  // Whether there is none, or one of another type, the runtime tells in its message only.
  int64_t integer;
  float real;
  status = api.attribute(info, name, &integer);
  if (status) {
    api.release(status);
    status = api.attribute(info, name, &real);
  }
  if (!status) fail(api, ort::kInvalidArgument, "%s: %s must be a string", op, name);
  api.release(status);
  return other;
}

Weights read_weights(const Api& api, const ort::KernelInfo* info, const char* op, const MatMul& m,
                     const WeightInputs& inputs) {
  const Tensor quants = constant(api, info, op, inputs.quants, inputs.quants_name);
  const Tensor scales = constant(api, info, op, inputs.quants + 1, inputs.scales_name);
  expect_elements(api, op, inputs.quants_name, quants,
                  m.n * num_blocks(m) * m.block_size * m.bits / 8);
  expect_elements(api, op, inputs.scales_name, scales, m.n * num_blocks(m));
  return {quants, scales};
}

void forget_weights(const Weights& weights, ort::ElementType scales) {
  forget_file_pages(weights.quants.data, static_cast<size_t>(elements(weights.quants)));
  const int64_t bytes = elements(weights.scales) * scale_bytes(scale_type(scales));
  forget_file_pages(weights.scales.data, static_cast<size_t>(bytes));
}

const float* read_bias(const Api& api, const ort::KernelInfo* info, const char* op,
                       const MatMul& m, size_t input, const char* name) {
  return static_cast<const float*>(optional_constant(api, info, op, input, name, m.n));
}

const uint8_t* read_zeros(const Api& api, const ort::KernelInfo* info, const char* op, MatMul& m,
                          const ZeroInputs& inputs) {
  m.has_offsets = false;
  const void* points = optional_constant(api, info, op, inputs.zero_points, inputs.zero_points_name,
                                         m.n * stored_zero_bytes(m));
  const void* offsets = optional_constant(api, info, op, inputs.offsets, inputs.offsets_name,
                                          m.n * num_blocks(m));
  if (points && offsets)
    fail(api, ort::kInvalidArgument, "%s: there are both %s and %s, which exclude each other", op,
         inputs.zero_points_name, inputs.offsets_name);
  m.has_offsets = offsets != nullptr;
  return static_cast<const uint8_t*>(offsets ? offsets : points);
}

void refuse_zeros(const Api& api, const ort::KernelContext* context, const char* op,
                  const MatMul& m, const ZeroInputs& inputs) {
  if (!m.zeros || m.has_offsets)
    refuse_input(api, context, op, inputs.zero_points, inputs.zero_points_name);
  if (!m.zeros || !m.has_offsets)
    refuse_input(api, context, op, inputs.offsets, inputs.offsets_name);
}

const void* read_floats(const Api& api, const ort::KernelInfo* info, const char* op, size_t input,
                        const char* name, int64_t count) {
  const Tensor floats = constant(api, info, op, input, name);
  expect_elements(api, op, name, floats, count);
  return floats.data;
}

void refuse_input(const Api& api, const ort::KernelContext* context, const char* op, size_t input,
                  const char* name) {
  if (optional_input(api, context, input))
    fail(api, ort::kNotImplemented, "%s: %s must be an initializer", op, name);
}

float read_epsilon(const Api& api, const ort::KernelInfo* info, const char* op) {
  float epsilon = 0;
  Status* status = api.attribute(info, "epsilon", &epsilon);
  if (status) {
    api.release(status);
    return NAN;
  }
  if (!(epsilon >= 0))
    fail(api, ort::kInvalidArgument, "%s: epsilon must be zero or more, found %g", op,
         static_cast<double>(epsilon));
  return epsilon;
}

void read_norm(const Api& api, ort::KernelContext* context, const char* op, const Tensor& input,
               size_t first, MatMul& call) {
  const ort::Value* skip_value = optional_input(api, context, first);
  const ort::Value* gamma_value = optional_input(api, context, first + 1);
  const bool has_epsilon = !std::isnan(call.norm.epsilon);
  size_t outputs = 0;
  check(api.output_count(context, &outputs));
  ort::Value* out = nullptr;  // null, too, where the node leaves it out
  if (outputs > 1) check(api.output(context, 1, input.dims, input.rank, &out));
  if (!skip_value && !gamma_value && !has_epsilon && !out) return;
  const char* missing = !skip_value    ? "skip"
                        : !gamma_value ? "gamma"
                        : !has_epsilon ? "epsilon"
                        : !out         ? "second output"
                                       : nullptr;
  if (missing)
    fail(api, ort::kInvalidArgument,
         "%s: a norm needs skip, gamma, epsilon and a second output; there is no %s", op, missing);
  const Tensor skip = describe(api, "skip", skip_value);
  const Tensor gamma = describe(api, "gamma", gamma_value);
  if (skip.rank != input.rank || !std::equal(skip.dims, skip.dims + skip.rank, input.dims))
    fail(api, ort::kInvalidArgument,
         "%s: skip must have the shape of A, %lld elements, found rank %zu and %lld", op,
         static_cast<long long>(elements(input)), skip.rank,
         static_cast<long long>(elements(skip)));
  expect_elements(api, op, "gamma", gamma, call.k);
  void *residual = nullptr, *normalized = nullptr;
  check(api.mutable_data(out, &residual));
  if (outputs > 2) {
    check(api.output(context, 2, input.dims, input.rank, &out));
    if (out) check(api.mutable_data(out, &normalized));
  }
  call.norm.gamma = gamma.as<const float>();
  call.norm.skip = skip.as<const float>();
  call.norm.residual = static_cast<float*>(residual);
  call.norm.normalized = static_cast<float*>(normalized);
}

Tensor read_activations(const Api& api, const ort::KernelContext* context, const char* op,
                        int64_t depth) {
  const ort::Value* value = nullptr;
  check(api.input(context, 0, &value));
  const Tensor input = describe(api, "A", value);
  const int64_t last = input.dims[input.rank - 1];
  if (last != depth)
    fail(api, ort::kInvalidArgument, "%s: A's last dimension must be %lld, found %lld", op,
         static_cast<long long>(depth), static_cast<long long>(last));
  return input;
}

}  // namespace onnxport::op
