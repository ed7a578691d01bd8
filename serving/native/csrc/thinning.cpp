#include "thinning.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "typical.h"

namespace onnxport {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr double kHead = 10.0;  // exp(-10): tokens that are looked at first
constexpr double kLog2E = 1.4426950408889634;
constexpr double kSurely = 1.2;     // of a threshold, by a sample: others are not reached
constexpr double kRounding = 1e-4;  // of logarithms of weights

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

// What is left once all choices but the least likely one are gone.
Candidates others_of(const Candidates& all, const Choices& choices, Scratch& s) {
  Shelf& shelf = s.others;
  shelf.make_room(all.size);
  size_t size = 0;
  for (int64_t i = 0; i < all.size; i++) {
    shelf.values[size] = all.values[i];
    shelf.places[size] = all.place(i);
    size += choices.last < 0 || i == choices.last || all.values[i] < choices.least;
  }
  return shelf.first(static_cast<int64_t>(size));
}

// The place of the token that is drawn once XTC has left out the likely choices but the least
// likely one. What it leaves is looked at by itself: it may weigh too little beside what it leaves
// out.
int32_t draw_others(const Kernels& kernels, const Candidates& all, Weighing by, Descent::Stop end,
                    const Request& request, Scratch& s) {
  const Choices choices = choices_of(kernels, all, by, request.xtc_threshold * end.sum);
  if (end.place >= 0 && choices.sum >= end.sum) return end.place;  // there are no others
  const Candidates others = others_of(all, choices, s);
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

// Drawing from many candidates of which XTC leaves out the likely choices: those that it leaves are
// below a value, and perhaps one that comes before them. A sample tells where the number leads.
class Others {
 public:
  Others(const Kernels& kernels, const Row& row, const Candidates& all, Weighing by, Scratch& s)
      : kernels_(kernels), row_(row), all_(all), by_(by), s_(s) {}

  // False if it takes a look at all of them.
  bool draw(double threshold, double number, int32_t& place) {
    const Sample sample(kernels_, all_, by_, s_);
    if (!sample.is_good()) return false;
    if (threshold * kEvery * sample.total() > kSurely) {  // no choice is likely, it seems
      const bool is_drawn = draw_below(sample, number, place);
      if (threshold * total_ > 1.0) return is_drawn;
    } else {
      total_ = kernels_.tally(all_.values, all_.size, by_, INFINITY, INFINITY).weights;
    }
    return leave_out(threshold * total_) && draw_below(sample, number, place);
  }

 private:
  // Finds the likely choices, of weights of at least `bound`, and what is left; false: there are
  // too many.
  bool leave_out(double bound) {
    if (bound > 1.0) return true;  // no weight is larger than 1
    const double log = std::log2(bound) - kRounding;
    const double least = static_cast<double>(by_.maximum) + log / static_cast<double>(by_.scale);
    if (!(least > kLowest)) return false;
    const Candidates likely =
        reaching(kernels_, row_, all_, static_cast<float>(least), s_.bracketed);
    if (likely.size > kMany) return false;
    const Choices choices = choices_of(kernels_, likely, by_, bound);
    if (choices.last < 0) return true;
    by_.maximum = upper_ = choices.least;
    least_likely_ = likely.place(choices.last);
    first_ = 1.0;
    return true;
  }

  // Draws from what is left; false: the sample was of no use.
  bool draw_below(const Sample& sample, double number, int32_t& place) {
    const Sample::Part top = sample.above(static_cast<double>(upper_));
    const double left = 1.0 - top.weights;
    const double end = sample.value_above(top.weights + left * number);
    const float edge = std::min(upper_, std::max(kLowest, static_cast<float>(end)));
    const Tally tally = kernels_.tally(all_.values, all_.size, by_, upper_, edge);
    total_ = first_ + tally.weights;
    const double target = number * total_ - first_;
    if (target < 0.0) {
      place = least_likely_;
      return true;
    }
    const Sample::Part below{left, 1.0 - top.squares};
    if (sample.effective(below) < kEffective) return find(head(sample), target, place);
    // So far from the edge it is, by the sample.
    const double part =
        sample.above(edge).weights + left * (target - tally.above[0]) / tally.weights;
    for (const double deviations : kDeviations) {
      const double off =
          left * kLeastPart + deviations * sample.deviation(edge, sample.value_above(part));
      const float low = static_cast<float>(sample.value_above(part + off));
      const float high = static_cast<float>(sample.value_above(part - off));
      const Bracket bracket{std::max(kLowest, std::min(edge, low)),
                            std::min(upper_, std::max(edge, high))};
      if (sample.size(bracket) > all_.size / kWide) return false;
      if (draw_near(bracket, edge, target - tally.above[0], place)) return true;
    }
    return false;
  }

  // Finds what is so far below an edge, in a bracket around it; false if it is not there.
  bool draw_near(Bracket bracket, float edge, double target, int32_t& place) {
    Shelf& shelf = s_.split;
    shelf.make_room(all_.size);
    const int64_t size = kernels_.gather_between(all_.values, all_.size, bracket,
                                                 shelf.values.data(), shelf.places.data());
    s_.weights.resize(static_cast<size_t>(size));
    kernels_.weigh(shelf.values.data(), size, by_, s_.weights.data());
    for (size_t i = 0; i < static_cast<size_t>(size); i++) {
      if (shelf.values[i] >= edge) target += s_.weights[i];
      shelf.places[i] = all_.place(shelf.places[i]);
    }
    return find(shelf.first(size), target, place);
  }

  // The likeliest of those that are left.
  Candidates head(const Sample& sample) {
    const double top = std::min(upper_, by_.maximum);
    const double least = std::max(top - kHead * kLog2E / static_cast<double>(by_.scale),
                                  sample.value_of(kMany, static_cast<double>(upper_)));
    const Candidates all = reaching(kernels_, row_, all_, static_cast<float>(least), s_.bracketed);
    Shelf& shelf = s_.others;
    shelf.make_room(all.size);
    size_t size = 0;
    for (int64_t i = 0; i < all.size; i++) {
      shelf.values[size] = all.values[i];
      shelf.places[size] = all.place(i);
      size += all.values[i] < upper_;
    }
    return shelf.first(static_cast<int64_t>(size));
  }

  bool find(const Candidates& few, double target, int32_t& place) const {
    if (few.size == 0 || target < 0.0) return false;
    const Descent descent(kernels_, few, kernels_.scan(few.values, few.size), by_, s_);
    if (target >= descent.total()) return false;
    place = descent.find(target).place;
    return true;
  }

  const Kernels& kernels_;
  const Row& row_;
  const Candidates& all_;
  Weighing by_;  // of what is left
  Scratch& s_;
  float upper_ = INFINITY;     // what is left is below
  double total_ = 0.0;         // of all weights, of what is left once that is known
  double first_ = 0.0;         // the weight of the choice that is left, too: 1, or none
  int32_t least_likely_ = -1;  // its place
};

// Finds the likeliest of many candidates, if they are few and top_p leaves no others, and the sum
// of the weights of all; false: there is more to look at.
bool find_head(const Kernels& kernels, const Row& row, const Candidates& all, Weighing by,
               double top_p, Scratch& s, Candidates& head, double& total) {
  const Sample sample(kernels, all, by, s);
  if (!sample.is_good()) return false;
  const double reach = kHead * kLog2E / static_cast<double>(by.scale);
  const double least =
      std::max(static_cast<double>(by.maximum) - reach, sample.value_of(kMany, INFINITY));
  // Twice the deviation: more is seldom there than the sample says.
  const Sample::Part part = sample.above(least);
  if (part.weights + 2.0 * sample.deviation(part) < top_p) return false;
  const Candidates found = reaching(kernels, row, all, static_cast<float>(least), s.bracketed);
  if (found.size == 0) return false;
  const double whole = kernels.tally(all.values, all.size, by, INFINITY, INFINITY).weights;
  if (kernels.tally(found.values, found.size, by, INFINITY, INFINITY).weights < top_p * whole) {
    return false;
  }
  head = found;
  total = whole;
  return true;
}

}  // namespace

float sigma_floor(const Kernels& kernels, const Row& row, double deviations) {
  const double maximum = row.range.maximum;
  const Moments moments = kernels.moments(row.values, row.count, row.range.maximum);
  const double mean = moments.sum / moments.count;
  const double variance = std::max(0.0, moments.squares / moments.count - mean * mean);
  return static_cast<float>(maximum - deviations * std::sqrt(variance));
}

Candidates without_choices(const Kernels& kernels, const Candidates& all, Weighing by,
                           double bound, Scratch& s) {
  return others_of(all, choices_of(kernels, all, by, bound), s);
}

int32_t draw_thinned(const Kernels& kernels, const Row& row, const Candidates& kept, Weighing by,
                     const Request& request, Scratch& s) {
  Candidates all = kept;
  int32_t place;
  if (request.typical_p < 1.0) {
    if (kept.size <= kMany) {
      all = typical(kernels, kept, by, request.typical_p, s);
    } else if (thin_or_draw(kernels, row, kept, by, request, s, all, place)) {
      return place;
    }
    if (all.size == 0) all = kept;  // what the model told of the row is wrong
  }
  const bool has_xtc = request.xtc_threshold <= 1.0;
  if (has_xtc && request.top_p == 1.0 && all.size > kMany) {
    Others others(kernels, row, all, by, s);
    if (others.draw(request.xtc_threshold, request.uniform, place)) return place;
  }
  Candidates head = all;
  double total;
  const bool is_short = request.top_p < 1.0 && all.size > kMany &&
                        find_head(kernels, row, all, by, request.top_p, s, head, total);
  const Descent descent(kernels, head, kernels.scan(head.values, head.size), by, s);
  if (!is_short) total = descent.total();
  Descent::Stop last{-1, total};
  if (request.top_p < 1.0) last = descent.find(std::nextafter(request.top_p * total, 0.0));
  if (has_xtc) return draw_others(kernels, head, by, last, request, s);
  const Descent::Stop stop = descent.find(request.uniform * last.sum);
  return last.place >= 0 && stop.sum > last.sum ? last.place : stop.place;
}

}  // namespace onnxport
