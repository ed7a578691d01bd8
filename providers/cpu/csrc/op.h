// What the operator's files share: its signature, its kernel's state, and error reporting by
// exceptions that end at guarded().
#pragma once

#include <exception>
#include <memory>

#include "attention.h"
#include "ort_abi.h"
#include "tensor.h"

namespace onnxport::op {

using ort::Api;
using ort::Status;

enum Input : size_t {
  kQuery,
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kCumulativeLengths,
  kPastLengths,
  kBlockTable,
  kCosine,
  kSine,
  kSlotMapping,
  kHeadSink,
  kQNorm,
  kKNorm,
  kKScale,
  kVScale,
  kMetadata,
  kInputCount
};
// The schema's own names.
constexpr const char* kInputNames[kInputCount] = {"query",
                                                  "key",
                                                  "value",
                                                  "key_cache",
                                                  "value_cache",
                                                  "cumulative_sequence_length",
                                                  "past_seqlens",
                                                  "block_table",
                                                  "cos_cache",
                                                  "sin_cache",
                                                  "slot_mapping",
                                                  "head_sink",
                                                  "q_norm_weight",
                                                  "k_norm_weight",
                                                  "k_scale",
                                                  "v_scale",
                                                  "attention_metadata"};
constexpr size_t kOutputCount = 3;

// Carries an OrtStatus out of nested calls.
struct Failure {
  Status* status;
};

inline void check(Status* status) {
  if (status) throw Failure{status};
}

// Throws a Failure with a formatted message: what was found, what is allowed.
[[noreturn]] void fail(const Api& api, ort::ErrorCode code, const char* format, ...);

// Throws a Failure that calls the value by `name`.
Tensor describe(const Api& api, const char* name, const ort::Value* value);

// An input that may not be there: null.
const ort::Value* optional_input(const Api& api, const ort::KernelContext* context, size_t index);

// Memory of the output 0, which gets the shape of a tensor.
void* open_output(const Api& api, ort::KernelContext* context, const Tensor& shape);

// What all our operators have in common: none of their outputs is an input's memory unless they say
// so. The rest is null.
ort::CustomOp base_operator();

ort::CustomOp experts_operator();                 // scales in float32
ort::CustomOp experts_half_operator();            // scales in float16
ort::CustomOp experts_fp4_operator();             // scales in E8M0
ort::CustomOp float_experts_operator();           // weights in float32
ort::CustomOp float_experts_half_operator();      // weights in float16
ort::CustomOp float_experts_bfloat16_operator();  // weights in bfloat16
ort::CustomOp gated_silu_operator();
ort::CustomOp gated_gelu_operator();
ort::CustomOp lora_operator();       // adapters in float32
ort::CustomOp lora_half_operator();  // adapters in float16
ort::CustomOp lora_int8_operator();  // adapters in int8 and int4
ort::CustomOp matmul_operator();       // scales in float32
ort::CustomOp matmul_half_operator();  // scales in float16
ort::CustomOp mlp_operator();
ort::CustomOp mlp_half_operator();
ort::CustomOp states_operator();

// A call's way to the session's threads; parallel_for takes it as its context and leaves the status
// of a failure there.
struct Parallel {
  const Api& api;
  const ort::KernelContext* context;
  Status* status = nullptr;
};
int parallel_for(void* context, size_t count, Task task, void* argument);

Status* invalid_input(const Api& api, const InvalidInput& error);

// Runs f and turns whatever it throws into a status: no exception crosses the C boundary.
template <class F>
Status* guarded(const Api& api, F f) noexcept {
  try {
    f();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const InvalidInput& invalid) {
    return invalid_input(api, invalid);
  } catch (const std::exception& error) {
    return api.create_status(ort::kFail, error.what());
  } catch (...) {
    return api.create_status(ort::kFail, "onnxport CPU operator: unknown error");
  }
}

// Lets an operator make kernels, whose member `api` is the session's, and run them. Both may throw.
template <class K, std::unique_ptr<K> (*kMake)(const Api&, const ort::KernelInfo*),
          void (*kCompute)(const K&, ort::KernelContext*)>
void set_kernel(ort::CustomOp& op) {
  op.create_kernel = [](const ort::CustomOp*, const void* const* table,
                        const ort::KernelInfo* info, void** out) -> Status* {
    const Api api{table};
    return guarded(api, [&] { *out = kMake(api, info).release(); });
  };
  op.destroy_kernel = [](void* kernel) { delete static_cast<K*>(kernel); };
  op.compute = [](void* state, ort::KernelContext* context) -> Status* {
    const K& kernel = *static_cast<const K*>(state);
    return guarded(kernel.api, [&] { kCompute(kernel, context); });
  };
}

// One node: what its attributes say.
struct Kernel {
  Api api;
  Problem settings;  // a call fills in the rest
  bool do_rotary;
  bool has_scale;
};

// Reads the node's attributes; throws a Failure for what the kernel cannot do.
std::unique_ptr<Kernel> make_kernel(const Api& api, const ort::KernelInfo* info,
                                    ort::ElementType cache_type);

// Runs the node once. Throws.
void compute(const Kernel& kernel, ort::KernelContext* context);

}  // namespace onnxport::op
