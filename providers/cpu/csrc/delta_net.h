// Gated delta nets (arXiv:2412.06464) over packed sequences, free of ONNX Runtime. Each value head
// has a state S, [value_size][key_size], which a token changes, with its key k and its value v:
//
//   S = exp(g) * S;  S = S + beta * (v - S k) k^T;  output = scale * S q
//
// Each channel of a key may have a g of its own, that of a column of S (Kimi Delta Attention,
// arXiv:2510.26692). Or, without the delta rule, as state spaces have it (Mamba-2, arXiv:2405.21060):
//
//   S = exp(g) * S;  S = S + step * v k^T;  output = scale * S q
//
// where a step is 1, or the softplus that g has.
#pragma once

#include "attention.h"
#include "state_slots.h"

namespace onnxport {

constexpr int kMostKeySize = 256;

struct DeltaNet {
  StateSlots slots;
  int64_t key_heads, value_heads;  // as many value heads, one behind the other, have the same key
  int64_t key_size, value_size;
  int64_t query_stride, key_stride, value_stride;  // from one token to the next
  float scale;
  bool has_delta_rule;
  bool has_channels;   // with the delta rule: each channel of a key has a decay
  bool has_steps;      // not with the delta rule, and with a_log: steps are no ones
  bool is_normalized;  // queries and keys have length 1 first
  bool has_sigmoid;    // beta is that of what is given
  const float* query;  // [num_tokens][key_heads][key_size]
  const float* key;    // likewise
  const float* value;  // [num_tokens][value_heads][value_size]
  const float* decay;  // [num_tokens][value_heads], or [key_size] of each: g, but for a_log
  const float* beta;   // [num_tokens][value_heads]; null without the delta rule
  const float*
      a_log;  // [value_heads]; g = -exp(a_log) * softplus(decay + dt_bias). Null: it is not
  const float* dt_bias;  // [value_heads], or [key_size] of each; null with a_log
  float* pool;           // [num_slots][value_heads][value_size][key_size]
  float* output;         // [num_tokens][value_heads][value_size]
};

// Throws an InvalidInput where the kernels have no room for the sizes.
void check_sizes(const DeltaNet& net);

// Computes the output, and leaves the states behind the last tokens. Its sizes and slots have been
// checked. Returns zero or what parallel_for returned. Throws std::bad_alloc only. The bits of a
// sequence's result depend on that sequence alone, and not on how its tokens were split into calls.
int run_delta_net(const DeltaNet& net, ParallelFor parallel_for, void* context);

}  // namespace onnxport
