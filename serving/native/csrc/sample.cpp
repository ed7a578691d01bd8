#include "sample.h"

#include <algorithm>
#include <cmath>

namespace onnxport {
namespace {

constexpr int64_t kLeastSample = 512;  // values; fewer say nothing
constexpr int kHalvings = 30;

}  // namespace

void take_sample(const float* values, int64_t count, Scratch& s) {
  constexpr int64_t kRun = 16;
  s.sample.clear();
  for (int64_t i = 0; i + kRun <= count; i += kEvery * kRun) {
    s.sample.insert(s.sample.end(), values + i, values + i + kRun);
  }
}

Sample::Sample(const Kernels& kernels, const Candidates& all, Weighing by, Scratch& s) {
  take_sample(all.values, all.size, s);
  const int64_t size = static_cast<int64_t>(s.sample.size());
  if (size < kLeastSample) return;
  const Range range = kernels.scan(s.sample.data(), size);
  if (!is_divisible(range)) return;
  bucketing_ = divide(range);
  std::fill_n(masses_, kBuckets + 1, 0.0);
  std::fill_n(squares_, kBuckets + 1, 0.0);
  std::fill_n(counts_, kBuckets + 1, 0);
  int32_t buckets[kChunk];
  float weights[kChunk];
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t count = std::min(kChunk, size - begin);
    kernels.bucket(s.sample.data() + begin, count, bucketing_, buckets);
    kernels.weigh(s.sample.data() + begin, count, by, weights);
    for (int64_t i = 0; i < count; i++) {
      const double weight = weights[i];
      masses_[buckets[i] + 1] += weight;
      squares_[buckets[i] + 1] += weight * weight;
      counts_[buckets[i] + 1]++;
    }
  }
  for (int32_t i = 0; i < kBuckets; i++) {
    masses_[i + 1] += masses_[i];
    squares_[i + 1] += squares_[i];
    counts_[i + 1] += counts_[i];
  }
  const double total = masses_[kBuckets];
  if (!(total > 0.0 && total < INFINITY)) return;
  total_ = total;
  const Tally tally = kernels.tally_logs(s.sample.data(), size, by, range.minimum);
  average_ =
      static_cast<double>(by.maximum) + tally.logs / tally.weights / static_cast<double>(by.scale);
}

double Sample::deviation(Part part) const {
  // Of a ratio of two sums (Cochran, Sampling Techniques, 1977, section 2.11).
  const double others = 1.0 - part.weights;
  const double squares =
      others * others * part.squares + part.weights * part.weights * (1.0 - part.squares);
  return std::sqrt(std::max(0.0, squares) * squares_[kBuckets]) / total_;
}

double Sample::effective(Part part) const {
  const double squares = part.squares * squares_[kBuckets];
  return squares > 0.0 ? std::pow(part.weights * total_, 2.0) / squares : 0.0;  // Kish, 1965
}

int64_t Sample::size(Bracket bracket) const {
  const int32_t low = static_cast<int32_t>(std::ceil(place_of(bracket.lower)));
  return kEvery * (counts_[low] - counts_[static_cast<int32_t>(place_of(bracket.upper))]);
}

double Sample::place_of(double value) const {
  const double place = (static_cast<double>(bucketing_.top) - value) * bucketing_.per_unit;
  return place > 0.0 ? std::min(place, static_cast<double>(kBuckets)) : 0.0;  // NaN, too
}

Sample::Part Sample::above(double value) const {
  const double place = place_of(value);
  const int32_t bucket = std::min(static_cast<int32_t>(place), kBuckets - 1);
  const auto share = [&](const double* sums) {
    return (sums[bucket] + (sums[bucket + 1] - sums[bucket]) * (place - bucket)) / sums[kBuckets];
  };
  return {share(masses_), share(squares_)};
}

double Sample::value_above(double weights) const {
  const double wanted = weights * total_;
  if (wanted >= total_) return -INFINITY;
  const auto end = std::upper_bound(masses_ + 1, masses_ + kBuckets, wanted);
  const double mass = *end - end[-1];
  const double within = mass > 0.0 ? (wanted - end[-1]) / mass : 0.0;
  const double place = static_cast<double>(end - 1 - masses_) + std::max(0.0, within);
  return value_at(place);
}

double Sample::reach(double centre, double weights) const {
  if (weights >= 1.0) return INFINITY;
  double low = 0.0, high = 2.0 * kBuckets / bucketing_.per_unit;
  for (int i = 0; i < kHalvings; i++) {
    const double middle = 0.5 * (low + high);
    (near(centre, middle).weights >= weights ? high : low) = middle;
  }
  return 0.5 * (low + high);
}

double Sample::value_of(int64_t size, double upper) const {
  const int32_t first = static_cast<int32_t>(place_of(upper));
  const int64_t wanted = counts_[first] + size / kEvery;
  const auto end = std::upper_bound(counts_ + first, counts_ + kBuckets + 1, wanted);
  if (end > counts_ + kBuckets) return -INFINITY;
  const double bucket = static_cast<double>(end - 1 - counts_);
  return value_at(bucket);
}

}  // namespace onnxport
