// onnxport.GatedMlp: MatMulNBits, with its norm if it has one, GatedSilu and MatMulNBits in one, to
// the bit.
#include <memory>

#include "mlp.h"
#include "op_weights.h"
#include "pack.h"
#include "pages.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "GatedMlp";

enum MlpInput : size_t {
  kActivations,
  kGateUp,
  kGateUpScales,
  kDown,
  kDownScales,
  kSkip,
  kGamma,
  kMlpInputs
};

size_t packed_bytes(const MatMul& m) {
  return static_cast<size_t>(num_panels(m) * panel_bytes(m));
}

struct MlpKernel {
  Api api;
  GatedMlp settings;  // a call fills in the rest
  WeightMemory gate_up, down;

  MlpKernel(const Api& a, const GatedMlp& mlp)
      : api(a),
        settings(mlp),
        gate_up(packed_bytes(mlp.gate_up)),
        down(packed_bytes(mlp.down)) {
    settings.gate_up.weights = gate_up.data();
    settings.down.weights = down.data();
  }
};

std::unique_ptr<MlpKernel> make_kernel(const Api& api, const ort::KernelInfo* info,
                                       ort::ElementType scales) {
  GatedMlp mlp{};
  mlp.inner = read_attribute(api, info, "inner");
  mlp.gate_up.k = read_attribute(api, info, "K");
  mlp.gate_up.bits = read_attribute(api, info, "bits");
  mlp.gate_up.block_size = read_attribute(api, info, "block_size");
  mlp.down.n = read_attribute(api, info, "N");
  mlp.down.bits = read_attribute(api, info, "down_bits");
  mlp.down.block_size = read_attribute(api, info, "down_block_size");
  mlp.gate_up.norm.epsilon = read_epsilon(api, info, kName);
  complete(mlp);
  // As the graph has it, without what fills up panels.
  MatMul joined = mlp.gate_up;
  joined.n = 2 * mlp.inner;
  check_product(api, kName, joined);
  check_product(api, kName, mlp.down);
  const Weights first =
      read_weights(api, info, kName, joined, {kGateUp, "gate_up", "gate_up_scales"});
  const Weights second = read_weights(api, info, kName, mlp.down, {kDown, "down", "down_scales"});
  mlp.gate_up.half_scales = are_halves(stored_scales(first, scales), elements(first.scales));
  mlp.down.half_scales = are_halves(stored_scales(second, scales), elements(second.scales));
  auto kernel = std::make_unique<MlpKernel>(api, mlp);
  pack_gate_up(mlp, first.quants.as<const uint8_t>(), stored_scales(first, scales),
               kernel->gate_up.data());
  forget_weights(first, scales);
  pack_weights_in_parts(mlp.down, second.quants.as<const uint8_t>(),
                        stored_scales(second, scales), kernel->down.data());
  forget_weights(second, scales);
  return kernel;
}

void compute(const MlpKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  GatedMlp call = kernel.settings;
  Tensor input = read_activations(api, context, kName, call.gate_up.k);
  call.gate_up.rows = elements(input) / call.gate_up.k;
  call.gate_up.input = input.as<const float>();
  read_norm(api, context, kName, input, kSkip, call.gate_up);
  input.dims[input.rank - 1] = call.down.n;
  ort::Value* out = nullptr;
  void* data = nullptr;
  check(api.output(context, 0, input.dims, input.rank, &out));
  check(api.mutable_data(out, &data));
  call.down.output = static_cast<float*>(data);
  Parallel parallel{api, context};
  if (run_mlp(*active_matmul(), call, parallel_for, &parallel) != 0) check(parallel.status);
}

template <ort::ElementType kStored>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    if (index == kGateUpScales || index == kDownScales) return kStored;
    return index == kGateUp || index == kDown ? ort::kUint8 : ort::kFloat;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return size_t{kMlpInputs}; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{3}; };
  op.input_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index < kSkip ? ort::kRequired : ort::kOptional;
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index == 0 ? ort::kRequired : ort::kOptional;
  };
  op.create_kernel = [](const ort::CustomOp*, const void* const* table,
                        const ort::KernelInfo* info, void** out) -> Status* {
    const Api api{table};
    return guarded(api, [&] { *out = make_kernel(api, info, kStored).release(); });
  };
  op.destroy_kernel = [](void* kernel) { delete static_cast<MlpKernel*>(kernel); };
  op.compute = [](void* state, ort::KernelContext* context) -> Status* {
    const MlpKernel& kernel = *static_cast<const MlpKernel*>(state);
    return guarded(kernel.api, [&] { compute(kernel, context); });
  };
  const auto none = [](int**, int**) { return size_t{0}; };
  op.may_inplace = op.alias_map = none;
  return op;
}

}  // namespace

ort::CustomOp mlp_operator() { return make_operator<ort::kFloat>(); }
ort::CustomOp mlp_half_operator() { return make_operator<ort::kFloat16>(); }

}  // namespace onnxport::op
