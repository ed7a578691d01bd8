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
constexpr double kWidest = 0.25;      // a bracket of a larger part of all saves nothing
constexpr int64_t kLittle = 64;       // such a part of all costs less to list than to tell apart
constexpr double kLeastOff = 0.0005;  // of all weights: brackets are by as much wider, at least
constexpr double kLeastShare = 0.01;  // a smaller one is lost in the rounding of the sums of all

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
  // By their weights, in scratch.weights. None is nearer than `least`.
  Nearest(const Kernels& kernels, const Surprise& surprise, const Candidates& all, double least,
          double wanted, Scratch& s)
      : surprise_(surprise), all_(all), s_(s) {
    const Range range = kernels.scan(all.values, all.size);
    const double widest =
        std::max(surprise.distance(range.maximum), surprise.distance(range.minimum)) - least;
    const double per_unit = widest > 0.0 ? kBuckets / widest : 0.0;
    s.buckets.resize(static_cast<size_t>(all.size));
    double masses[kBuckets] = {};
    for (int64_t i = 0; i < all.size; i++) {
      const double place = std::max(0.0, surprise.distance(all.values[i]) - least) * per_unit;
      const int32_t bucket = place < kBuckets - 1 ? static_cast<int32_t>(place) : kBuckets - 1;
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

// Draws from the typical ones of many candidates. A sample tells about where they end, above and
// below the average, and where the number leads; one pass, how much is between these places; then a
// sample tells how far from them it is, which is little. Only what is there is looked at.
class Border {
 public:
  // None of them is below `least`.
  Border(const Kernels& kernels, const Candidates& all, Weighing by, float least,
         const Sample& sample, Scratch& s)
      : kernels_(kernels), all_(all), by_(by), least_(least), sample_(sample), s_(s) {}

  // False if the sample was of no use.
  bool draw(double share, double number, int32_t& place) {
    const double centre = sample_.average(), reach = sample_.reach(centre, share);
    if (share < kLeastShare || sample_.effective({1.0, 1.0}) < kEffective) return false;
    const double end = sample_.above(centre + reach).weights + share * number;
    upper_ = static_cast<float>(centre + reach);
    lower_ = std::max(kLowest, static_cast<float>(centre - reach));
    middle_ = std::min(upper_, std::max(lower_, static_cast<float>(sample_.value_above(end))));
    tally_ = tally_of(all_);
    const Surprise surprise(by_, tally_.weights, tally_.logs / kLog2E);
    for (const double deviations : kDeviations) {
      look_around(surprise, deviations, share, number);
      if (!are_of_use()) return false;
      if (draw_near(surprise, share, number, place)) return true;
    }
    return false;
  }

 private:
  double above(double value) const { return sample_.above(value).weights; }

  Tally tally_of(const Candidates& some) const {
    const float edges[Tally::kEdges] = {upper_, middle_, lower_};
    return kernels_.tally_all(some.values, some.size, by_, least_, edges);
  }

  // The weights of values from an edge up to the upper one.
  static double between(int edge, const Tally& tally) { return tally.above[edge] - tally.above[0]; }
  double part_to(int edge) const { return between(edge, tally_) / tally_.weights; }

  // Chooses the brackets: what is between the edges is known, and how far off they are is not.
  void look_around(const Surprise& surprise, double deviations, double share, double number) {
    const double centre = surprise.centre(), top = above(upper_);
    const double wanted = share - part_to(2) + above(lower_) - top;
    const double reach = sample_.reach(centre, wanted);
    const double off = kLeastOff + deviations * (sample_.deviation(upper_, centre + reach) +
                                                  sample_.deviation(lower_, centre - reach));
    const double inner = sample_.reach(centre, wanted - off);
    const double outer = sample_.reach(centre, wanted + off);
    bracket(0, upper_, centre + inner, centre + outer);
    bracket(2, lower_, centre - outer, centre - inner);
    const double end = share * number - part_to(1) + above(middle_) - top + above(centre + reach);
    const double margin = off + deviations * sample_.deviation(middle_, sample_.value_above(end));
    bracket(1, middle_, sample_.value_above(end + margin), sample_.value_above(end - margin));
    Bracket* const each = brackets_.each;
    each[1].upper = std::max(each[2].upper, std::min(each[1].upper, each[0].lower));
    each[1].lower = std::min(each[1].upper, std::max(each[1].lower, each[2].upper));
  }

  // Whether the outer brackets are apart, and not so much is in all that it saves nothing.
  bool are_of_use() const {
    int64_t size = 0;
    for (const Bracket& one : brackets_.each) size += sample_.size(one);
    return brackets_.each[0].lower >= brackets_.each[2].upper && size <= all_.size / kWide;
  }

  // From one value to another one, and to the edge nearby.
  void bracket(int number, float edge, double low, double high) {
    brackets_.each[number] = {std::max(kLowest, std::min(edge, static_cast<float>(low))),
                              std::max(edge, static_cast<float>(high))};
  }

  // False if it is not in the brackets.
  bool draw_near(const Surprise& surprise, double share, double number, int32_t& place) {
    const Candidates listed = list();
    const Bracket* const each = brackets_.each;
    Shelf& shelf = s_.typical;
    shelf.make_room(2 * listed.size);
    const int64_t upper = pick(listed, each[0], shelf, 0);
    const int64_t size = upper + pick(listed, each[2], shelf, upper);
    const Candidates border = shelf.first(size);
    // What lies between the brackets is what lies between the edges, less what is listed of that.
    const double inside = between(2, tally_) - between(2, tally_of(border));
    const double higher = std::max(0.0, between(1, tally_) - between(1, tally_of(listed)));
    const double wanted = share * tally_.weights - inside;
    if (!(wanted > 0.0) || size == 0) return false;
    // All that is between the outer brackets is nearer than this, all beyond them farther than
    // that.
    const double near =
        std::max(surprise.distance(each[0].lower), surprise.distance(each[2].upper));
    const double far = std::min(surprise.distance(each[0].upper), surprise.distance(each[2].lower));
    weigh(kernels_, border, by_, s_);
    // A bracket may reach beyond the average.
    const bool is_apart =
        surprise.is_likelier(each[0].lower) && !surprise.is_likelier(each[2].upper);
    const double least = is_apart ? std::min(surprise.distance(each[0].lower),
                                             surprise.distance(each[2].upper))
                                  : 0.0;
    const Nearest nearest(kernels_, surprise, border, least, wanted, s_);
    const bool is_known = nearest.distance() > near && nearest.distance() < far;
    if (!is_known || nearest.sum() < wanted) return false;
    double before = 0.0;
    for (int64_t i = 0; i < upper; i++)
      if (nearest.has(i)) before += s_.weights[static_cast<size_t>(i)];
    const double target = number * (nearest.sum() + inside);
    if (target < before) {
      return find(take(border, 0, upper, nearest, s_.others), target, place);
    }
    if (target < before + inside) {
      s_.others.make_room(listed.size);
      const int64_t count = pick(listed, each[1], s_.others, 0);
      return find(s_.others.first(count), target - before - higher, place);
    }
    return find(take(border, upper, size, nearest, s_.others), target - before - inside, place);
  }

  // What is in the brackets, and what is above all of them if that is little.
  Candidates list() const {
    Brackets listed = brackets_;
    const Bracket above{listed.each[0].upper, INFINITY};
    if (sample_.size(above) <= all_.size / kLittle) listed.each[0].upper = INFINITY;
    Shelf& shelf = s_.split;
    shelf.make_room(all_.size);
    const int64_t size = kernels_.list(all_.values, all_.size, listed, s_.ahead,
                                       shelf.values.data(), shelf.places.data());
    return shelf.first(size);
  }

  // Adds what is in a bracket to a shelf that has `size` candidates; returns how many.
  int64_t pick(const Candidates& listed, Bracket bracket, Shelf& shelf, int64_t size) const {
    int32_t* const places = shelf.places.data() + size;
    const int64_t count = kernels_.gather_between(listed.values, listed.size, bracket,
                                                  shelf.values.data() + size, places);
    for (int64_t i = 0; i < count; i++) places[i] = all_.place(listed.places[places[i]]);
    return count;
  }

  bool find(const Candidates& few, double target, int32_t& place) const {
    if (few.size == 0 || target < 0.0) return false;
    const Descent descent(kernels_, few, kernels_.scan(few.values, few.size), by_, s_);
    if (target >= descent.total()) return false;
    place = descent.find(target).place;
    return true;
  }

  const Kernels& kernels_;
  const Candidates& all_;
  Weighing by_;
  float least_;
  const Sample& sample_;
  Scratch& s_;
  float upper_ = 0.f, middle_ = 0.f, lower_ = 0.f;  // the edges that the weights are tallied for
  Tally tally_;
  Brackets brackets_;
};

// Finds the typical ones among those that are not much less likely than the average, if these are
// few; false: others are typical, too.
bool find_near(const Kernels& kernels, const Row& row, const Candidates& all, Weighing by,
               double share, const Sample& sample, Scratch& s, Candidates& left) {
  const Tally tally = kernels.tally_logs(all.values, all.size, by, row.range.minimum);
  const Surprise surprise(by, tally.weights, tally.logs / kLog2E);
  const float least =
      static_cast<float>(std::max(surprise.below(kHead), sample.value_of(kMany, INFINITY)));
  if (surprise.is_likelier(least)) return false;
  const Candidates head = reaching(kernels, row, all, least, s.bracketed);
  if (head.size == 0) return false;
  weigh(kernels, head, by, s);
  const double wanted = share * surprise.total();
  const Nearest nearest(kernels, surprise, head, 0.0, wanted, s);
  if (nearest.sum() < wanted || nearest.distance() >= surprise.distance(least)) return false;
  left = take(head, 0, head.size, nearest, s.typical);
  return true;
}

}  // namespace

Candidates typical(const Kernels& kernels, const Candidates& all, Weighing by, double wanted,
                   Scratch& s) {
  weigh(kernels, all, by, s);
  const Surprise surprise = surprise_of(all, s.weights, by);
  const Nearest nearest(kernels, surprise, all, 0.0, wanted * surprise.total(), s);
  return take(all, 0, all.size, nearest, s.typical);
}

bool thin_or_draw(const Kernels& kernels, const Row& row, const Candidates& all, Weighing by,
                  const Request& request, Scratch& s, Candidates& left, int32_t& place) {
  const double share = request.typical_p;
  const Sample sample(kernels, all, by, s);
  if (sample.is_good()) {
    const bool is_last = request.top_p == 1.0 && request.xtc_threshold > 1.0;
    Border border(kernels, all, by, row.range.minimum, sample, s);
    if (is_last && border.draw(share, request.uniform, place)) return true;
    if (find_near(kernels, row, all, by, share, sample, s, left)) return false;
  }
  left = typical(kernels, all, by, share, s);
  return false;
}

}  // namespace onnxport
