// onnxport.GatedExperts: of each row, the sum of GatedMlp of the experts that it is routed to. These
// may have biases, and another activation than SiLU, or no gate; and weights that are MXFP4, or that have
// zero points or offsets, as GatedMlp's.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "experts.h"
#include "op_routing.h"
#include "op_weights.h"
#include "pages.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "GatedExperts";
constexpr int64_t kFp4Bits = 4, kFp4Block = 32;  // of MXFP4

enum ExpertsInput : size_t {
  kActivations,
  kLogits,
  kGateUp,
  kGateUpScales,
  kDown,
  kDownScales,
  kGateUpBias,
  kDownBias,
  kGateUpZeros,
  kDownZeros,
  kGateUpOffsets,
  kDownOffsets,
  kExpertsInputs
};

constexpr ZeroInputs kOfGateUp{kGateUpZeros, kGateUpOffsets, "gate_up_zero_points",
                               "gate_up_offsets"};
constexpr ZeroInputs kOfDown{kDownZeros, kDownOffsets, "down_zero_points", "down_offsets"};

struct ExpertsKernel {
  Api api;
  GatedExperts settings;  // a call fills in the rest
  WeightMemory gate_up, down;
  std::optional<WeightMemory> gate_up_zeros, down_zeros;
  std::vector<float> gate_up_bias;
  Swiglu swiglu;

  ExpertsKernel(const Api& a, const GatedExperts& experts)
      : api(a),
        settings(experts),
        gate_up(bytes_of(experts, experts.expert.gate_up)),
        down(bytes_of(experts, experts.expert.down)) {
    settings.expert.gate_up.weights = gate_up.data();
    settings.expert.down.weights = down.data();
  }

 private:
  static size_t bytes_of(const GatedExperts& experts, const MatMul& m) {
    return static_cast<size_t>(experts.routing.num_experts * packed_bytes(m));
  }
};

GatedMlp read_expert(const Api& api, const ort::KernelInfo* info) {
  GatedMlp expert{};
  expert.inner = read_attribute(api, info, "inner");
  expert.gate_up.k = read_attribute(api, info, "K");
  expert.gate_up.bits = read_attribute(api, info, "bits");
  expert.gate_up.block_size = read_attribute(api, info, "block_size");
  expert.down.n = read_attribute(api, info, "N");
  expert.down.bits = read_attribute(api, info, "down_bits");
  expert.down.block_size = read_attribute(api, info, "down_block_size");
  expert.is_relu2 = has_flag(api, info, "is_relu2");
  complete(expert);
  return expert;
}

// Whether weights are E2M1, for which everything has to fit. `scales` is what the node's are.
bool read_is_fp4(const Api& api, const ort::KernelInfo* info, const GatedMlp& expert,
                 ort::ElementType scales) {
  const std::string type = read_text(api, info, kName, "quant_type", "int");
  const bool is_fp4 = type == "fp4";
  if (!is_fp4 && type != "int")
    fail(api, ort::kInvalidArgument, "%s: quant_type must be \"int\" or \"fp4\", found \"%s\"",
         kName, type.c_str());
  const MatMul &first = expert.gate_up, &second = expert.down;
  for (const MatMul& m : {first, second})
    if (is_fp4 && (m.bits != kFp4Bits || m.block_size != kFp4Block))
      fail(api, ort::kInvalidArgument,
           "%s: quant_type \"fp4\" has 4 bits in blocks of 32, found bits %lld, block_size %lld, "
           "down_bits %lld, down_block_size %lld",
           kName, static_cast<long long>(first.bits), static_cast<long long>(first.block_size),
           static_cast<long long>(second.bits), static_cast<long long>(second.block_size));
  if (is_fp4 != (scales == ort::kUint8))
    fail(api, ort::kInvalidArgument,
         "%s: scales are uint8, exponents, with quant_type \"fp4\", and float or float16 with "
         "\"int\", found %s with \"%s\"",
         kName, scales == ort::kUint8 ? "uint8" : scales == ort::kFloat ? "float" : "float16",
         type.c_str());
  return is_fp4;
}

// Sizes are those of the weights of all experts.
void read_biases(const Api& api, const ort::KernelInfo* info, const MatMul& gate_up,
                 const MatMul& down, ExpertsKernel& kernel) {
  GatedExperts& settings = kernel.settings;
  const float* stored = read_bias(api, info, kName, gate_up, kGateUpBias, "gate_up_bias");
  settings.expert.down.bias = read_bias(api, info, kName, down, kDownBias, "down_bias");
  if (!stored) return;
  const int64_t inner = settings.expert.inner, parts = settings.expert.parts();
  std::vector<float>& bias = kernel.gate_up_bias;
  bias.resize(static_cast<size_t>(gate_up.n));
  for (int64_t i = 0; i < gate_up.n; i++) {  // gate's and up's take turns
    const int64_t expert = i / (parts * inner), feature = i % (parts * inner) / parts;
    bias[static_cast<size_t>((parts * expert + i % parts) * inner + feature)] = stored[i];
  }
  settings.gate_up_bias = bias.data();
}

// Likewise.
void read_all_zeros(const Api& api, const ort::KernelInfo* info, MatMul gate_up, MatMul down,
                    ExpertsKernel& kernel) {
  GatedExperts& settings = kernel.settings;
  const int64_t count = settings.routing.num_experts;
  const auto read = [&](MatMul& all, const ZeroInputs& inputs, MatMul& one,
                        std::optional<WeightMemory>& memory, auto pack) {
    const uint8_t* zeros = read_zeros(api, info, kName, all, inputs);
    if (!zeros) return;
    if (one.is_fp4)
      fail(api, ort::kInvalidArgument, "%s: quant_type \"fp4\" has neither %s nor %s", kName,
           inputs.zero_points_name, inputs.offsets_name);
    one.has_offsets = all.has_offsets;
    const auto fill = [&](uint16_t* packed) { pack(settings, zeros, packed); };
    one.zeros = pack_zeros_into(memory, one, fill, count);
    forget_file_pages(zeros, static_cast<size_t>(all.n * stored_zero_bytes(all)));
  };
  read(gate_up, kOfGateUp, settings.expert.gate_up, kernel.gate_up_zeros,
       pack_experts_gate_up_zeros);
  read(down, kOfDown, settings.expert.down, kernel.down_zeros, pack_experts_down_zeros);
}

template <ort::ElementType kStored>
std::unique_ptr<ExpertsKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  GatedExperts experts{read_expert(api, info), read_routing(api, info, kName), nullptr};
  GatedMlp& expert = experts.expert;
  expert.gate_up.is_fp4 = expert.down.is_fp4 = read_is_fp4(api, info, expert, kStored);
  // As the graph has them, without what fills up panels.
  MatMul joined = expert.gate_up, down = expert.down;
  joined.n = expert.parts() * expert.inner;
  check_product(kName, joined);
  check_product(kName, down);
  joined.n *= experts.routing.num_experts;
  down.n *= experts.routing.num_experts;
  const Weights first =
      read_weights(api, info, kName, joined, {kGateUp, "gate_up", "gate_up_scales"});
  const Weights second = read_weights(api, info, kName, down, {kDown, "down", "down_scales"});
  expert.gate_up.half_scales = are_halves(stored_scales(first, kStored), elements(first.scales));
  expert.down.half_scales = are_halves(stored_scales(second, kStored), elements(second.scales));
  auto kernel = std::make_unique<ExpertsKernel>(api, experts);
  kernel->swiglu = read_swiglu(api, info, kName);
  if (!is_silu(kernel->swiglu)) kernel->settings.expert.swiglu = &kernel->swiglu;
  kernel->settings.expert.is_gelu = read_is_gelu(api, info, kName, kernel->swiglu);
  check_relu2(api, info, kName, kernel->swiglu);
  read_biases(api, info, joined, down, *kernel);
  pack_experts_gate_up(experts, first.quants.as<const uint8_t>(), stored_scales(first, kStored),
                       kernel->gate_up.data());
  forget_weights(first, kStored);
  pack_experts_down(experts, second.quants.as<const uint8_t>(), stored_scales(second, kStored),
                    kernel->down.data());
  forget_weights(second, kStored);
  read_all_zeros(api, info, joined, down, *kernel);
  return kernel;
}

void compute(const ExpertsKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  GatedExperts call = kernel.settings;
  if (!call.gate_up_bias) refuse_input(api, context, kName, kGateUpBias, "gate_up_bias");
  if (!call.expert.down.bias) refuse_input(api, context, kName, kDownBias, "down_bias");
  GatedMlp& expert = call.expert;
  refuse_zeros(api, context, kName, expert.gate_up, kOfGateUp);
  refuse_zeros(api, context, kName, expert.down, kOfDown);
  Tensor input = read_activations(api, context, kName, expert.gate_up.k);
  expert.gate_up.rows = elements(input) / expert.gate_up.k;
  expert.gate_up.input = input.as<const float>();
  call.logits = read_logits(api, context, kName, expert.gate_up.rows, call.routing.num_experts);
  input.dims[input.rank - 1] = expert.down.n;
  expert.down.output = static_cast<float*>(open_output(api, context, input));
  Parallel parallel{api, context};
  if (run_experts(*active_matmul(), call, parallel_for, &parallel) != 0) check(parallel.status);
}

template <ort::ElementType kStored>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    if (index == kGateUpScales || index == kDownScales) return kStored;
    if (index == kGateUpZeros || index == kDownZeros) return ort::kUint8;
    if (index == kGateUpOffsets || index == kDownOffsets) return ort::kFloat16;
    return index == kGateUp || index == kDown ? ort::kUint8 : ort::kFloat;
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

ort::CustomOp experts_operator() { return make_operator<ort::kFloat>(); }
ort::CustomOp experts_half_operator() { return make_operator<ort::kFloat16>(); }
ort::CustomOp experts_fp4_operator() { return make_operator<ort::kUint8>(); }

}  // namespace onnxport::op
