#include "thinning.h"

#include <algorithm>
#include <cmath>

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// How far the surprise of tokens, -log p, is from what it is on average.
class Surprise {
 public:
  Surprise(const Candidates& all, const std::vector<float>& weights, Weighing by)
      : values_(all.values),
        maximum_(static_cast<double>(by.maximum)),
        per_unit_(static_cast<double>(by.scale) / kLog2E) {
    constexpr int64_t kLanes = 4;  // sums that do not wait for each other
    double totals[kLanes] = {}, sums[kLanes] = {};
    for (int64_t i = 0; i < all.size; i++) {
      const double weight = weights[static_cast<size_t>(i)];
      totals[i % kLanes] += weight;
      sums[i % kLanes] += weight * exponent(all.values[i]);
    }
    total_ = (totals[0] + totals[1]) + (totals[2] + totals[3]);
    average_ = ((sums[0] + sums[1]) + (sums[2] + sums[3])) / total_;
  }

  double total() const { return total_; }  // of all weights
  bool is_likelier(int64_t i) const { return exponent(values_[i]) > average_; }
  double distance(int64_t i) const { return distance_of(values_[i]); }
  double distance_of(float value) const { return std::fabs(average_ - exponent(value)); }

  // Whether a token comes before another one: the nearer one, of two the likelier one, of equals
  // the one that lies nearer in the order of the values.
  bool is_before(int64_t one, int64_t other) const {
    const double mine = distance(one), its = distance(other);
    if (mine != its) return mine < its;
    const bool likelier = is_likelier(one);
    if (likelier != is_likelier(other)) return likelier;
    return likelier ? one > other : one < other;
  }

 private:
  // The logarithm of a weight.
  double exponent(float value) const { return (static_cast<double>(value) - maximum_) * per_unit_; }

  const float* values_;
  double maximum_, per_unit_, total_, average_;
};

// The tokens whose surprise is nearest to what it is on average, as many as have at least the share
// `wanted` of all weights, in their order (Meister et al., Locally Typical Sampling, 2022). They
// are counted out into buckets by their distance, and sorted where the last one is.
Candidates typical(const Kernels& kernels, const Candidates& all, Weighing by, double wanted,
                   Scratch& s) {
  s.weights.resize(static_cast<size_t>(all.size));
  kernels.weigh(all.values, all.size, by, s.weights.data());
  const Surprise surprise(all, s.weights, by);
  const Range range = kernels.scan(all.values, all.size);
  const double widest =
      std::max(surprise.distance_of(range.maximum), surprise.distance_of(range.minimum));
  const double per_unit = widest > 0.0 ? kBuckets / widest : 0.0;
  const auto bucket_of = [&](int64_t i) {
    const double bucket = surprise.distance(i) * per_unit;
    return bucket < kBuckets - 1 ? static_cast<int32_t>(bucket) : kBuckets - 1;
  };
  double masses[kBuckets] = {};
  for (int64_t i = 0; i < all.size; i++) masses[bucket_of(i)] += s.weights[static_cast<size_t>(i)];
  const double target = wanted * surprise.total();
  double found = 0.0;
  int32_t last = 0;
  while (last < kBuckets - 1 && found + masses[last] < target) found += masses[last++];
  s.members.clear();
  for (int64_t i = 0; i < all.size; i++)
    if (bucket_of(i) == last) s.members.push_back(i);
  std::sort(s.members.begin(), s.members.end(),
            [&](int64_t one, int64_t other) { return surprise.is_before(one, other); });
  size_t taken = 0;
  while (taken < s.members.size() && found < target) {
    found += s.weights[static_cast<size_t>(s.members[taken++])];
  }
  std::sort(s.members.begin(), s.members.begin() + static_cast<int64_t>(taken));
  Shelf& shelf = s.typical;
  shelf.make_room(all.size);
  size_t size = 0, next = 0;
  for (int64_t i = 0; i < all.size; i++) {
    const bool is_taken = next < taken && s.members[next] == i;
    next += is_taken;
    shelf.values[size] = all.values[i];
    shelf.places[size] = all.place(i);
    size += is_taken || bucket_of(i) < last;
  }
  return shelf.first(static_cast<int64_t>(size));
}

// The likely choices of some candidates: those of at least a share of the weights.
struct Choices {
  double sum = 0.0;        // of their weights
  float least = INFINITY;  // the value of the least likely one,
  int64_t last = -1;       // which is the last of equals, as a candidate
};

Choices choices_of(const Kernels& kernels, const Candidates& all, Weighing by, double bound) {
  Choices found;
  float weights[kChunk];
  for (int64_t begin = 0; begin < all.size; begin += kChunk) {
    const int64_t count = std::min(kChunk, all.size - begin);
    kernels.weigh(all.values + begin, count, by, weights);
    for (int64_t i = 0; i < count; i++) {
      if (static_cast<double>(weights[i]) < bound) continue;
      found.sum += static_cast<double>(weights[i]);
      const float value = all.values[begin + i];
      if (value > found.least) continue;
      found.least = value;
      found.last = begin + i;
    }
  }
  return found;
}

// The place of the token that is drawn once XTC has left out the likely choices but the least
// likely one. What it leaves is looked at by itself: it may weigh too little beside what it leaves
// out.
int32_t draw_others(const Kernels& kernels, const Candidates& all, Weighing by, Descent::Stop end,
                    const Request& request, Scratch& s) {
  const Choices choices = choices_of(kernels, all, by, request.xtc_threshold * end.sum);
  if (end.place >= 0 && choices.sum >= end.sum) return end.place;  // there are no others
  Shelf& shelf = s.others;
  shelf.make_room(all.size);
  size_t size = 0;
  for (int64_t i = 0; i < all.size; i++) {
    shelf.values[size] = all.values[i];
    shelf.places[size] = all.place(i);
    size += choices.last < 0 || i == choices.last || all.values[i] < choices.least;
  }
  const Candidates others = shelf.first(static_cast<int64_t>(size));
  const Range range = kernels.scan(others.values, others.size);
  const Descent descent(kernels, others, range, {range.maximum, by.scale}, s);
  double total = descent.total();
  if (end.place >= 0) {  // those behind the end are among them
    float weight;
    kernels.weigh(&range.maximum, 1, by, &weight);
    const double unit = static_cast<double>(weight);  // what 1 of the others' weights is
    const double left = choices.last < 0 ? end.sum : end.sum - choices.sum + unit;
    if (unit > 0.0) total = std::min(total, left / unit);
  }
  const Descent::Stop stop = descent.find(request.uniform * total);
  return end.place >= 0 && stop.sum > total ? end.place : stop.place;
}

}  // namespace

float sigma_floor(const Kernels& kernels, const Row& row, double deviations) {
  const double maximum = row.range.maximum;
  const Moments moments = kernels.moments(row.values, row.count, row.range.maximum);
  const double mean = moments.sum / moments.count;
  const double variance = std::max(0.0, moments.squares / moments.count - mean * mean);
  return static_cast<float>(maximum - deviations * std::sqrt(variance));
}

int32_t draw_thinned(const Kernels& kernels, const Candidates& kept, Weighing by,
                     const Request& request, Scratch& s) {
  const bool is_typical = request.typical_p < 1.0;
  const Candidates all = is_typical ? typical(kernels, kept, by, request.typical_p, s) : kept;
  const Descent descent(kernels, all, kernels.scan(all.values, all.size), by, s);
  Descent::Stop last{-1, descent.total()};
  if (request.top_p < 1.0) {
    last = descent.find(std::nextafter(request.top_p * descent.total(), 0.0));
  }
  if (request.xtc_threshold <= 1.0) return draw_others(kernels, all, by, last, request, s);
  const Descent::Stop stop = descent.find(request.uniform * last.sum);
  return last.place >= 0 && stop.sum > last.sum ? last.place : stop.place;
}

}  // namespace onnxport
