#include "thinning.h"

#include <algorithm>
#include <cmath>

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;

float weight_of(const Kernels& kernels, float value, Weighing by) {
  float weight;
  kernels.weigh(&value, 1, by, &weight);
  return weight;
}

// The tokens whose surprise, -log p, is nearest to what it is on average, as many as have at least
// the share `wanted` of all weights; the largest first (Meister et al., Locally Typical Sampling,
// 2022). They lie side by side in the order of their values, so the nearest ones are found from
// where the surprise passes the average.
Candidates typical(const Kernels& kernels, const Candidates& kept, Weighing by, double wanted,
                   Scratch& s) {
  const Candidates ordered = sorted(kept, s);
  const int64_t size = ordered.size;
  s.weights.resize(static_cast<size_t>(size));
  kernels.weigh(ordered.values, size, by, s.weights.data());
  const double per_unit = static_cast<double>(by.scale) / kLog2E;
  const auto exponent = [&](int64_t i) {
    return (static_cast<double>(ordered.values[i]) - static_cast<double>(by.maximum)) * per_unit;
  };
  double total = 0.0, sum = 0.0;
  for (int64_t i = 0; i < size; i++) {
    const double weight = s.weights[static_cast<size_t>(i)];
    total += weight;
    sum += weight * exponent(i);
  }
  const double average = sum / total;  // of log p, but for the same constant
  const auto distance = [&](int64_t i) { return std::fabs(average - exponent(i)); };
  int64_t begin = 0;
  while (begin < size && exponent(begin) > average) begin++;
  int64_t end = begin;
  double found = 0.0;
  do {
    const bool is_left = begin > 0 && (end == size || distance(begin - 1) <= distance(end));
    found += s.weights[static_cast<size_t>(is_left ? --begin : end++)];
  } while (found < wanted * total && end - begin < size);
  Shelf& shelf = s.typical;
  shelf.make_room(end - begin);
  std::copy(ordered.values + begin, ordered.values + end, shelf.values.begin());
  std::copy(ordered.places + begin, ordered.places + end, shelf.places.begin());
  return shelf.first(end - begin);
}

// The weights of the tokens that XTC leaves out: of those down to `last` whose share of the weights
// is at least `threshold`, all but the least likely one. They are the largest.
double left_out(const Kernels& kernels, const Row& row, const Candidates& all, Weighing by,
                Descent::Stop last, double threshold) {
  const double bound = threshold * last.sum;
  double sum = 0.0, least = INFINITY;
  float weights[kChunk];
  for (int64_t begin = 0; begin < all.size; begin += kChunk) {
    const int64_t count = std::min(kChunk, all.size - begin);
    kernels.weigh(all.values + begin, count, by, weights);
    for (int64_t i = 0; i < count; i++) {
      const double weight = weights[i];
      if (weight < bound) continue;
      sum += weight;
      least = std::min(least, weight);
    }
  }
  if (sum == 0.0) return 0.0;
  if (last.place >= 0 && sum > last.sum) {  // some of them are behind it
    sum = last.sum;
    least = weight_of(kernels, row.values[last.place], by);
  }
  return sum - least;
}

}  // namespace

float sigma_floor(const Row& row, double deviations) {
  constexpr int64_t kLanes = 8;  // sums that do not wait for each other
  double sums[kLanes] = {}, squares[kLanes] = {};
  int64_t counts[kLanes] = {};
  const double maximum = row.range.maximum;
  for (int64_t begin = 0; begin < row.count; begin += kLanes) {
    const int64_t lanes = std::min(kLanes, row.count - begin);
    for (int64_t i = 0; i < lanes; i++) {
      const float value = row.values[begin + i];
      const double below = value == -INFINITY ? 0.0 : static_cast<double>(value) - maximum;
      sums[i] += below;
      squares[i] += below * below;
      counts[i] += value != -INFINITY;
    }
  }
  double sum = 0.0, square = 0.0, count = 0.0;
  for (int64_t i = 0; i < kLanes; i++) {
    sum += sums[i];
    square += squares[i];
    count += static_cast<double>(counts[i]);
  }
  const double mean = sum / count;
  const double variance = std::max(0.0, square / count - mean * mean);
  return static_cast<float>(maximum - deviations * std::sqrt(variance));
}

int32_t draw_thinned(const Kernels& kernels, const Row& row, const Candidates& kept, Weighing by,
                     const Request& request, Scratch& s) {
  const bool is_typical = request.typical_p < 1.0;
  const Candidates all = is_typical ? typical(kernels, kept, by, request.typical_p, s) : kept;
  const Descent descent(kernels, all, kernels.scan(all.values, all.size), by, s);
  Descent::Stop last{-1, descent.total()};
  if (request.top_p < 1.0) {
    last = descent.find(std::nextafter(request.top_p * descent.total(), 0.0));
  }
  double skipped = 0.0;
  if (request.xtc_threshold <= 1.0) {
    skipped = left_out(kernels, row, all, by, last, request.xtc_threshold);
  }
  const Descent::Stop stop = descent.find(skipped + request.uniform * (last.sum - skipped));
  return last.place >= 0 && stop.sum > last.sum ? last.place : stop.place;
}

}  // namespace onnxport
