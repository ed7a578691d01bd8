// Making a summary, for the instruction set of the file that includes this, which must not contract
// products and sums (-ffp-contract=off). Nothing here may be shared with other objects.
#pragma once

#include "summary.h"
#include "vec16.h"

namespace {

// The largest lane, and the smallest one, none of which is NaN.
static inline float largest_of(const Vec& x) {
  Floats most = x.part[0];
  for (int p = 1; p < kParts; p++) most = x.part[p] > most ? x.part[p] : most;
  for (int lanes = kPartLanes; lanes > 1; lanes /= 2) {
    const Floats even = evens(most, most), odd = odds(most, most);
    most = odd > even ? odd : even;
  }
  return most[0];
}

static inline float least_of(const Vec& x) {
  return -largest_of(each([&](int p) { return -x.part[p]; }));
}

static inline double sum_of(const Vec& x) {
  float lanes[kLanes];
  store(lanes, x);
  double total = 0.0;
  for (int i = 0; i < kLanes; i++) total += lanes[i];
  return total;
}

// Calls f(values from `place` on, place) for 16 values at a time; behind the last come `other`.
template <class F>
static inline void sixteens(const float* values, int64_t begin, int64_t end, float other, F f) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) f(load(values + i), i);
  if (i < end) f(load_some(values + i, end - i, other), i);
}

// What values range over, lane by lane.
struct Ranges {
  Vec most = splat(-INFINITY), least = splat(INFINITY);
  Found nan[kParts] = {};

  // Takes values [begin, end) in. Meanwhile asks for what is as far from `ahead` as these are from
  // `values`, to be in the second cache, which waits for more lines at once; null: for nothing.
  void take(const float* values, int64_t begin, int64_t end, const float* ahead) {
    int64_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      if (ahead) {
        __builtin_prefetch(ahead + i, 0, 2);
        __builtin_prefetch(ahead + i + kLanes, 0, 2);
      }
      const Vec x = load(values + i), y = load(values + i + kLanes);
      most = larger(larger(most, x), y);
      least = smaller(smaller(least, x), y);
      for (int p = 0; p < kParts; p++) nan[p] |= is_nan(x.part[p], y.part[p]);
    }
    for (; i < end; i += kLanes) {  // behind the last value come -inf, and +inf
      const Vec x = load_some(values + i, end - i, -INFINITY);
      most = larger(most, x);
      least = smaller(least, load_some(values + i, end - i, INFINITY));
      for (int p = 0; p < kParts; p++) nan[p] |= is_nan(x.part[p], x.part[p]);
    }
  }

  bool has_nan() const {
    bool has = false;
    for (int p = 0; p < kParts; p++) has |= any(nan[p]);
    return has;
  }
};

// Meanwhile asks for what is as far from `ahead` as these are from `values`; null: for nothing.
static inline Vec sum_weights(const float* values, int64_t begin, int64_t end, float maximum,
                              float scale, const float* ahead) {
  Vec sum = splat(0.f);
  sixteens(values, begin, end, -INFINITY, [&](const Vec& x, int64_t place) {
    if (ahead) __builtin_prefetch(ahead + place);
    sum = add(sum, weight(x, maximum, scale));
  });
  return sum;
}

// The sum of the weights of a chunk whose largest value is known, as Summary has it.
static inline float weigh_chunk(const float* row, int64_t begin, int64_t end, float largest,
                                float scale, const float* ahead) {
  if (!(largest > -INFINITY && largest < INFINITY)) return 0.f;
  return static_cast<float>(sum_of(sum_weights(row, begin, end, largest, scale, ahead)));
}

// Of two zeros either is the largest, by the order in which they are looked at; so each is written as
// 0, which -0 becomes once 0 is added.
//
// Summarizes values [begin, end) of a row, whole chunks and the end of the row; see Ranges::take.
// Without sums unless the scale is above 0; the summary's own scale is left to the caller.
static inline void summarize_part(const float* row, int64_t begin, int64_t end, float scale,
                                  const float* ahead, const onnxport::rows::Summary& to) {
  using onnxport::rows::kChunk;
  using onnxport::rows::kGroup;
  static_assert(kLanes == onnxport::rows::kGroups, "groups get a lane each");
  for (int64_t first = begin; first < end; first += kChunk) {
    const int64_t last = first + kChunk < end ? first + kChunk : end, chunk = first / kChunk;
    Ranges ranges;
    Vec most[kLanes];
    for (int64_t i = 0; i < kLanes; i++) {
      const int64_t group = first + i * kGroup;
      ranges.most = splat(-INFINITY);
      ranges.take(row, group, group + kGroup < last ? group + kGroup : last, ahead);
      most[i] = ranges.most;
    }
    const Vec groups = add(largest_lanes(most), splat(0.f));
    store(to.groups + chunk * kLanes, groups);
    const float largest = largest_of(groups);
    to.largest[chunk] = largest;
    to.least[chunk] = ranges.has_nan() ? NAN : least_of(ranges.least) + 0.f;
    if (scale > 0.f) to.sums[chunk] = weigh_chunk(row, first, last, largest, scale, nullptr);
  }
}

}  // namespace
