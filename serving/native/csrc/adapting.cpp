#include "adapting.h"

#include <algorithm>
#include <cmath>

#include "race.h"

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kReach = 87.0;      // exp(-87) is about the least weight above 0
constexpr int64_t kLikeliest = 100;  // tokens that tell how fast probabilities fall

double temperature_of(const Request& request) {
  return std::max(request.temperature, kLeastTemperature);
}

// How fast probabilities fall, as the exponent of a power law of the ranks, by the likeliest; NaN: there is but
// one token.
double steepness(const Kernels& kernels, const Row& row, double temperature, Scratch& s) {
  const float least = reached_by(kernels, row, std::min(kLikeliest, row.count), s);
  const Candidates head = gather(kernels, row, least, kLikeliest, s);
  const Candidates top = sorted(largest(kernels, head, kLikeliest, s), s);
  double products = 0.0, squares = 0.0;
  for (int64_t i = 0; i + 1 < top.size && std::isfinite(top.values[i + 1]); i++) {
    const double fall =
        (static_cast<double>(top.values[i]) - static_cast<double>(top.values[i + 1])) / temperature;
    const double ranks =
        std::log(static_cast<double>(i + 2) / static_cast<double>(i + 1));
    products += ranks * fall;
    squares += ranks * ranks;
  }
  return products / squares;
}

// How many of the likeliest tokens surprise `mu` bits on average, at least 1 and at most `most`.
int64_t wanted(double steepness, double mu, int64_t vocab, int64_t most) {
  if (std::isnan(steepness)) return 1;
  const double beyond = steepness - 1.0, log_vocab = std::log(static_cast<double>(vocab));
  const double ratio = std::fabs(beyond) < 1e-9 ? 1.0 / log_vocab
                                                : beyond / -std::expm1(-beyond * log_vocab);
  const double power = mu / kLog2E + std::log(ratio);
  const double log_size = steepness > 0.0 ? power / steepness : power > 0.0 ? INFINITY : -INFINITY;
  if (log_size >= std::log(static_cast<double>(most))) return most;
  return std::max<int64_t>(1, static_cast<int64_t>(std::exp(log_size)));
}

// What is left, all of weight.
Candidates left_by_rank(const Kernels& kernels, const Row& row, int64_t size, float reach,
                        Scratch& s) {
  const float least = std::max(reach, reached_by(kernels, row, size, s));
  return largest(kernels, gather(kernels, row, least, 1, s), size, s);
}

}  // namespace

Request adapted(const Kernels& kernels, const Row& row, const Request& request) {
  Request own = request;
  if (!is_dynamic(request)) return own;
  const Spread spread = kernels.spread(row.values, row.count, row.range.maximum);
  double way = 1.0;
  if (spread.count > 1.0) {
    const double entropy = std::log(spread.weights) - spread.products / spread.weights;
    way = std::pow(std::clamp(entropy / std::log(spread.count), 0.0, 1.0), request.exponent);
  }
  const double least = request.least_temperature;
  own.temperature = least + (request.temperature - least) * way;
  own.greedy = request.greedy || own.temperature == 0.0;
  return own;
}

Surprising draw_mirostat(const Kernels& kernels, const Row& row, const Request& request,
                         int64_t vocab, Scratch& s) {
  const double maximum = row.range.maximum, temperature = temperature_of(request);
  const Weighing by{row.range.maximum, static_cast<float>(kLog2E / temperature)};
  const float reach = static_cast<float>(maximum - kReach * temperature);
  Candidates left;
  if (request.adapting == kMirostat1) {
    const double falls = steepness(kernels, row, temperature, s);
    left = left_by_rank(kernels, row, wanted(falls, request.mu, vocab, row.count), reach, s);
  } else {
    // p >= 2 ** -mu, where the likeliest weighs 1.
    const double share = total_of(kernels, row, by.scale, s) * std::exp2(-request.mu);
    const float floor = static_cast<float>(maximum + temperature * std::log(share));
    left = share > 1.0 ? left_by_rank(kernels, row, 1, reach, s)
                       : gather(kernels, row, std::max(reach, floor), 1, s);
  }
  const Descent descent(kernels, left, kernels.scan(left.values, left.size), by, s);
  const int32_t place = descent.find(request.uniform * descent.total()).place;
  float weight;
  kernels.weigh(row.values + place, 1, by, &weight);
  return {place, std::log2(descent.total() / static_cast<double>(weight))};
}

}  // namespace onnxport
