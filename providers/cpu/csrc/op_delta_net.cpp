// onnxport.GatedDeltaNet: com.microsoft.GatedDeltaNet on states that stay in a pool.
#include <cmath>
#include <memory>

#include "delta_net.h"
#include "op_pools.h"
#include "op_weights.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "GatedDeltaNet";

enum DeltaInput : size_t {
  kDeltaQuery,  // all three where there is no other
  kDeltaKey,
  kDeltaValue,
  kDeltaDecay,
  kDeltaBeta,
  kDeltaALog,
  kDeltaDtBias,
  kDeltaPool,
  kDeltaLengths,
  kDeltaReads,
  kDeltaWrites,
  kDeltaInputs
};

struct DeltaKernel {
  Api api;
  DeltaNet settings;  // a call fills in the rest
};

// Whether the attribute says so; throws a Failure where it is neither that nor "none".
bool is_text(const Api& api, const ort::KernelInfo* info, const char* name, const char* wanted) {
  const std::string found = read_text(api, info, kName, name, "none");
  if (found != wanted && found != "none")
    fail(api, ort::kInvalidArgument, "%s: %s must be none or %s, found %s", kName, name, wanted,
         found.c_str());
  return found == wanted;
}

std::unique_ptr<DeltaKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  DeltaNet net{};
  net.scale = read_float(api, info, "scale", 0.f);
  if (!std::isfinite(net.scale))
    fail(api, ort::kInvalidArgument, "%s: scale must be finite, found %g", kName,
         static_cast<double>(net.scale));
  const std::string rule = read_text(api, info, kName, "update_rule", "gated_delta");
  if (rule != "gated_delta" && rule != "gated")
    fail(api, ort::kInvalidArgument, "%s: update_rule must be gated_delta or gated, found %s",
         kName, rule.c_str());
  net.has_delta_rule = rule == "gated_delta";
  net.has_steps = has_flag(api, info, "steps");
  if (net.has_steps && net.has_delta_rule)
    fail(api, ort::kInvalidArgument, "%s: steps do not go with the update_rule gated_delta", kName);
  net.has_channels = has_flag(api, info, "channel_decay");
  if (net.has_channels && !net.has_delta_rule)
    fail(api, ort::kInvalidArgument,
         "%s: channel_decay goes with the update_rule gated_delta alone", kName);
  net.is_normalized = has_flag(api, info, "qk_l2_norm");
  net.has_sigmoid = is_text(api, info, "beta_activation", "sigmoid");
  auto kernel = std::make_unique<DeltaKernel>(DeltaKernel{api, net});
  return kernel;
}

// Queries, keys and values, of one input or of three.
void read_projections(const PoolCall& call, DeltaNet& net) {
  const int64_t value_width = net.value_heads * net.value_size;
  const Tensor query = call.rows(kDeltaQuery, "query");
  net.slots.num_tokens = query.dims[0];
  net.query = query.as<const float>();
  net.query_stride = query.dims[1];
  const bool is_packed = !call.has(kDeltaKey) && !call.has(kDeltaValue);
  const int64_t key_width = is_packed ? (query.dims[1] - value_width) / 2 : query.dims[1];
  net.key_heads = key_width / net.key_size;
  const int64_t width = key_width * (is_packed ? 2 : 1) + (is_packed ? value_width : 0);
  if (net.key_heads < 1 || key_width % net.key_size || width != query.dims[1])
    call.refuse_width("query", query.dims[1], net.key_size, is_packed ? value_width : 0);
  if (is_packed) {
    net.key = net.query + key_width;
    net.value = net.key + key_width;
    net.key_stride = net.value_stride = net.query_stride;
    return;
  }
  const int64_t tokens = net.slots.num_tokens;
  net.key = call.rows(kDeltaKey, "key", tokens, key_width).as<const float>();
  net.value = call.rows(kDeltaValue, "value", tokens, value_width).as<const float>();
  net.key_stride = key_width;
  net.value_stride = value_width;
}

void compute(const DeltaKernel& kernel, ort::KernelContext* context) {
  const PoolCall call(kernel.api, context, kName);
  DeltaNet net = kernel.settings;
  const Tensor pool = call.tensor(kDeltaPool, "pool", {-1, -1, -1, -1});
  net.value_heads = pool.dims[1];
  net.value_size = pool.dims[2];
  net.key_size = pool.dims[3];
  if (net.scale == 0.f)
    net.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(net.key_size)));
  if (net.key_size > 0) read_projections(call, net);
  check_sizes(net);
  const int64_t tokens = net.slots.num_tokens;
  const int64_t decays = net.value_heads * (net.has_channels ? net.key_size : 1);
  net.decay = call.tensor(kDeltaDecay, "decay", {tokens, decays}).as<const float>();
  if (call.has(kDeltaBeta) != net.has_delta_rule)
    fail(kernel.api, ort::kInvalidArgument, "%s: beta must be given with the delta rule alone",
         kName);
  if (net.has_delta_rule)
    net.beta = call.tensor(kDeltaBeta, "beta", {tokens, net.value_heads}).as<const float>();
  if (call.has(kDeltaALog) != call.has(kDeltaDtBias))
    fail(kernel.api, ort::kInvalidArgument, "%s: a_log and dt_bias must be given together", kName);
  if (net.has_steps && !call.has(kDeltaALog))
    fail(kernel.api, ort::kInvalidArgument, "%s: steps are made with a_log and dt_bias", kName);
  if (call.has(kDeltaALog)) {
    net.a_log = call.tensor(kDeltaALog, "a_log", {net.value_heads}).as<const float>();
    net.dt_bias = call.tensor(kDeltaDtBias, "dt_bias", {decays}).as<const float>();
  }
  net.slots = call.slots(tokens, pool.dims[0], kDeltaLengths);
  Tensor output;
  output.rank = 3;
  output.dims[0] = tokens;
  output.dims[1] = net.value_heads;
  output.dims[2] = net.value_size;
  net.output = static_cast<float*>(open_output(kernel.api, context, output));
  net.pool = call.open_pool(pool);
  Parallel parallel{kernel.api, context};
  if (run_delta_net(net, parallel_for, &parallel) != 0) check(parallel.status);
}

}  // namespace

ort::CustomOp delta_net_operator() {
  ort::CustomOp op = pool_operator<kDeltaPool, kDeltaLengths, kDeltaInputs>();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    const bool is_optional = index == kDeltaKey || index == kDeltaValue || index == kDeltaBeta ||
                             index == kDeltaALog || index == kDeltaDtBias;
    return is_optional ? ort::kOptional : ort::kRequired;
  };
  set_kernel<DeltaKernel, make_kernel, compute>(op);
  return op;
}

}  // namespace onnxport::op
