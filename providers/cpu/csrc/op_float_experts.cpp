// onnxport.FloatExperts: as GatedExperts, with weights in floats that are read as they are stored.
#include <memory>

#include "float_experts.h"
#include "op_routing.h"
#include "op_weights.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "FloatExperts";

enum ExpertsInput : size_t {
  kActivations,
  kLogits,
  kGateUp,
  kDown,
  kGateUpBias,
  kDownBias,
  kExpertsInputs
};

constexpr CacheType cache_type(ort::ElementType type) {
  return type == ort::kFloat ? kFloat32 : type == ort::kFloat16 ? kFloat16 : kBFloat16;
}

struct ExpertsKernel {
  Api api;
  FloatExperts settings;  // a call fills in the rest
  Swiglu swiglu;
};

// Null where the node has none that is constant.
const float* read_own_bias(const Api& api, const ort::KernelInfo* info, int64_t count, size_t input,
                           const char* name) {
  MatMul all{};
  all.n = count;
  return read_bias(api, info, kName, all, input, name);
}

int64_t read_size(const Api& api, const ort::KernelInfo* info, const char* name) {
  const int64_t size = read_attribute(api, info, name);
  if (size < 1)
    fail(api, ort::kInvalidArgument, "%s: %s must be 1 or more, found %lld", kName, name,
         static_cast<long long>(size));
  return size;
}

template <ort::ElementType kStored>
std::unique_ptr<ExpertsKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  FloatExperts experts{};
  experts.type = cache_type(kStored);
  experts.depth = read_size(api, info, "K");
  experts.inner = read_size(api, info, "inner");
  experts.n = read_size(api, info, "N");
  experts.routing = read_routing(api, info, kName);
  experts.is_relu2 = has_flag(api, info, "is_relu2");
  const int64_t rows = experts.parts() * experts.routing.num_experts * experts.inner;
  const int64_t outputs = experts.routing.num_experts * experts.n;
  experts.gate_up = read_floats(api, info, kName, kGateUp, "gate_up", rows * experts.depth);
  experts.down = read_floats(api, info, kName, kDown, "down", outputs * experts.inner);
  experts.gate_up_bias = read_own_bias(api, info, rows, kGateUpBias, "gate_up_bias");
  experts.down_bias = read_own_bias(api, info, outputs, kDownBias, "down_bias");
  auto kernel =
      std::make_unique<ExpertsKernel>(ExpertsKernel{api, experts, read_swiglu(api, info, kName)});
  if (!is_silu(kernel->swiglu)) kernel->settings.swiglu = &kernel->swiglu;
  kernel->settings.is_gelu = read_is_gelu(api, info, kName, kernel->swiglu);
  check_relu2(api, info, kName, kernel->swiglu);
  return kernel;
}

void compute(const ExpertsKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  FloatExperts call = kernel.settings;
  if (!call.gate_up_bias) refuse_input(api, context, kName, kGateUpBias, "gate_up_bias");
  if (!call.down_bias) refuse_input(api, context, kName, kDownBias, "down_bias");
  Tensor input = read_activations(api, context, kName, call.depth);
  call.rows = elements(input) / call.depth;
  call.input = input.as<const float>();
  call.logits = read_logits(api, context, kName, call.rows, call.routing.num_experts);
  input.dims[input.rank - 1] = call.n;
  call.output = static_cast<float*>(open_output(api, context, input));
  Parallel parallel{api, context};
  if (run_float_experts(call, parallel_for, &parallel) != 0) check(parallel.status);
}

template <ort::ElementType kStored>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    return index == kGateUp || index == kDown ? kStored : ort::kFloat;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return size_t{kExpertsInputs}; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index < kGateUpBias ? ort::kRequired : ort::kOptional;
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  set_kernel<ExpertsKernel, make_kernel<kStored>, compute>(op);
  return op;
}

}  // namespace

ort::CustomOp float_experts_operator() { return make_operator<ort::kFloat>(); }
ort::CustomOp float_experts_half_operator() { return make_operator<ort::kFloat16>(); }
ort::CustomOp float_experts_bfloat16_operator() { return make_operator<ort::kBFloat16>(); }

}  // namespace onnxport::op
