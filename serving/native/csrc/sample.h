// What some of many candidates tell of all of them.
#pragma once

#include "likeliest.h"

namespace onnxport {

constexpr int64_t kMany = 16384;  // candidates that are worth a look at a sample before
constexpr int64_t kEvery = 16;    // of so many runs of 16 values one is in the sample

// Takes every kEvery-th run of 16 values, to scratch.sample.
void take_sample(const float* values, int64_t count, Scratch& scratch);

// Where the weights of many candidates are, about: by those of a sample, counted out into buckets.
// All parts are of the sum of all weights.
class Sample {
 public:
  Sample(const Kernels& kernels, const Candidates& all, Weighing weighing, Scratch& scratch);

  // False: it tells nothing.
  bool is_good() const { return total_ > 0.0; }

  // How far a part may be wrong, but for a few times in a thousand.
  double margin(double part) const;

  // The part that values from `value` up have.
  double above(double value) const;

  // The value from which on up they have that part; -inf if none do.
  double value_above(double part) const;

  // How far from `centre` up and down values have that part; inf if none do.
  double reach(double centre, double part) const;

  // The least value that no more than `size` candidates below `upper` reach.
  double value_of(int64_t size, double upper) const;

 private:
  double place_of(double value) const;  // in buckets, from 0 to kBuckets

  Bucketing bucketing_{0.f, 0.f};
  double total_ = 0.0;            // of the sample's weights; 0: it tells nothing
  double effective_ = 0.0;        // the size of a sample of equal weights that tells as much
  double masses_[kBuckets + 1];   // of all buckets before
  int32_t counts_[kBuckets + 1];  // likewise
};

}  // namespace onnxport
