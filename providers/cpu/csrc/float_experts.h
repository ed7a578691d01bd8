// The experts of a mixture-of-experts layer with weights in floats, free of ONNX Runtime: see
// experts.h, but nothing is rounded. Weights are read where they are stored.
#pragma once

#include "kernels.h"
#include "routing.h"

namespace onnxport {

struct FloatExperts {
  CacheType type;           // of the weights, but for kInt8
  int64_t depth, inner, n;  // numbers of a row, between the products, and of an output
  // [num_experts][parts * inner][depth], a row of gate, then the same one of up, if there is one.
  const void* gate_up;
  const void* down;     // [num_experts][n][inner]
  const float* gate_up_bias;  // [num_experts][parts * inner], likewise; null: none
  const float* down_bias;     // [num_experts][n]; null: none
  const Swiglu* swiglu;       // null: a SiLU, or a GELU
  bool is_gelu, is_relu2;     // see Gate
  Routing routing;

  int64_t rows;
  const float* input;   // [rows][depth]
  const float* logits;  // [rows][num_experts]
  float* output;        // [rows][n]

  // Rows of gate_up that make a feature.
  int64_t parts() const { return is_relu2 ? 1 : 2; }
};

// Computes the output. Returns zero or what parallel_for returned. Throws std::bad_alloc only. The
// bits of a row's result depend on that row and the weights alone.
int run_float_experts(const FloatExperts& experts, ParallelFor parallel_for, void* context);

}  // namespace onnxport
