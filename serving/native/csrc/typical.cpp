#include "typical.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr double kHead =
    10.0;  // tokens less likely than the average by exp(-10) seldom are typical
constexpr double kDeviations[] = {2.5, 6.0};  // how far a sample may be wrong, in two attempts
constexpr double kWidest = 0.25;              // a bracket of a larger part of all saves nothing

// How far the surprise of tokens, -log p, is from what it is on average.
class Surprise {
 public:
  // By the sum of all weights, and that of all weights times their logarithms.
  Surprise(Weighing by, double total, double logs)
      : maximum_(static_cast<double>(by.maximum)),
        per_unit_(static_cast<double>(by.scale) / kLog2E),
        total_(total),
        average_(logs / total) {}

  double total() const { return total_; }
  bool is_likelier(float value) const { return exponent(value) > average_; }
  double distance(float value) const { return std::fabs(average_ - exponent(value)); }

  // What values are from the average, and so far from it.
  double centre() const { return maximum_ + average_ / per_unit_; }
  double below(double distance) const { return centre() - distance / per_unit_; }

  // The logarithm of a weight.
  double exponent(float value) const { return (static_cast<double>(value) - maximum_) * per_unit_; }

 private:
  double maximum_, per_unit_, total_, average_;
};

// Of few candidates exactly.
Surprise surprise_of(const Candidates& all, const std::vector<float>& weights, Weighing by) {
  constexpr int64_t kLanes = 4;  // sums that do not wait for each other
  const Surprise bare(by, 1.0, 0.0);
  double totals[kLanes] = {}, sums[kLanes] = {};
  for (int64_t i = 0; i < all.size; i++) {
    const double weight = weights[static_cast<size_t>(i)];
    totals[i % kLanes] += weight;
    sums[i % kLanes] += weight * bare.exponent(all.values[i]);
  }
  return {by, (totals[0] + totals[1]) + (totals[2] + totals[3]),
          (sums[0] + sums[1]) + (sums[2] + sums[3])};
}

// Which of some candidates are the nearest to the average, as many as have a weight together. The
// nearer one comes first, of two the likelier one, of equals the one that lies nearer in the order
// of the values.
class Nearest {
 public:
  // By their weights, in scratch.weights, and a range that has all their distances.
  Nearest(const Surprise& surprise, const Candidates& all, double low, double high, double wanted,
          Scratch& s)
      : surprise_(surprise), all_(all), s_(s) {
    const double per_unit = high > low ? kBuckets / (high - low) : 0.0;
    s.buckets.resize(static_cast<size_t>(all.size));
    double masses[kBuckets] = {};
    for (int64_t i = 0; i < all.size; i++) {
      const double place = (surprise.distance(all.values[i]) - low) * per_unit;
      const int32_t bucket =
          place < kBuckets - 1 ? std::max(0, static_cast<int32_t>(place)) : kBuckets - 1;
      s.buckets[static_cast<size_t>(i)] = bucket;
      masses[bucket] += s.weights[static_cast<size_t>(i)];
    }
    while (last_ < kBuckets - 1 && sum_ + masses[last_] < wanted) sum_ += masses[last_++];
    take_of_last(wanted);
  }

  bool has(int64_t i) const { return s_.buckets[static_cast<size_t>(i)] < last_; }
  double sum() const { return sum_; }  // of their weights
  double distance() const {
    return distance_;
  }  // of the farthest one; -inf if it was not looked for

 private:
  void take_of_last(double wanted) {
    s_.members.clear();
    for (int64_t i = 0; i < all_.size; i++)
      if (s_.buckets[static_cast<size_t>(i)] == last_) s_.members.push_back(i);
    std::sort(s_.members.begin(), s_.members.end(),
              [&](int64_t one, int64_t other) { return is_before(one, other); });
    for (size_t next = 0; next < s_.members.size() && sum_ < wanted; next++) {
      const size_t member = static_cast<size_t>(s_.members[next]);
      sum_ += s_.weights[member];
      s_.buckets[member] = -1;
      distance_ = surprise_.distance(all_.values[member]);
    }
  }

  bool is_before(int64_t one, int64_t other) const {
    const float mine = all_.values[one], its = all_.values[other];
    const double near = surprise_.distance(mine), far = surprise_.distance(its);
    if (near != far) return near < far;
    const bool likelier = surprise_.is_likelier(mine);
    if (likelier != surprise_.is_likelier(its)) return likelier;
    return likelier ? one > other : one < other;
  }

  const Surprise& surprise_;
  const Candidates& all_;
  Scratch& s_;
  int32_t last_ = 0;
  double sum_ = 0.0, distance_ = -INFINITY;
};

void weigh(const Kernels& kernels, const Candidates& all, Weighing by, Scratch& s) {
  s.weights.resize(static_cast<size_t>(all.size));
  kernels.weigh(all.values, all.size, by, s.weights.data());
}

// The largest distance of any of some candidates.
double widest(const Kernels& kernels, const Candidates& all, const Surprise& surprise) {
  const Range range = kernels.scan(all.values, all.size);
  return std::max(surprise.distance(range.maximum), surprise.distance(range.minimum));
}

// Those of candidates [begin, end) that are among the nearest, in their order.
Candidates take(const Candidates& all, int64_t begin, int64_t end, const Nearest& nearest,
                Shelf& shelf) {
  shelf.make_room(end - begin);
  size_t size = 0;
  for (int64_t i = begin; i < end; i++) {
    shelf.values[size] = all.values[i];
    shelf.places[size] = all.place(i);
    size += nearest.has(i);
  }
  return shelf.first(static_cast<int64_t>(size));
}

int32_t find(const Kernels& kernels, const Candidates& all, Weighing by, double target,
             Scratch& s) {
  return Descent(kernels, all, kernels.scan(all.values, all.size), by, s).find(target).place;
}

// Draws from the typical ones of many candidates, of which a sample tells about where they end,
// above and below the average, and where the number leads. Only what is there is looked at; of the
// rest, the sums of weights say that it is the right place.
class Climb {
 public:
  Climb(const Kernels& kernels, const Candidates& all, Weighing by, Scratch& s)
      : kernels_(kernels), all_(all), by_(by), s_(s) {}

  // False if the sample was of no use, being so many standard deviations off at most.
  bool draw(const Sample& sample, double deviations, double share, double number, int32_t& place) {
    if (!choose(sample, deviations, share, number)) return false;
    s_.split.make_room(all_.size);
    Steps steps{0.0, 0.0, 0, s_.split.values.data(), s_.split.places.data()};
    Totals totals;
    kernels_.climb(all_.values, all_.size, by_, ladder_, s_.ahead, steps, &totals);
    const Surprise surprise(by_, totals.weights, totals.logs / kLog2E);
    const double inside = steps.above + steps.rest, wanted = share * totals.weights - inside;
    Shelf& shelf = s_.typical;
    const int64_t upper = list(steps, 0, shelf, 0), size = upper + list(steps, 4, shelf, upper);
    const Candidates border = shelf.first(size);
    if (!(wanted > 0.0) || size == 0) return false;
    // All that is between the outer steps is nearer than this, all beyond them farther than that.
    const float* const edges = ladder_.edges;
    const double near = std::max(surprise.distance(edges[1]), surprise.distance(edges[4]));
    const double far = std::min(surprise.distance(edges[0]), surprise.distance(edges[5]));
    weigh(kernels_, border, by_, s_);
    const Nearest nearest(surprise, border, 0.0, widest(kernels_, border, surprise), wanted, s_);
    const bool is_known = nearest.distance() > near && nearest.distance() < far;
    if (!is_known || nearest.sum() < wanted) return false;
    double before = 0.0;
    for (int64_t i = 0; i < upper; i++)
      if (nearest.has(i)) before += s_.weights[static_cast<size_t>(i)];
    const double target = number * (nearest.sum() + inside);
    if (target < before) {
      place = find(kernels_, take(border, 0, upper, nearest, s_.others), by_, target, s_);
      return true;
    }
    if (target < before + inside) return find_between(steps, target - before, place);
    const Candidates lower = take(border, upper, size, nearest, s_.others);
    if (lower.size == 0) return false;
    place = find(kernels_, lower, by_, target - before - inside, s_);
    return true;
  }

 private:
  // Chooses the ladder: around the ends above and below, with where the number leads between them.
  bool choose(const Sample& sample, double deviations, double share, double number) {
    const double centre = sample.average(), about = sample.reach(centre, share);
    const double margin = deviations * sample.deviation(sample.near(centre, about));
    if (!(2.0 * margin < kWidest)) return false;
    const double moved = deviations * sample.average_deviation();
    const double inner = std::max(0.0, sample.reach(centre, share - margin) - moved);
    const double outer = sample.reach(centre, share + margin) + moved;
    const Sample::Part top = sample.above(centre + about);
    const double part = top.weights + share * number;
    // Where typical ones end moves what comes behind it.
    const double middle = sample.value_above(part);
    const double off = margin + deviations * sample.deviation(sample.above(middle) - top);
    float* const edges = ladder_.edges;
    edges[0] = static_cast<float>(centre + outer);
    edges[1] = static_cast<float>(centre + inner);
    edges[4] = std::max(kLowest, static_cast<float>(centre - inner));
    edges[5] = std::max(kLowest, static_cast<float>(centre - outer));
    const float high = static_cast<float>(sample.value_above(part - off));
    const float low = static_cast<float>(sample.value_above(part + off));
    edges[2] = std::min(edges[1], std::max(edges[4], high));
    edges[3] = std::min(edges[2], std::max(edges[4], low));
    return edges[0] >= edges[1] && edges[4] >= edges[5];
  }

  // Adds what is on a step to a shelf that has `size` candidates; returns how many.
  int64_t list(const Steps& steps, int number, Shelf& shelf, int64_t size) const {
    shelf.make_room(size + steps.size);
    int32_t* const places = shelf.places.data() + size;
    const int64_t count = kernels_.gather_between(steps.found, steps.size, ladder_.step(number),
                                                  shelf.values.data() + size, places);
    for (int64_t i = 0; i < count; i++) places[i] = all_.place(steps.places[places[i]]);
    return count;
  }

  // Finds what lies so far below the second step's upper edge; false if it is not on the third.
  bool find_between(const Steps& steps, double target, int32_t& place) const {
    if (target < steps.above) return false;
    Shelf& shelf = s_.bracketed;
    const int64_t size = list(steps, 2, shelf, 0);
    const Candidates few = shelf.first(size);
    if (few.size == 0) return false;
    const Descent descent(kernels_, few, kernels_.scan(few.values, few.size), by_, s_);
    if (target - steps.above >= descent.total()) return false;
    place = descent.find(target - steps.above).place;
    return true;
  }

  const Kernels& kernels_;
  const Candidates& all_;
  Weighing by_;
  Scratch& s_;
  Ladder ladder_;
};

// Finds the typical ones among those that are not much less likely than the average, if these are
// few; false: others are typical, too.
bool find_near(const Kernels& kernels, const Row& row, const Candidates& all, Weighing by,
               double share, const Sample& sample, Scratch& s, Candidates& left) {
  const Totals totals = kernels.totals(all.values, all.size, by);
  const Surprise surprise(by, totals.weights, totals.logs / kLog2E);
  const float least =
      static_cast<float>(std::max(surprise.below(kHead), sample.value_of(kMany, INFINITY)));
  if (surprise.is_likelier(least)) return false;
  const Candidates head = reaching(kernels, row, all, least, s.bracketed);
  if (head.size == 0) return false;
  weigh(kernels, head, by, s);
  const double wanted = share * surprise.total();
  const Nearest nearest(surprise, head, 0.0, widest(kernels, head, surprise), wanted, s);
  if (nearest.sum() < wanted || nearest.distance() >= surprise.distance(least)) return false;
  left = take(head, 0, head.size, nearest, s.typical);
  return true;
}

}  // namespace

Candidates typical(const Kernels& kernels, const Candidates& all, Weighing by, double wanted,
                   Scratch& s) {
  weigh(kernels, all, by, s);
  const Surprise surprise = surprise_of(all, s.weights, by);
  const Nearest nearest(surprise, all, 0.0, widest(kernels, all, surprise),
                        wanted * surprise.total(), s);
  return take(all, 0, all.size, nearest, s.typical);
}

bool thin_or_draw(const Kernels& kernels, const Row& row, const Candidates& all, Weighing by,
                  const Request& request, Scratch& s, Candidates& left, int32_t& place) {
  const double share = request.typical_p;
  const Sample sample(kernels, all, by, s);
  if (sample.is_good()) {
    const bool is_last = request.top_p == 1.0 && request.xtc_threshold > 1.0;
    Climb climb(kernels, all, by, s);
    for (const double deviations : kDeviations) {
      if (is_last && climb.draw(sample, deviations, share, request.uniform, place)) return true;
    }
    if (find_near(kernels, row, all, by, share, sample, s, left)) return false;
  }
  left = typical(kernels, all, by, share, s);
  return false;
}

}  // namespace onnxport
