// A depthwise causal convolution over packed sequences, free of ONNX Runtime: of each channel the
// last `taps` inputs of a sequence are weighted and added up. What a sequence had before its new
// tokens is its state, [channels][taps - 1], the latest last.
#pragma once

#include "attention.h"
#include "state_slots.h"

namespace onnxport {

constexpr int kMostTaps = 8;

struct CausalConv {
  StateSlots slots;
  int64_t channels, taps;  // taps: 2 to kMostTaps
  bool has_silu;
  const float* input;    // [num_tokens][channels]
  const float* weights;  // [taps][channels], the latest last
  const float* bias;     // [channels]; null: none
  float* pool;           // [num_slots][channels][taps - 1]
  float* output;         // [num_tokens][channels]
};

// Computes the output, and leaves the states behind the last tokens. Its slots have been checked.
// Returns zero or what parallel_for returned. The bits of a sequence's result depend on that
// sequence alone, and not on how its tokens were split into calls.
int run_causal_conv(const CausalConv& conv, ParallelFor parallel_for, void* context);

}  // namespace onnxport
