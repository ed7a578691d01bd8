// onnxport.GatedSilu and GatedGelu: activation(gate) * up in one pass over the joined projection,
// where standard operators take a Split that copies both halves and two or three passes more.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "kernels.h"
#include "op.h"

namespace onnxport::op {
namespace {

// Elements in one task: enough to be worth waking a thread for.
constexpr int64_t kTaskElements = 1 << 14;

struct Run {
  const float* input;
  float* output;
  int64_t rows, inner, rows_per_task;
  bool is_gelu;

  void task(int64_t index) const {
    const int64_t begin = index * rows_per_task, end = std::min(rows, begin + rows_per_task);
    for (int64_t row = begin; row < end; row++) {
      const float* gate = input + row * 2 * inner;
      active_kernels()->gate(
          {gate, gate + inner, nullptr, nullptr, output + row * inner, inner, is_gelu});
    }
  }
};

struct GateKernel {
  Api api;
};

std::unique_ptr<GateKernel> make_kernel(const Api& api, const ort::KernelInfo*) {
  return std::make_unique<GateKernel>(GateKernel{api});
}

template <bool kIsGelu>
void compute(const GateKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  const ort::Value* value = nullptr;
  check(api.input(context, 0, &value));
  Tensor input = describe(api, "input", value);
  const int64_t last = input.dims[input.rank - 1];
  if (last % 2)
    fail(api, ort::kInvalidArgument,
         "input's last dimension must be even, gates and then values; found %lld",
         static_cast<long long>(last));
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < input.rank; i++) rows *= input.dims[i];
  input.dims[input.rank - 1] = last / 2;
  float* output = static_cast<float*>(open_output(api, context, input));

  Run run{input.as<const float>(), output, rows, last / 2, 1, kIsGelu};
  if (rows * run.inner == 0) return;
  run.rows_per_task = std::max<int64_t>(1, kTaskElements / run.inner);
  const int64_t tasks = (rows + run.rows_per_task - 1) / run.rows_per_task;
  if (tasks == 1) return run.task(0);
  check(api.parallel_for(
      context,
      [](void* argument, size_t index) {
        static_cast<const Run*>(argument)->task(static_cast<int64_t>(index));
      },
      static_cast<size_t>(tasks), 0, &run));
}

template <bool kIsGelu>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return kIsGelu ? "GatedGelu" : "GatedSilu"; };
  op.input_type = op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = op.output_characteristic = [](const ort::CustomOp*, size_t) -> int {
    return ort::kRequired;
  };
  set_kernel<GateKernel, make_kernel, compute<kIsGelu>>(op);
  return op;
}

}  // namespace

ort::CustomOp gated_silu_operator() { return make_operator<false>(); }
ort::CustomOp gated_gelu_operator() { return make_operator<true>(); }

}  // namespace onnxport::op
