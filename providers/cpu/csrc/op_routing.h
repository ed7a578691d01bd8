// What operators of experts have in common: which of them a row is given to, and what is between
// their products.
#pragma once

#include "kernels.h"
#include "op.h"
#include "routing.h"

namespace onnxport::op {

// The attributes num_experts, top_k and normalize. Throws a Failure for what no layer can have.
Routing read_routing(const Api& api, const ort::KernelInfo* info, const char* op);

// The attributes alpha, up_offset and limit; without any it is a SiLU. Throws likewise.
Swiglu read_swiglu(const Api& api, const ort::KernelInfo* info, const char* op);

bool is_silu(const Swiglu& swiglu);

// The attribute is_gelu, see Gate. Throws a Failure beside what a SiLU has not.
bool read_is_gelu(const Api& api, const ort::KernelInfo* info, const char* op,
                  const Swiglu& swiglu);

// Throws a Failure where the attribute is_relu2, see Gate, is beside what has a gate.
void check_relu2(const Api& api, const ort::KernelInfo* info, const char* op,
                 const Swiglu& swiglu);

// The router's, input 1: [rows][num_experts]. Throws a Failure where they are not.
const float* read_logits(const Api& api, const ort::KernelContext* context, const char* op,
                         int64_t rows, int64_t num_experts);

}  // namespace onnxport::op
