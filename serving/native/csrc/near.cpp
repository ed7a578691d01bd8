#include "near.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "race.h"
#include "thinning.h"
#include "typical.h"

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kReach = 87.0;  // exp(-87) is about the least weight above 0
constexpr float kLowest = std::numeric_limits<float>::lowest();

// Those down to where the sum of the weights has reached a share of all; in scratch.split.
Candidates nucleus(const Kernels& kernels, const Row& row, const Candidates& all, Weighing by,
                   double share, Scratch& s) {
  const Descent descent(kernels, all, kernels.scan(all.values, all.size), by, s);
  const double end = std::nextafter(share * descent.total(), 0.0);
  const int32_t last = descent.find(end).place;
  Shelf& shelf = s.split;
  shelf.make_room(all.size);
  size_t size = 0;
  for (int64_t i = 0; i < all.size; i++) {
    shelf.values[size] = all.values[i];
    shelf.places[size] = all.place(i);
    size += all.values[i] > row.values[last] ||
            (all.values[i] == row.values[last] && all.place(i) <= last);
  }
  return shelf.first(static_cast<int64_t>(size));
}

// The sum of the weights of some candidates.
double total_weight(const Kernels& kernels, const Candidates& all, Weighing by, Scratch& s) {
  s.sums.resize(static_cast<size_t>(num_chunks(all.size)));
  kernels.sums(all.values, all.size, by, s.sums.data());
  double total = 0.0;
  for (const double sum : s.sums) total += sum;
  return total;
}

// What is left once all is done that leaves tokens out. What weighs nothing is left, too, unless it
// is cut off by weight: it is as far from the target as any unlikely token.
Candidates left_of(const Kernels& kernels, const Row& row, const Request& request, Weighing by,
                   Scratch& s) {
  const double maximum = row.range.maximum, temperature = request.temperature;
  const bool is_cut = request.typical_p < 1.0 || request.top_p < 1.0;
  const double reach = std::max(temperature, kLeastTemperature) * kReach;
  float least = is_cut ? static_cast<float>(maximum - reach) : kLowest;
  least = std::max(least, kLowest);
  if (request.min_p > 0.0) {
    least = std::max(least, static_cast<float>(maximum + temperature * std::log(request.min_p)));
  }
  if (request.top_n_sigma > 0.0) {
    least = std::max(least, sigma_floor(kernels, row, request.top_n_sigma));
  }
  const int64_t size = request.has_top_k ? std::min(request.top_k, row.count) : 1;
  if (request.has_top_k) least = std::max(least, reached_by(kernels, row, size, s));
  Candidates all = gather(kernels, row, least, 1, s);
  if (request.has_top_k) all = largest(kernels, all, size, s);
  if (request.typical_p < 1.0) all = typical(kernels, all, by, request.typical_p, s);
  if (request.top_p < 1.0) all = nucleus(kernels, row, all, by, request.top_p, s);
  if (request.xtc_threshold > 1.0) return all;
  const double total = total_weight(kernels, all, by, s);
  return without_choices(kernels, all, by, request.xtc_threshold * total, s);
}

}  // namespace

Surprising draw_near(const Kernels& kernels, const Row& row, const Request& request, Scratch& s) {
  const double temperature = std::max(request.temperature, kLeastTemperature);
  Weighing by{row.range.maximum, static_cast<float>(kLog2E / temperature)};
  const Candidates all = left_of(kernels, row, request, by, s);
  if (request.typical_p < 1.0 || request.xtc_threshold <= 1.0) {
    // What is left may weigh nothing beside the likeliest token, if that is gone.
    by.maximum = kernels.scan(all.values, all.size).maximum;
  }
  const double total = total_weight(kernels, all, by, s);
  const Nearness to{static_cast<float>(1.0 / total), static_cast<float>(request.mu)};
  kernels.near_sums(all.values, all.size, by, to, s.sums.data());
  double sum = 0.0;
  for (const double part : s.sums) sum += part;
  // The first chunk, and in it the first candidate, with which the sum passes the target.
  double target = request.uniform * sum;
  size_t chunk = 0;
  for (; chunk + 1 < s.sums.size() && s.sums[chunk] <= target; chunk++) target -= s.sums[chunk];
  const int64_t begin = static_cast<int64_t>(chunk) * kChunk;
  const int64_t count = std::min(kChunk, all.size - begin);
  float weights[kChunk];
  kernels.near(all.values + begin, count, by, to, weights);
  int64_t chosen = 0;
  for (double passed = weights[0]; passed <= target && chosen + 1 < count;) {
    passed += weights[++chosen];
  }
  float weight;
  kernels.weigh(all.values + begin + chosen, 1, by, &weight);
  return {all.place(begin + chosen), std::log2(total / static_cast<double>(weight))};
}

}  // namespace onnxport
