// onnxport.HeadProducts: each head's numbers times a matrix of its own, [..., heads, K] to
// [..., heads, N], with weights in floats [heads][N][K] that are read as they are stored.
//
// ONNX Runtime's MatMul of a batch gives a lone row other bits than one of several, converts weights
// of 16 bits first, and packs all of them anew in every call of several rows.
#include <algorithm>
#include <memory>

#include "kernels.h"
#include "op.h"
#include "op_values.h"
#include "op_weights.h"
#include "product.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "HeadProducts";

// Of a task, at most: outputs of a head, and rows.
constexpr int64_t kOutputs = 64, kTaskRows = 36;

constexpr CacheType weight_type(ort::ElementType type) {
  return type == ort::kFloat ? kFloat32 : type == ort::kFloat16 ? kFloat16 : kBFloat16;
}

struct HeadKernel {
  Api api;
  CacheType type;
  int64_t heads, depth, n;
  const void* weights;  // [heads][n][depth]
};

struct Run {
  const HeadKernel& kernel;
  int64_t rows;
  const float* input;  // [rows][heads][depth]
  float* output;       // [rows][heads][n]

  int64_t parts() const { return ceil_div(kernel.n, kOutputs); }
  int64_t turns() const { return ceil_div(rows, kTaskRows); }
  int64_t tasks() const { return kernel.heads * parts() * turns(); }

  // Tasks of the same weights are neighbours.
  void multiply(int64_t index) const {
    const int64_t row = index % turns() * kTaskRows, part = index / turns();
    const int64_t head = part / parts(), first = part % parts() * kOutputs;
    const int64_t count = std::min(kTaskRows, rows - row);
    const float* inputs[kTaskRows];
    for (int64_t i = 0; i < count; i++)
      inputs[i] = input + ((row + i) * kernel.heads + head) * kernel.depth;
    const int64_t bytes = kernel.type == kFloat32 ? 4 : 2;
    const void* weights = static_cast<const char*>(kernel.weights) +
                          (head * kernel.n + first) * kernel.depth * bytes;
    active_kernels()->multiply_rows(
        {kernel.type, weights, inputs, output + (row * kernel.heads + head) * kernel.n + first,
         kernel.depth, count, std::min(kOutputs, kernel.n - first), kernel.heads * kernel.n});
  }
};

int64_t read_size(const Api& api, const ort::KernelInfo* info, const char* name) {
  const int64_t size = read_attribute(api, info, name);
  if (size < 1)
    fail(api, ort::kInvalidArgument, "%s: %s must be 1 or more, found %lld", kName, name,
         static_cast<long long>(size));
  return size;
}

template <ort::ElementType kStored>
std::unique_ptr<HeadKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  const int64_t heads = read_size(api, info, "heads"), depth = read_size(api, info, "K");
  const int64_t n = read_size(api, info, "N");
  const void* weights = read_floats(api, info, kName, 1, "weights", heads * n * depth);
  return std::make_unique<HeadKernel>(
      HeadKernel{api, weight_type(kStored), heads, depth, n, weights});
}

void compute(const HeadKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  const ort::Value* value = nullptr;
  check(api.input(context, 0, &value));
  Tensor input = describe(api, "input", value);
  if (input.rank < 2 || input.dims[input.rank - 2] != kernel.heads ||
      input.dims[input.rank - 1] != kernel.depth)
    fail(api, ort::kInvalidArgument, "%s: input must be [..., %lld, %lld]", kName,
         static_cast<long long>(kernel.heads), static_cast<long long>(kernel.depth));
  int64_t rows = 1;
  for (size_t i = 0; i + 2 < input.rank; i++) rows *= input.dims[i];
  const float* numbers = input.as<const float>();
  input.dims[input.rank - 1] = kernel.n;
  Run run{kernel, rows, numbers, static_cast<float*>(open_output(api, context, input))};
  if (rows == 0) return;
  Parallel parallel{api, context};
  const auto task = [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->multiply(static_cast<int64_t>(index));
  };
  if (run_tasks(run.tasks(), task, &run, parallel_for, &parallel) != 0) check(parallel.status);
}

template <ort::ElementType kStored>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    return index == 1 ? kStored : ort::kFloat;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return size_t{2}; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = op.output_characteristic = [](const ort::CustomOp*, size_t) -> int {
    return ort::kRequired;
  };
  set_kernel<HeadKernel, make_kernel<kStored>, compute>(op);
  return op;
}

}  // namespace

ort::CustomOp head_products_operator() { return make_operator<ort::kFloat>(); }
ort::CustomOp head_products_half_operator() { return make_operator<ort::kFloat16>(); }
ort::CustomOp head_products_bfloat16_operator() { return make_operator<ort::kBFloat16>(); }

}  // namespace onnxport::op
