// Compiled with -ffp-contract=off.
#include "routing.h"

#include <cfloat>
#include <cmath>

#include "half.h"

namespace onnxport {
namespace {

constexpr int kLanes = 8;  // of sums, so that they become vectors

// exp(x) of x <= 0 with an error of some 1e-7 of it, as Cephes has it, without branches; 0 below
// -87. The C library's own has other bits on other machines.
inline float power(float x) {
  const float bounded = x > -87.f ? x : -87.f;
  // Adding and subtracting 1.5 * 2^23 rounds to an integer.
  const float exponent = (bounded * 1.44269504f + 12582912.f) - 12582912.f;
  const float rest = (bounded - exponent * 0.693359375f) - exponent * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * rest + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * (rest * rest) + rest + 1.f;
  const int32_t bits = (static_cast<int32_t>(exponent) + 127) * (1 << 23);
  return x > -87.f ? y * bits_float(static_cast<uint32_t>(bits)) : 0.f;
}

// Of all experts' powers, not of those chosen.
float sum_of_powers(const float* logits, int64_t count, float best) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; lane++) sums[lane] += power(logits[i + lane] - best);
  for (int lane = 0; i < count; i++, lane++) sums[lane] += power(logits[i] - best);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
  return sums[0];
}

bool has_nan(const float* logits, int64_t count) {
  int found = 0;
  for (int64_t i = 0; i < count; i++) found |= logits[i] != logits[i];
  return found != 0;
}

// Few of many logits are among the largest so far, so that most are looked at once. A NaN is larger
// than none.
void choose(const float* logits, int64_t count, int64_t top_k, int32_t* experts) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++) {
    const float logit = logits[i];
    if (kept == top_k && !(logit > logits[experts[top_k - 1]])) continue;
    int64_t place = kept < top_k ? kept++ : top_k - 1;
    for (; place > 0 && logit > logits[experts[place - 1]]; place--)
      experts[place] = experts[place - 1];
    experts[place] = static_cast<int32_t>(i);
  }
}

}  // namespace

void route(const Routing& routing, const float* logits, int32_t* experts, float* weights) {
  const int64_t top_k = routing.top_k;
  choose(logits, routing.num_experts, top_k, experts);
  const float best = logits[experts[0]];
  if (!(std::fabs(best) <= FLT_MAX) || has_nan(logits, routing.num_experts)) {
    for (int64_t i = 0; i < top_k; i++) weights[i] = NAN;
    return;
  }
  float sum = 0.f;
  for (int64_t i = 0; i < top_k; i++) {
    weights[i] = power(logits[experts[i]] - best);
    sum += weights[i];
  }
  if (!routing.normalizes) sum = sum_of_powers(logits, routing.num_experts, best);
  for (int64_t i = 0; i < top_k; i++) weights[i] /= sum;
}

void combine(const float* parts, const int32_t* places, const float* weights, int64_t count,
             int64_t size, float* output) {
  const float* part = parts + places[0] * size;
  for (int64_t i = 0; i < size; i++) output[i] = weights[0] * part[i];
  for (int64_t k = 1; k < count; k++) {
    part = parts + places[k] * size;
    for (int64_t i = 0; i < size; i++) output[i] += weights[k] * part[i];
  }
}

}  // namespace onnxport
