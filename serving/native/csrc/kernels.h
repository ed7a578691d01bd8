// What one instruction set offers to the code that decides: passes over long arrays. Each set is
// compiled from kernels_impl.h with its own flags; all get the same bits.
#pragma once

#include <stdint.h>

#include "rows/summary.h"

namespace onnxport {

using rows::kChunk;  // floats that are summed up, or weighed, together
using rows::kGroup;
using rows::kGroups;
using rows::num_chunks;
constexpr int64_t kSlack = 16;  // floats behind a result that may be overwritten
constexpr int32_t kBuckets = 1024;

struct Range {
  float maximum;  // -inf if all are, or are NaN
  float minimum;  // +inf if all are +inf, or NaN
  bool has_nan;
};

// weight(x) = exp((x - maximum) / temperature); `scale` is log2(e) / temperature.
struct Weighing {
  float maximum;
  float scale;
};

// How near the probability of a value, its weight times `per_weight`, is to a target: it is drawn by
// exp(-sharpness d^2 / (1 + d)), where d is their distance over a width (llama.cpp's adaptive_p).
struct Nearness {
  static constexpr float kSharpness = 10.f, kWidth = 0.3f;
  float per_weight;
  float target;
};

// Numbers values from the largest, `top`, down: min((top - x) * per_unit, kBuckets - 1).
struct Bucketing {
  float top;
  float per_unit;
};

// Values from `lower` up to, and without, `upper`.
struct Bracket {
  float lower;
  float upper;
};

// What lies above each of two brackets, and inside of either.
struct Split {
  double above[2];  // the sums of the weights
  int64_t size;     // how many are inside
  float* found;     // them, as gather does
  int32_t* places;
};

// Of some values the sums of the weights, and of each times its logarithm to the base 2.
struct Tally {
  static constexpr int kEdges = 3;
  double weights, logs;
  double above[kEdges];  // the weights of those that are at least an edge
};

// Three brackets, none of which reaches above the end of the one before.
struct Brackets {
  Bracket each[3];
};

// Of the finite ones of some values, as far as they are below the largest of all.
struct Moments {
  double sum, squares, count;
};

// Of values within reach of the largest of all: the sums of their weights at the temperature 1, and of these
// times how far each is below it; and how many of all are finite.
struct Spread {
  double weights, products, count;
};

struct Kernels {
  const char* name;

  // The range of values[count].
  Range (*scan)(const float* values, int64_t count);

  // The summary of values[count], with sums of weights where the scale is above 0.
  void (*summarize)(const float* values, int64_t count, float scale, const rows::Summary& to);

  // Makes the sums of a summary that lacks them, or has others.
  void (*weigh_chunks)(const float* values, int64_t count, float scale, const rows::Summary& to);

  // The sums of the weights of each chunk, double [chunks].
  void (*sums)(const float* values, int64_t count, Weighing weighing, double* sums);

  // The weights; values and weights may be the same array.
  void (*weigh)(const float* values, int64_t count, Weighing weighing, float* weights);

  // What finite values are drawn by, near a target.
  void (*near)(const float* values, int64_t count, Weighing weighing, Nearness nearness,
               float* weights);

  // The sums of that of each chunk, double [chunks].
  void (*near_sums)(const float* values, int64_t count, Weighing weighing, Nearness nearness,
                    double* sums);

  // Copies the values that are at least `least`, and their places, in their order; returns how
  // many. Both arrays have room for kSlack more than there are. Groups that cannot have any, by
  // their maxima, are passed over; null: not known, and many are expected.
  int64_t (*gather)(const float* values, int64_t count, const float* group_maxima, float least,
                    float* found, int32_t* places);

  // The bucket of each value.
  void (*bucket)(const float* values, int64_t count, Bucketing bucketing, int32_t* buckets);

  // As gather: the values of one bucket.
  int64_t (*gather_bucket)(const float* values, int64_t count, Bucketing bucketing, int32_t bucket,
                           float* found, int32_t* places);

  // Splits the values that are at least `least` by two brackets, whose lower ends are at least
  // that, and that above -inf; returns the sum of their weights. Meanwhile as many values of
  // `ahead` are brought near; null: none.
  double (*split)(const float* values, int64_t count, float least, Weighing weighing,
                  const Bracket* brackets, const float* ahead, Split& split);

  // Tallies the values below `top`, for one edge, and without the logarithms. Every 128 weights are
  // summed up in float, and these sums in double.
  Tally (*tally)(const float* values, int64_t count, Weighing weighing, float top, float edge);

  // Tallies all values, for Tally::kEdges edges. None of them is below `least`; -inf: not known, which
  // takes longer.
  Tally (*tally_all)(const float* values, int64_t count, Weighing weighing, float least,
                     const float* edges);

  // The same without edges.
  Tally (*tally_logs)(const float* values, int64_t count, Weighing weighing, float least);

  // As gather: the values that are in any of the brackets, whose ends are above -inf; the first one
  // may end at inf, which is quicker. As many values of `ahead` are brought near; null: none.
  int64_t (*list)(const float* values, int64_t count, const Brackets& brackets, const float* ahead,
                  float* found, int32_t* places);

  // As gather: the values of a bracket.
  int64_t (*gather_between)(const float* values, int64_t count, Bracket bracket, float* found,
                            int32_t* places);

  // Copies the values whose bit is set, bit i % 32 of mask[i / 32], and -inf for the others.
  void (*copy_allowed)(const float* values, int64_t count, const uint32_t* mask, float* out);

  // How many of the values are larger than that at `place`, or equal and before it; group_maxima
  // as for gather.
  int64_t (*before)(const float* values, int64_t count, const float* group_maxima, int64_t place);

  // The moments of values[count], of which `maximum` is the largest.
  Moments (*moments)(const float* values, int64_t count, float maximum);

  // How many bits are set.
  int64_t (*count_bits)(const uint32_t* mask, int64_t words);

  // The spread of values[count], of which `maximum` is the largest.
  Spread (*spread)(const float* values, int64_t count, float maximum);
};

// Null where this build cannot run them.
const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

// The best set that this processor runs, or the one of that name; null if it lacks it.
const Kernels* find_kernels(const char* name);

}  // namespace onnxport
