#include "op_routing.h"

#include <cmath>

#include "op_weights.h"

namespace onnxport::op {

Routing read_routing(const Api& api, const ort::KernelInfo* info, const char* op) {
  Routing routing{};
  routing.num_experts = read_attribute(api, info, "num_experts");
  routing.top_k = read_attribute(api, info, "top_k");
  const int64_t normalize = read_attribute(api, info, "normalize");
  if (routing.num_experts < 1 || routing.num_experts > INT32_MAX)
    fail(api, ort::kInvalidArgument, "%s: num_experts must be 1 or more, found %lld", op,
         static_cast<long long>(routing.num_experts));
  if (routing.top_k < 1 || routing.top_k > routing.num_experts)
    fail(api, ort::kInvalidArgument, "%s: top_k must be 1 to num_experts, %lld, found %lld", op,
         static_cast<long long>(routing.num_experts), static_cast<long long>(routing.top_k));
  if (normalize != 0 && normalize != 1)
    fail(api, ort::kInvalidArgument, "%s: normalize must be 0 or 1, found %lld", op,
         static_cast<long long>(normalize));
  routing.normalizes = normalize != 0;
  return routing;
}

Swiglu read_swiglu(const Api& api, const ort::KernelInfo* info, const char* op) {
  Swiglu own;
  own.alpha = read_float(api, info, "alpha", own.alpha);
  own.up_offset = read_float(api, info, "up_offset", own.up_offset);
  own.limit = read_float(api, info, "limit", own.limit);
  if (!(own.alpha > 0 && std::isfinite(own.alpha)))
    fail(api, ort::kInvalidArgument, "%s: alpha must be positive, found %g", op,
         static_cast<double>(own.alpha));
  if (!std::isfinite(own.up_offset))
    fail(api, ort::kInvalidArgument, "%s: up_offset must be finite, found %g", op,
         static_cast<double>(own.up_offset));
  if (!(own.limit > 0))
    fail(api, ort::kInvalidArgument, "%s: limit must be positive, found %g", op,
         static_cast<double>(own.limit));
  return own;
}

bool is_silu(const Swiglu& swiglu) {
  const Swiglu silu;
  return swiglu.alpha == silu.alpha && swiglu.up_offset == silu.up_offset &&
         swiglu.limit == silu.limit;
}

bool read_is_gelu(const Api& api, const ort::KernelInfo* info, const char* op,
                  const Swiglu& swiglu) {
  const bool is_gelu = has_flag(api, info, "is_gelu");
  if (is_gelu && !is_silu(swiglu))
    fail(api, ort::kInvalidArgument, "%s: is_gelu excludes alpha, up_offset and limit", op);
  return is_gelu;
}

void check_relu2(const Api& api, const ort::KernelInfo* info, const char* op,
                 const Swiglu& swiglu) {
  if (has_flag(api, info, "is_relu2") && (!is_silu(swiglu) || has_flag(api, info, "is_gelu")))
    fail(api, ort::kInvalidArgument, "%s: is_relu2 excludes is_gelu, alpha, up_offset and limit",
         op);
}

const float* read_logits(const Api& api, const ort::KernelContext* context, const char* op,
                         int64_t rows, int64_t num_experts) {
  const ort::Value* value = nullptr;
  check(api.input(context, 1, &value));
  const Tensor logits = describe(api, "router_logits", value);
  const int64_t last = logits.dims[logits.rank - 1];
  if (last != num_experts || elements(logits) != rows * num_experts)
    fail(api, ort::kInvalidArgument,
         "%s: router_logits must have %lld experts of each of A's %lld rows, found %lld elements "
         "with a last dimension of %lld",
         op, static_cast<long long>(num_experts), static_cast<long long>(rows),
         static_cast<long long>(elements(logits)), static_cast<long long>(last));
  return logits.as<const float>();
}

}  // namespace onnxport::op
