// onnxport.CausalConv: com.microsoft.VarlenCausalConvWithState on states that stay in a pool.
#include <memory>
#include <vector>

#include "causal_conv.h"
#include "op_pools.h"
#include "op_weights.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "CausalConv";

enum ConvInput : size_t { kInput, kWeight, kBias, kPool, kLengths, kReads, kWrites, kConvInputs };

struct ConvKernel {
  Api api;
  CausalConv settings;         // a call fills in the rest
  std::vector<float> weights;  // [taps][channels]
};

int64_t read_count(const Api& api, const ort::KernelInfo* info, const char* name, int64_t least,
                   int64_t most) {
  const int64_t value = read_attribute(api, info, name);
  if (value < least || value > most)
    fail(api, ort::kInvalidArgument, "%s: %s must be %lld to %lld, found %lld", kName, name,
         static_cast<long long>(least), static_cast<long long>(most),
         static_cast<long long>(value));
  return value;
}

std::unique_ptr<ConvKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  CausalConv conv{};
  conv.channels = read_count(api, info, "channels", 1, INT32_MAX);
  conv.taps = read_count(api, info, "taps", 2, kMostTaps);
  const std::string activation = read_text(api, info, kName, "activation", "none");
  if (activation != "none" && activation != "silu")
    fail(api, ort::kInvalidArgument, "%s: activation must be none or silu, found %s", kName,
         activation.c_str());
  conv.has_silu = activation == "silu";
  const int64_t count = conv.channels * conv.taps;
  const auto* stored =
      static_cast<const float*>(read_floats(api, info, kName, kWeight, "weight", count));
  MatMul all{};
  all.n = conv.channels;
  conv.bias = read_bias(api, info, kName, all, kBias);
  auto kernel = std::make_unique<ConvKernel>(
      ConvKernel{api, conv, std::vector<float>(static_cast<size_t>(count))});
  for (int64_t tap = 0; tap < conv.taps; tap++)
    for (int64_t channel = 0; channel < conv.channels; channel++)
      kernel->weights[static_cast<size_t>(tap * conv.channels + channel)] =
          stored[channel * conv.taps + tap];
  return kernel;
}

void compute(const ConvKernel& kernel, ort::KernelContext* context) {
  const PoolCall call(kernel.api, context, kName);
  CausalConv conv = kernel.settings;
  if (!conv.bias) refuse_input(kernel.api, context, kName, kBias, "bias");
  const Tensor input = call.tensor(kInput, "input", {-1, conv.channels});
  const Tensor pool = call.tensor(kPool, "pool", {-1, conv.channels, conv.taps - 1});
  conv.slots = call.slots(input.dims[0], pool.dims[0], kLengths);
  conv.input = input.as<const float>();
  conv.weights = kernel.weights.data();
  conv.output = static_cast<float*>(open_output(kernel.api, context, input));
  conv.pool = call.open_pool(pool);
  Parallel parallel{kernel.api, context};
  if (run_causal_conv(conv, parallel_for, &parallel) != 0) check(parallel.status);
}

}  // namespace

ort::CustomOp causal_conv_operator() {
  ort::CustomOp op = pool_operator<kPool, kLengths, kConvInputs>();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index == kBias ? ort::kOptional : ort::kRequired;
  };
  set_kernel<ConvKernel, make_kernel, compute>(op);
  return op;
}

}  // namespace onnxport::op
