// onnxport.GatedSilu: silu(gate) * up in one pass over the joined projection, where standard
// operators take a Split that copies both halves and three passes more.
#include <algorithm>
#include <cstdint>

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

  void task(int64_t index) const {
    const int64_t begin = index * rows_per_task, end = std::min(rows, begin + rows_per_task);
    for (int64_t row = begin; row < end; row++) {
      const float* gate = input + row * 2 * inner;
      active_kernels()->gated_silu(
          {gate, gate + inner, nullptr, nullptr, output + row * inner, inner});
    }
  }
};

void compute(const Api& api, ort::KernelContext* context) {
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
  ort::Value* out = nullptr;
  void* data = nullptr;
  check(api.output(context, 0, input.dims, input.rank, &out));
  check(api.mutable_data(out, &data));

  Run run{input.as<const float>(), static_cast<float*>(data), rows, last / 2, 1};
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

}  // namespace

ort::CustomOp gated_silu_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return "GatedSilu"; };
  op.input_type = op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = op.output_characteristic = [](const ort::CustomOp*, size_t) -> int {
    return ort::kRequired;
  };
  op.create_kernel = [](const ort::CustomOp*, const void* const* table, const ort::KernelInfo*,
                        void** out) -> Status* {
    const Api api{table};
    return guarded(api, [&] { *out = new Api(api); });
  };
  op.destroy_kernel = [](void* kernel) { delete static_cast<Api*>(kernel); };
  op.compute = [](void* kernel, ort::KernelContext* context) -> Status* {
    const Api& api = *static_cast<const Api*>(kernel);
    return guarded(api, [&] { compute(api, context); });
  };
  const auto none = [](int**, int**) { return size_t{0}; };
  op.may_inplace = op.alias_map = none;
  return op;
}

}  // namespace onnxport::op
