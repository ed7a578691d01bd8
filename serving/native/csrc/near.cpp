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
constexpr double kPeak = 5.0, kSharpness = 10.0, kWidth = 0.3;  // of the bell, as in llama.cpp
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

// The weights of some candidates, in scratch.weights; returns their sum.
double weigh_all(const Kernels& kernels, const Candidates& all, Weighing by, Scratch& s) {
  s.weights.resize(static_cast<size_t>(all.size));
  kernels.weigh(all.values, all.size, by, s.weights.data());
  double total = 0.0;
  for (const float weight : s.weights) total += static_cast<double>(weight);
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
  const double total = weigh_all(kernels, all, by, s);
  return without_choices(kernels, all, by, request.xtc_threshold * total, s);
}

}  // namespace

Surprising draw_near(const Kernels& kernels, const Row& row, const Request& request, Scratch& s) {
  const double temperature = std::max(request.temperature, kLeastTemperature);
  const Weighing by{row.range.maximum, static_cast<float>(kLog2E / temperature)};
  const Candidates all = left_of(kernels, row, request, by, s);
  const double total = weigh_all(kernels, all, by, s);
  s.near.resize(static_cast<size_t>(all.size));
  float most = -INFINITY;
  for (size_t i = 0; i < s.near.size(); i++) {
    const double chance = static_cast<double>(s.weights[i]) / total;
    const double distance = std::fabs(chance - request.mu) / kWidth;
    s.near[i] = static_cast<float>(kPeak - kSharpness * distance * distance / (1.0 + distance));
    most = std::max(most, s.near[i]);
  }
  kernels.weigh(s.near.data(), all.size, {most, static_cast<float>(kLog2E)}, s.near.data());
  double sum = 0.0;
  for (const float weight : s.near) sum += static_cast<double>(weight);
  const double target = request.uniform * sum;
  size_t chosen = 0;
  for (double passed = s.near[0]; passed <= target && chosen + 1 < s.near.size();) {
    passed += s.near[++chosen];
  }
  const double weight = s.weights[chosen];
  return {all.place(static_cast<int64_t>(chosen)), std::log2(total / weight)};
}

}  // namespace onnxport
