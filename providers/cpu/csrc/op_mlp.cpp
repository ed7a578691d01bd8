// onnxport.GatedMlp: MatMulNBits, with its norm if it has one, GatedSilu or GatedGelu, and
// MatMulNBits in one, to the bit. With the inputs of adapters, which are integers, and an AddLora behind
// both products. With the inputs gate_up_zero_points and down_zero_points these have such, and with
// gate_up_offsets and down_offsets, float16, such.
#include <memory>
#include <optional>
#include <string>

#include "mlp.h"
#include "op_adapters.h"
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
  kAdapters,
  kAdapterRanks,
  kAdapterWeights,
  kAdapterScales,
  kGateUpZeros,
  kDownZeros,
  kGateUpOffsets,
  kDownOffsets,
  kMlpInputs
};
static_assert(kGateUpZeros == kAdapters + kAdapterInputs, "adapters have so many inputs");

constexpr ZeroInputs kOfGateUp{kGateUpZeros, kGateUpOffsets, "gate_up_zero_points",
                               "gate_up_offsets"};
constexpr ZeroInputs kOfDown{kDownZeros, kDownOffsets, "down_zero_points", "down_offsets"};

size_t packed_bytes(const MatMul& m) {
  return static_cast<size_t>(num_panels(m) * panel_bytes(m));
}

struct MlpKernel {
  Api api;
  GatedMlp settings;  // a call fills in the rest
  MlpLora lora{};     // likewise; without a largest rank there are no adapters
  WeightMemory gate_up, down;
  std::optional<WeightMemory> gate_up_zeros, down_zeros;

  MlpKernel(const Api& a, const GatedMlp& mlp)
      : api(a),
        settings(mlp),
        gate_up(packed_bytes(mlp.gate_up)),
        down(packed_bytes(mlp.down)) {
    settings.gate_up.weights = gate_up.data();
    settings.down.weights = down.data();
  }
};

// A product's place in the slots of adapters, all but its parts.
LoraPlace place_of(const Api& api, const ort::KernelInfo* info, const std::string& name,
                   const MatMul& product) {
  LoraPlace place{};
  place.offset = read_attribute(api, info, (name + "_offset").c_str());
  place.ranks = read_attribute(api, info, (name + "_ranks").c_str());
  place.depth = product.k;
  place.bits = product.bits;
  place.block_size = product.block_size;
  return place;
}

void read_lora(const Api& api, const ort::KernelInfo* info, const GatedMlp& mlp, MlpLora& lora) {
  if (!read_max_rank(api, info, &lora.slots.max_rank)) return;
  lora.slots.type = read_integer_type(api, info, kName);
  lora.gate_up = place_of(api, info, "gate_up", mlp.gate_up);
  lora.gate_up.parts = 2;
  lora.gate_up.columns[0] = lora.gate_up.columns[1] = mlp.inner;
  lora.down = place_of(api, info, "down", mlp.down);
  lora.down.parts = 1;
  lora.down.columns[0] = mlp.down.n;
  for (const LoraPlace& place : {lora.gate_up, lora.down})
    check_place(kName, place, lora.slots.max_rank);
}

// joined: gate and up as the graph has them.
void read_all_zeros(const Api& api, const ort::KernelInfo* info, MatMul joined, MlpKernel& kernel) {
  GatedMlp& mlp = kernel.settings;
  if (const auto* zeros = read_zeros(api, info, kName, joined, kOfGateUp)) {
    mlp.gate_up.has_offsets = joined.has_offsets;
    mlp.gate_up.zeros = pack_zeros_into(
        kernel.gate_up_zeros, mlp.gate_up,
        [&](uint16_t* packed) { pack_gate_up_zeros(mlp, zeros, packed); });
    forget_file_pages(zeros, static_cast<size_t>(joined.n * stored_zero_bytes(joined)));
  }
  if (const auto* zeros = read_zeros(api, info, kName, mlp.down, kOfDown)) {
    mlp.down.zeros = pack_zeros_into(
        kernel.down_zeros, mlp.down,
        [&](uint16_t* packed) { pack_zeros(mlp.down, zeros, packed); });
    forget_file_pages(zeros, static_cast<size_t>(mlp.down.n * stored_zero_bytes(mlp.down)));
  }
}

template <ort::ElementType kStored>
std::unique_ptr<MlpKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  GatedMlp mlp{};
  mlp.inner = read_attribute(api, info, "inner");
  mlp.gate_up.k = read_attribute(api, info, "K");
  mlp.gate_up.bits = read_attribute(api, info, "bits");
  mlp.gate_up.block_size = read_attribute(api, info, "block_size");
  mlp.down.n = read_attribute(api, info, "N");
  mlp.down.bits = read_attribute(api, info, "down_bits");
  mlp.down.block_size = read_attribute(api, info, "down_block_size");
  mlp.gate_up.norm.epsilon = read_epsilon(api, info, kName);
  mlp.is_gelu = has_flag(api, info, "is_gelu");
  complete(mlp);
  // As the graph has it, without what fills up panels.
  MatMul joined = mlp.gate_up;
  joined.n = 2 * mlp.inner;
  check_product(kName, joined);
  check_product(kName, mlp.down);
  const Weights first =
      read_weights(api, info, kName, joined, {kGateUp, "gate_up", "gate_up_scales"});
  const Weights second = read_weights(api, info, kName, mlp.down, {kDown, "down", "down_scales"});
  mlp.gate_up.half_scales = are_halves(stored_scales(first, kStored), elements(first.scales));
  mlp.down.half_scales = are_halves(stored_scales(second, kStored), elements(second.scales));
  auto kernel = std::make_unique<MlpKernel>(api, mlp);
  read_lora(api, info, mlp, kernel->lora);
  pack_gate_up(mlp, first.quants.as<const uint8_t>(), stored_scales(first, kStored),
               kernel->gate_up.data());
  forget_weights(first, kStored);
  pack_weights_in_parts(mlp.down, second.quants.as<const uint8_t>(),
                        stored_scales(second, kStored), kernel->down.data());
  forget_weights(second, kStored);
  read_all_zeros(api, info, joined, *kernel);
  return kernel;
}

void compute(const MlpKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  GatedMlp call = kernel.settings;
  Tensor input = read_activations(api, context, kName, call.gate_up.k);
  call.gate_up.rows = elements(input) / call.gate_up.k;
  call.gate_up.input = input.as<const float>();
  read_norm(api, context, kName, input, kSkip, call.gate_up);
  refuse_zeros(api, context, kName, call.gate_up, kOfGateUp);
  refuse_zeros(api, context, kName, call.down, kOfDown);
  MlpLora lora = kernel.lora;
  if (read_optional_adapters(api, context, kName, kAdapters, call.gate_up.rows,
                             {lora.gate_up, lora.down}, &lora.slots))
    call.lora = &lora;
  input.dims[input.rank - 1] = call.down.n;
  call.down.output = static_cast<float*>(open_output(api, context, input));
  Parallel parallel{api, context};
  if (run_mlp(*active_matmul(), call, parallel_for, &parallel) != 0) check(parallel.status);
}

template <ort::ElementType kStored>
ort::CustomOp make_operator() {
  ort::CustomOp op = product_operator<kSkip, kMlpInputs>();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    if (index == kGateUpScales || index == kDownScales) return kStored;
    if (index == kAdapterWeights) return ort::kInt8;
    if (index == kAdapters || index == kAdapterRanks) return ort::kInt32;
    if (index == kGateUpZeros || index == kDownZeros) return ort::kUint8;
    if (index == kGateUpOffsets || index == kDownOffsets) return ort::kFloat16;
    return index == kGateUp || index == kDown ? ort::kUint8 : ort::kFloat;
  };
  set_kernel<MlpKernel, make_kernel<kStored>, compute>(op);
  return op;
}

}  // namespace

ort::CustomOp mlp_operator() { return make_operator<ort::kFloat>(); }
ort::CustomOp mlp_half_operator() { return make_operator<ort::kFloat16>(); }

}  // namespace onnxport::op
