// The likeliest of a row's tokens, without sorting the others.
#pragma once

#include "scratch.h"

namespace onnxport {

// A row to choose from: values[count], the largest of them finite, none NaN. If the summary is another
// row's, what is chosen may be any of them.
struct Row {
  const float* values;
  int64_t count;
  Range range;
  rows::Summary summary;
};

// Whether a range can be divided into buckets: its length and what that is divided by are finite.
bool is_divisible(Range range);
Bucketing divide(Range range);

// The sum of the weights of all, for the row's maximum; those of the chunks stay in scratch.sums,
// and in scratch.factors what makes of a chunk's own weights those.
// The row's summary has the sums for that scale from then on.
double total_of(const Kernels& kernels, const Row& row, float scale, Scratch& scratch);

// A value that at least `size` values of the row reach; -inf if there is no cheap one.
float reached_by(const Kernels& kernels, const Row& row, int64_t size, Scratch& scratch);

// Those of a row that are at least `least`, in scratch.head; all of it, if these are fewer than `size`.
Candidates gather(const Kernels& kernels, const Row& row, float least, int64_t size,
                  Scratch& scratch);

// Those of a row's candidates that are at least `least`, on a shelf.
Candidates reaching(const Kernels& kernels, const Row& row, const Candidates& all, float least,
                    Shelf& shelf);

// The `size` largest, of equals the first ones, in their order; in scratch.kept, if not all.
Candidates largest(const Kernels& kernels, const Candidates& all, int64_t size, Scratch& scratch);

// The largest first, equals in their order; in scratch.sorted.
Candidates sorted(const Candidates& all, Scratch& scratch);

// Candidates looked at from the largest down, with the sum of their weights on the way. Many are
// not sorted but counted out into buckets by value, and the one bucket that matters looked into.
class Descent {
 public:
  // A candidate, and the sum of the weights of all down to it.
  struct Stop {
    int32_t place;
    double sum;
  };

  // Takes at least one candidate, all of weight, and their range.
  Descent(const Kernels& kernels, const Candidates& all, Range range, Weighing weighing,
          Scratch& scratch, int level = 0);

  // The sum of all weights.
  double total() const { return total_; }

  // The first candidate with which the sum passes `target`; the last one if that is never.
  Stop find(double target) const;

  // Whether the candidates are in buckets, and between which values that bucket is in which the
  // sum passes `target`; the first one has no upper end.
  bool has_buckets() const { return order_ == Order::kBuckets; }
  Bracket bucket_around(double target) const;

 private:
  enum class Order { kSorted, kEqual, kBuckets };
  static constexpr int kCopies = 2;  // so that neighbours in one bucket do not wait for each other

  int32_t bucket_of(double target, double& before) const;
  void weigh_sorted();
  void weigh_buckets();
  Stop find_sorted(double target) const;
  Stop find_equal(double target) const;
  Stop find_in_bucket(double target) const;

  const Kernels& kernels_;
  Candidates all_;
  Weighing weighing_;
  Scratch& scratch_;
  int level_;
  Order order_;
  Bucketing bucketing_{0.f, 0.f};
  double total_ = 0.0;
  double masses_[kCopies][kBuckets];
};

}  // namespace onnxport
