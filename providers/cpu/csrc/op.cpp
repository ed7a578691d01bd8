// Registers our own operators, and com.microsoft.PagedAttention with ONNX Runtime's CPU execution
// provider, which has no such kernel. Registering the name in its own domain overrides the built-in
// schema, so artifacts run unchanged, in float32 too.
#include "op.h"

namespace onnxport::op {
namespace {

struct Operator {
  ort::CustomOp op;  // first, so that a pointer to it is a pointer to this
  ort::ElementType cache_type;
};

int input_type(const ort::CustomOp* op, size_t index) {
  switch (index) {
    case kKeyCache:
    case kValueCache: return reinterpret_cast<const Operator*>(op)->cache_type;
    case kCumulativeLengths:
    case kPastLengths:
    case kBlockTable:
    case kSlotMapping:
    case kMetadata: return ort::kInt32;
    default: return ort::kFloat;
  }
}

int input_characteristic(const ort::CustomOp*, size_t index) {
  switch (index) {
    case kQuery:
    case kKeyCache:
    case kCumulativeLengths:
    case kPastLengths:
    case kBlockTable: return ort::kRequired;
    default: return ort::kOptional;
  }
}

// The outputs that are the inputs' own memory.
size_t cache_aliases(int** inputs, int** outputs) {
  static int from[] = {kKeyCache, kValueCache};
  static int to[] = {1, 2};
  *inputs = from;
  *outputs = to;
  return 2;
}

Status* create_kernel(const ort::CustomOp* op, const void* const* table,
                      const ort::KernelInfo* info, void** out) {
  const Api api{table};
  return guarded(api, [&] {
    *out = make_kernel(api, info, reinterpret_cast<const Operator*>(op)->cache_type).release();
  });
}

Status* compute_kernel(void* state, ort::KernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(state);
  return guarded(kernel.api, [&] { compute(kernel, context); });
}

Operator make_operator(ort::ElementType cache_type) {
  Operator result{base_operator(), cache_type};
  ort::CustomOp& op = result.op;
  op.name = [](const ort::CustomOp*) { return "PagedAttention"; };
  op.input_type = input_type;
  op.input_type_count = [](const ort::CustomOp*) { return size_t{kInputCount}; };
  op.output_type = [](const ort::CustomOp* self, size_t index) -> int {
    return index == 0 ? ort::kFloat : reinterpret_cast<const Operator*>(self)->cache_type;
  };
  op.output_type_count = [](const ort::CustomOp*) { return kOutputCount; };
  op.destroy_kernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.input_characteristic = input_characteristic;
  op.output_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index == 0 ? ort::kRequired : ort::kOptional;
  };
  op.create_kernel = create_kernel;
  op.compute = compute_kernel;
  op.may_inplace = op.alias_map = cache_aliases;
  return result;
}

}  // namespace

Status* register_operators(ort::SessionOptions* options, const ort::ApiBase* base) {
  const void* const* table = base->get_api(ort::kApiVersion);
  if (!table) {
    // Every release knows the first version, and with it how to say so.
    return Api{base->get_api(1)}.create_status(
        ort::kNotImplemented, "onnxport's CPU operators need ONNX Runtime 1.24 or newer");
  }
  const Api api{table};
  // One operator for each cache type under the same name. The last two exist to be refused with
  // our words rather than as an unknown type.
  static const Operator operators[] = {
      make_operator(ort::kFloat), make_operator(ort::kFloat16), make_operator(ort::kBFloat16),
      make_operator(ort::kInt8),  make_operator(ort::kUint8),   make_operator(ort::kFloat8E4M3FN)};
  static const ort::CustomOp own_operators[] = {
      gather_bfloat16_operator(),
      gather_floats_operator(),
      gather_halves_operator(),
      gather_rows_operator(),
      gather_rows_half_operator(),
      gated_silu_operator(),
      gated_gelu_operator(),
      lora_operator(),
      lora_half_operator(),
      lora_int8_operator(),
      matmul_operator(),
      matmul_half_operator(),
      mlp_operator(),
      mlp_half_operator(),
      experts_operator(),
      experts_half_operator(),
      experts_fp4_operator(),
      float_experts_operator(),
      float_experts_half_operator(),
      float_experts_bfloat16_operator(),
      head_products_operator(),
      head_products_half_operator(),
      head_products_bfloat16_operator(),
      states_operator(),
      causal_conv_operator(),
      delta_net_operator()};
  return guarded(api, [&] {
    // The runtime keeps pointers to the domain and the operators; neither is ever freed.
    ort::CustomOpDomain* domain = nullptr;
    check(api.create_domain("com.microsoft", &domain));
    for (const Operator& op : operators) check(api.add_operator(domain, &op.op));
    check(api.add_domain(options, domain));
    ort::CustomOpDomain* own = nullptr;
    check(api.create_domain("onnxport", &own));
    for (const ort::CustomOp& op : own_operators) check(api.add_operator(own, &op));
    check(api.add_domain(options, own));
  });
}

}  // namespace onnxport::op

#if defined(_WIN32)
#define ONNXPORT_EXPORT extern "C" __declspec(dllexport)
#else
#define ONNXPORT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The entry point that SessionOptions.register_custom_ops_library looks for.
ONNXPORT_EXPORT onnxport::ort::Status* ONNXPORT_ORT_CALL
RegisterCustomOps(onnxport::ort::SessionOptions* options, const onnxport::ort::ApiBase* base) {
  return onnxport::op::register_operators(options, base);
}
