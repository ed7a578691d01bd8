// What the operators' files share: PagedAttention's signature, its kernel's state, and all operators.
#pragma once

#include <memory>

#include "attention.h"
#include "op_values.h"

namespace onnxport::op {

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

ort::CustomOp causal_conv_operator();
ort::CustomOp delta_net_operator();
ort::CustomOp experts_operator();                 // scales in float32
ort::CustomOp experts_half_operator();            // scales in float16
ort::CustomOp experts_fp4_operator();             // scales in E8M0
ort::CustomOp float_experts_operator();           // weights in float32
ort::CustomOp float_experts_half_operator();      // weights in float16
ort::CustomOp float_experts_bfloat16_operator();  // weights in bfloat16
ort::CustomOp head_products_operator();           // weights in float32
ort::CustomOp head_products_half_operator();      // weights in float16
ort::CustomOp head_products_bfloat16_operator();  // weights in bfloat16
ort::CustomOp gather_bfloat16_operator();  // rows of a table in bfloat16
ort::CustomOp gather_floats_operator();    // in float32
ort::CustomOp gather_halves_operator();    // in float16
ort::CustomOp gather_rows_operator();      // in 8 bits, scales in float32
ort::CustomOp gather_rows_half_operator();  // in 8 bits, scales in float16
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
