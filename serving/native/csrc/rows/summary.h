// What is known of a row of logits without reading it: largest and smallest values and sums, chunk by
// chunk. Whoever computes a row can tell while it is in the nearest cache, which the CPU provider's
// operators do; the sampler makes it where nobody did. Both compile it from summary_impl.h, and every
// instruction set gets the same bits.
#pragma once

#include <stdint.h>

namespace onnxport::rows {

constexpr int64_t kChunk = 1024;  // values that are looked at together
constexpr int64_t kGroup = 64;    // of these, side by side
constexpr int64_t kGroups = kChunk / kGroup;

// How much of a row is known, in the place of its scale.
constexpr float kNothing = -1.f;  // nothing at all
constexpr float kNoSums = 0.f;    // all but the sums

// Views into a row's summary, of summary_floats.
struct Summary {
  float* groups;   // [chunks][kGroups], their largest values; -inf if all are, or are NaN, or none is
  float* largest;  // [chunks], of all of a chunk
  float* least;    // [chunks], its smallest one, or -inf where nobody looked; NaN if one is NaN
  float* sums;     // [chunks], of exp2((x - largest) * scale); 0 where the largest is not finite
  float* scale;    // [1], of the sums, above 0; or how much is known
};

static inline int64_t num_chunks(int64_t count) { return (count + kChunk - 1) / kChunk; }

// Of a row of `count` values.
static inline int64_t summary_floats(int64_t count) {
  return num_chunks(count) * (kGroups + 3) + 1;
}

static inline Summary summary_at(float* memory, int64_t count) {
  const int64_t chunks = num_chunks(count);
  float* const largest = memory + chunks * kGroups;
  return {memory, largest, largest + chunks, largest + 2 * chunks, largest + 3 * chunks};
}

}  // namespace onnxport::rows
