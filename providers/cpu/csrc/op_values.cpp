#include "op_values.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace onnxport::op {

void fail(const Api& api, ort::ErrorCode code, const char* format, ...) {
  char text[512];
  const int prefix = std::snprintf(text, sizeof text, "onnxport " ONNXPORT_DEVICE " kernel: ");
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text + prefix, sizeof text - static_cast<size_t>(prefix), format, arguments);
  va_end(arguments);
  throw Failure{api.create_status(code, text)};
}

Status* invalid_input(const Api& api, const InvalidInput& error) {
  char text[600];
  std::snprintf(text, sizeof text, "onnxport " ONNXPORT_DEVICE " kernel: %s", error.what());
  return api.create_status(ort::kInvalidArgument, text);
}

Tensor describe(const Api& api, const char* name, const ort::Value* value) {
  Tensor tensor;
  int type = 0;
  const int64_t* dims = nullptr;
  check(api.shape(value, &type, &dims, &tensor.rank));
  if (tensor.rank < 1 || tensor.rank > kMaxRank)
    fail(api, ort::kInvalidArgument, "%s must have 1 to %zu dimensions, found %zu", name, kMaxRank,
         tensor.rank);
  std::copy(dims, dims + tensor.rank, tensor.dims);
  // The accessor wants a mutable value even for inputs; only the caches are written to.
  check(api.mutable_data(const_cast<ort::Value*>(value), &tensor.data));
  return tensor;
}

const ort::Value* optional_input(const Api& api, const ort::KernelContext* context, size_t index) {
  size_t count = 0;
  check(api.input_count(context, &count));
  const ort::Value* value = nullptr;
  if (index < count) check(api.input(context, index, &value));
  return value;
}

void* open_output(const Api& api, ort::KernelContext* context, const Tensor& shape) {
  ort::Value* out = nullptr;
  void* data = nullptr;
  check(api.output(context, 0, shape.dims, shape.rank, &out));
  check(api.mutable_data(out, &data));
  return data;
}

ort::CustomOp base_operator() {
  ort::CustomOp op{};
  op.version = ort::kLayoutVersion;
  op.execution_provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.input_memory_type = [](const ort::CustomOp*, size_t) { return 0; };
  const auto one = [](const ort::CustomOp*) { return 1; };
  op.variadic_input_min_arity = op.variadic_input_homogeneity = one;
  op.variadic_output_min_arity = op.variadic_output_homogeneity = one;
  op.start_version = one;
  op.end_version = [](const ort::CustomOp*) { return INT32_MAX; };
  op.may_inplace = op.alias_map = [](int**, int**) { return size_t{0}; };
  op.release_may_inplace = op.release_alias_map = [](int*, int*) {};
  return op;
}

}  // namespace onnxport::op
