// To which experts a row goes, and the sum of what they make of it. No instruction set has its own
// code for this, and the compiler may not contract it: it has the same bits everywhere.
#pragma once

#include <cstdint>

namespace onnxport {

struct Routing {
  int64_t num_experts, top_k;
  bool normalizes;  // weights are divided by their sum
};

// The top_k experts with the largest logits of a row, in descending order, and of equal ones the
// first, and their weights, softmax(logits) of them. Where a logit is NaN or the largest one is not
// finite, any experts, each of them once, and weights that are NaN.
void route(const Routing& routing, const float* logits, int32_t* experts, float* weights);

// output[i] = weights[0] * parts[places[0]][i] + weights[1] * parts[places[1]][i] ..., in this order,
// where parts are [..][size].
void combine(const float* parts, const int32_t* places, const float* weights, int64_t count,
             int64_t size, float* output);

}  // namespace onnxport
