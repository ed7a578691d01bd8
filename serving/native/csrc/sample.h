// What some of many candidates tell of all of them.
#pragma once

#include <algorithm>

#include "likeliest.h"

namespace onnxport {

constexpr int64_t kMany = 16384;  // candidates that are worth a look at a sample before
constexpr int64_t kEvery = 16;    // of so many runs of 16 values one is in the sample

constexpr int64_t kWide = 4;          // to look closely at such a part of all saves nothing
constexpr double kEffective = 25.0;  // weights, alike, that tell where others are

// What is looked at by a sample is by so many standard deviations wider than it says, in two
// attempts, and by a least part of all weights.
constexpr double kDeviations[] = {2.5, 6.0};
constexpr double kLeastPart = 0.002;

// Takes every kEvery-th run of 16 values, to scratch.sample.
void take_sample(const float* values, int64_t count, Scratch& scratch);

// Where the weights of many candidates are, about: by those of a sample, counted out into buckets.
class Sample {
 public:
  Sample(const Kernels& kernels, const Candidates& all, Weighing weighing, Scratch& scratch);

  // False: it tells nothing.
  bool is_good() const { return total_ > 0.0; }

  double total() const { return total_; }  // of its own weights

  // What some values have of the sum of all weights, and of that of their squares.
  struct Part {
    double weights, squares;

    Part operator-(const Part& other) const {
      return {weights - other.weights, squares - other.squares};
    }
  };

  // The average of values by their weights.
  double average() const { return average_; }

  // What values from `value` up have.
  Part above(double value) const;

  // What values up to so far from `centre` have.
  Part near(double centre, double distance) const {
    return above(centre - distance) - above(centre + distance);
  }

  // The standard deviation of the weights that some values have, by all samples there are.
  double deviation(Part part) const;

  // The same of the values between two ones.
  double deviation(double one, double other) const {
    return deviation(above(std::min(one, other)) - above(std::max(one, other)));
  }

  // How many weights, all alike, would tell as much of those of some values.
  double effective(Part part) const;

  // About how many candidates there are in a bracket.
  int64_t size(Bracket bracket) const;

  // The value from which on up they have so much of all weights; -inf if none do.
  double value_above(double weights) const;

  // How far from `centre` up and down they do; inf if they never do.
  double reach(double centre, double weights) const;

  // The least value that no more than `size` candidates below `upper` reach.
  double value_of(int64_t size, double upper) const;

 private:
  double place_of(double value) const;  // in buckets, from 0 to kBuckets
  double value_at(double place) const {
    return static_cast<double>(bucketing_.top) - place / bucketing_.per_unit;
  }

  Bucketing bucketing_{0.f, 0.f};
  double total_ = 0.0;  // 0: it tells nothing
  double average_ = 0.0;
  double masses_[kBuckets + 1];   // of all buckets before
  double squares_[kBuckets + 1];  // of each weight, likewise
  int32_t counts_[kBuckets + 1];
};

}  // namespace onnxport
