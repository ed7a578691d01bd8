#include "nucleus.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sample.h"

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kHead = 10.0;         // exp(-10): tokens that are looked at first
constexpr int64_t kLeastSample = 512;  // values; fewer say nothing
constexpr double kDeviations = 3.0;    // how far a sample may be wrong
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr double kWidest = 0.25;       // a bracket of a larger part of all saves nothing

void look_at_sample(const Kernels& kernels, const Row& row, Scratch& s) {
  take_sample(row.values, row.count, s);
  const int64_t size = static_cast<int64_t>(s.sample.size());
  s.sample_minimum = kernels.scan(s.sample.data(), size).minimum;
}

// Those of the sample that are at least `least`: all of it, or some in scratch.bracketed.
Candidates sampled(const Kernels& kernels, float least, Scratch& s) {
  const int64_t size = static_cast<int64_t>(s.sample.size());
  if (s.sample_minimum >= least) return {s.sample.data(), nullptr, size};
  Shelf& shelf = s.bracketed;
  shelf.make_room(size);
  return shelf.first(kernels.gather(s.sample.data(), size, nullptr, least, shelf.values.data(),
                                    shelf.places.data()));
}

Descent descend(const Kernels& kernels, const Candidates& all, Weighing by, Scratch& s) {
  return Descent(kernels, all, kernels.scan(all.values, all.size), by, s);
}

// Draws from many values, those of a row that are at least `least`, of which a sample tells about
// where the nucleus ends and where the number leads. Only what is there is looked at; of the rest,
// the sums of weights say that it is the right place.
class Bracketed {
 public:
  Bracketed(const Kernels& kernels, const Row& row, float least, Weighing by, Scratch& s)
      : kernels_(kernels), row_(row), least_(std::max(least, kLowest)), by_(by), s_(s) {}

  // False if the sample was of no use.
  bool draw(const Request& request, int32_t& place) {
    const bool whole = request.top_p == 1.0;
    if (!choose(request.top_p, request.uniform * request.top_p)) return false;
    s_.split.make_room(row_.count);
    Split split{{0.0, 0.0}, 0, s_.split.values.data(), s_.split.places.data()};
    const double total =
        kernels_.split(row_.values, row_.count, least_, by_, brackets_, s_.ahead, split);
    // A token is kept if what comes before it has not reached top_p: "passes" includes equality.
    Descent::Stop last{-1, total};
    if (!whole && !find(split, 0, std::nextafter(request.top_p * total, 0.0), last)) return false;
    Descent::Stop stop;
    if (!find(split, 1, request.uniform * last.sum, stop)) return false;
    place = !whole && stop.sum > last.sum ? last.place : stop.place;
    return true;
  }

 private:
  // Chooses where to look for two parts of the sum of all weights.
  bool choose(double end, double number) {
    const Candidates sample = sampled(kernels_, least_, s_);
    if (sample.size < kLeastSample) return false;
    s_.sums.resize(static_cast<size_t>(num_chunks(sample.size)));
    const Descent descent = descend(kernels_, sample, by_, s_);
    if (!descent.has_buckets()) return false;
    kernels_.sums(sample.values, sample.size, {by_.maximum, 2.f * by_.scale}, s_.sums.data());
    double squares = 0.0;
    for (const double sum : s_.sums) squares += sum;
    // The variance of a weighted share, by the effective size of a sample (Kish, Survey Sampling).
    const double effective = descent.total() * descent.total() / squares;
    const double parts[2] = {end, number};
    for (int i = 0; i < 2; i++) {
      const double margin = kDeviations * std::sqrt(parts[i] * (1.0 - parts[i]) / effective);
      if (2.0 * margin > kWidest) return false;
      const double low = (parts[i] - margin) * descent.total();
      const double high = (parts[i] + margin) * descent.total();
      brackets_[i].upper = low > 0.0 ? descent.bucket_around(low).upper : INFINITY;
      brackets_[i].lower = least_;
      if (high < descent.total()) {
        brackets_[i].lower = std::max(least_, descent.bucket_around(high).lower);
      }
    }
    return true;
  }

  // Finds where the sum passes `target`; false if that is not in the bracket.
  bool find(const Split& split, int number, double target, Descent::Stop& stop) const {
    const double above = split.above[number];
    if (above > target) return false;
    Shelf& shelf = s_.bracketed;
    shelf.make_room(split.size);
    const int64_t size = kernels_.gather_between(split.found, split.size, brackets_[number],
                                                 shelf.values.data(), shelf.places.data());
    if (size == 0) return false;
    const Descent descent = descend(kernels_, shelf.first(size), by_, s_);
    if (above + descent.total() <= target) return false;
    stop = descent.find(target - above);
    stop.sum += above;
    stop.place = split.places[stop.place];
    return true;
  }

  const Kernels& kernels_;
  const Row& row_;
  float least_;
  Weighing by_;
  Scratch& s_;
  Bracket brackets_[2];
};

}  // namespace

int32_t draw_nucleus(const Descent& descent, const Request& request, double total) {
  if (request.top_p == 1.0) return descent.find(request.uniform * descent.total()).place;
  const Descent::Stop last = descent.find(std::nextafter(request.top_p * total, 0.0));
  const Descent::Stop stop = descent.find(request.uniform * last.sum);
  return stop.sum > last.sum ? last.place : stop.place;
}

int32_t draw_above(const Kernels& kernels, const Row& row, float least, bool has_floor,
                   Weighing by, const Request& request, Scratch& s) {
  float near = least;
  if (!has_floor) {
    const double head = kHead * kLog2E / static_cast<double>(by.scale);
    near = std::max(least, static_cast<float>(row.range.maximum - head));
  }
  const bool many = row.count > kMany;
  if (many) look_at_sample(kernels, row, s);
  if (!many || kEvery * sampled(kernels, near, s).size <= kMany) {
    const Descent first = descend(kernels, gather(kernels, row, near, 1, s), by, s);
    const double total = near > least ? total_of(kernels, row, by.scale, s) : first.total();
    if (near == least || first.total() >= request.top_p * total) {
      return draw_nucleus(first, request, total);
    }
  }
  if (many) {
    int32_t place;
    if (Bracketed(kernels, row, least, by, s).draw(request, place)) return place;
  }
  const Descent descent = descend(kernels, gather(kernels, row, least, 1, s), by, s);
  return draw_nucleus(descent, request, descent.total());
}

}  // namespace onnxport
