// The passes of kernels.h, for the instruction set of the file that includes this. Nothing here may
// be shared with other objects, hence no templates of the standard library.
#pragma once

#include "kernels.h"
#include "rows/summary_impl.h"

namespace {

using onnxport::Bucketing;
using onnxport::kBuckets;
using onnxport::kChunk;
using onnxport::kGroup;
using onnxport::Nearness;
using onnxport::Range;
using onnxport::Weighing;

// How far ahead a row is asked for, further than the processor looks by itself: the first pass over
// it waits for memory.
constexpr int64_t kAhead = 2048;  // values

Range scan(const float* values, int64_t count) {
  Ranges ranges;
  ranges.take(values, 0, count, nullptr);
  return {largest_of(ranges.most), least_of(ranges.least), ranges.has_nan()};
}

void summarize(const float* values, int64_t count, float scale, const onnxport::rows::Summary& to) {
  summarize_part(values, 0, count, scale, values + kAhead, to);
  *to.scale = scale;
}

void weigh_chunks(const float* values, int64_t count, float scale,
                  const onnxport::rows::Summary& to) {
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count, chunk = begin / kChunk;
    to.sums[chunk] = weigh_chunk(values, begin, end, to.largest[chunk], scale, values + kAhead);
  }
  *to.scale = scale;
}

void sums(const float* values, int64_t count, Weighing by, double* sums) {
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    sums[begin / kChunk] = sum_of(sum_weights(values, begin, end, by.maximum, by.scale, nullptr));
  }
}

void weigh(const float* values, int64_t count, Weighing by, float* weights) {
  sixteens(values, 0, count, -INFINITY, [&](const Vec& x, int64_t place) {
    const Vec w = weight(x, by.maximum, by.scale);
    store_some(weights + place, w, count - place);
  });
}

static inline Floats part_near(Floats x, Weighing by, Nearness to) {
  constexpr float kLog2E = 1.44269504f;
  const Floats chance = part_exp2((x - by.maximum) * by.scale) * to.per_weight;
  const Floats off = (chance - to.target) * (1.f / Nearness::kWidth);
  const Floats distance = off < Floats{} ? -off : off;
  const Floats fall = distance * distance / (distance + 1.f);
  return part_exp2(fall * (-Nearness::kSharpness * kLog2E));
}

void near(const float* values, int64_t count, Weighing by, Nearness to, float* weights) {
  sixteens(values, 0, count, -INFINITY, [&](const Vec& x, int64_t place) {
    const Vec w = each([&](int p) { return part_near(x.part[p], by, to); });
    store_some(weights + place, w, count - place);
  });
}

void near_sums(const float* values, int64_t count, Weighing by, Nearness to, double* sums) {
  const Vec lowest = splat(-__FLT_MAX__);
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    Vec sum = splat(0.f);
    sixteens(values, begin, end, -INFINITY, [&](const Vec& x, int64_t) {
      for (int p = 0; p < kParts; p++) {
        const Found counts = reaches(x.part[p], lowest.part[p]);  // not what fills up the last one
        sum.part[p] = add_where(sum.part[p], counts, part_near(x.part[p], by, to));
      }
    });
    sums[begin / kChunk] = sum_of(sum);
  }
}

// Asks for the groups of a chunk that `bits` tells of.
static inline void ask_for_groups(const float* chunk, uint32_t bits) {
  constexpr int64_t kLine = 64 / sizeof(float);
  for (; bits; bits &= bits - 1) {
    const float* group = chunk + __builtin_ctz(bits) * kGroup;
    for (int64_t i = 0; i < kGroup; i += kLine) __builtin_prefetch(group + i);
  }
}

// Calls f(begin, end) for each group of which a value is at least `bound`, as its maximum
// says. The groups of some chunks ahead are asked for: which these are the processor cannot tell.
template <class F>
static inline void groups_reaching(const float* values, const float* group_maxima, int64_t count,
                                   const Vec& bound, F f) {
  constexpr int64_t kEarly = kAhead / kChunk;
  const int64_t chunks = onnxport::num_chunks(count);
  uint32_t coming[kEarly] = {};
  for (int64_t next = 0; next < chunks + kEarly; next++) {
    uint32_t bits = coming[next % kEarly];
    if (next < chunks) {
      coming[next % kEarly] = at_least(load(group_maxima + next * kLanes), bound);
      ask_for_groups(values + next * kChunk, coming[next % kEarly]);
    }
    for (; bits; bits &= bits - 1) {
      const int64_t begin = (next - kEarly) * kChunk + __builtin_ctz(bits) * kGroup;
      if (begin < count) f(begin, begin + kGroup < count ? begin + kGroup : count);
    }
  }
}

// The values at some places. Of few values they are fetched once all places are known: to compress
// both, vector by vector, costs more.
static inline void fetch(const float* values, const int32_t* places, int64_t size, float* found) {
  for (int64_t i = 0; i < size; i++) found[i] = values[places[i]];
}

// Calls f(bits, values, place) for vectors of which some are at least `bound`, and others near them:
// once some of 64 values are found, each vector is taken whether it has any or not, as which ones
// have some cannot be predicted.
template <class F>
static inline void each_reaching(const float* values, int64_t begin, int64_t end, const Vec& bound,
                                 F f) {
  int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    uint32_t bits[4];
    for (int j = 0; j < 4; j++) bits[j] = at_least(load(values + i + j * kLanes), bound);
    if (!(bits[0] | bits[1] | bits[2] | bits[3])) continue;
    for (int j = 0; j < 4; j++) f(bits[j], load(values + i + j * kLanes), i + j * kLanes);
  }
  sixteens(values, i, end, -INFINITY, [&](const Vec& x, int64_t place) {
    uint32_t bits = at_least(x, bound);
    if (end - place < kLanes) bits &= (1u << (end - place)) - 1;
    f(bits, x, place);
  });
}

int64_t gather(const float* values, int64_t count, const float* group_maxima, float least,
               float* found, int32_t* places) {
  const Vec bound = splat(least);
  int64_t size = 0;
  if (!group_maxima) {
    each_reaching(values, 0, count, bound, [&](uint32_t bits, const Vec& x, int64_t place) {
      size = append(bits, x, place, found, places, size);
    });
    return size;
  }
  groups_reaching(values, group_maxima, count, bound, [&](int64_t begin, int64_t end) {
    each_reaching(values, begin, end, bound, [&](uint32_t bits, const Vec&, int64_t place) {
      size = append_places(bits, place, places, size);
    });
  });
  fetch(values, places, size, found);
  return size;
}

static inline Ints part_bucket(Floats x, Bucketing by) {
  const Floats last = Floats{} + static_cast<float>(kBuckets - 1);
  const Floats place = (by.top - x) * by.per_unit;
  return __builtin_convertvector(place < last ? place : last, Ints);
}

void bucket(const float* values, int64_t count, Bucketing by, int32_t* buckets) {
  sixteens(values, 0, count, by.top, [&](const Vec& x, int64_t place) {
    const Vec numbers = each([&](int p) {
      return reinterpret_cast<Floats>(part_bucket(x.part[p], by));
    });
    store_some(buckets + place, numbers, count - place);
  });
}

int64_t gather_bucket(const float* values, int64_t count, Bucketing by, int32_t bucket,
                      float* found, int32_t* places) {
  int64_t size = 0;
  const Floats one = Floats{} + 1.f;
  sixteens(values, 0, count, by.top, [&](const Vec& x, int64_t place) {
    uint32_t bits = 0;
    for (int p = 0; p < kParts; p++) {
      const Floats yes = part_bucket(x.part[p], by) == bucket ? one : Floats{};
      bits |= bits_of(reaches(yes, one)) << (p * kPartLanes);
    }
    if (count - place < kLanes) bits &= (1u << (count - place)) - 1;
    size = append(bits, x, place, found, places, size);
  });
  return size;
}

double split(const float* values, int64_t count, float least, Weighing by,
             const onnxport::Bracket* brackets, const float* ahead, onnxport::Split& split) {
  if (!ahead) ahead = values;
  const Vec bound = splat(least);
  const Vec lower[2] = {splat(brackets[0].lower), splat(brackets[1].lower)};
  const Vec upper[2] = {splat(brackets[0].upper), splat(brackets[1].upper)};
  double total = 0.0, above[2] = {0.0, 0.0};
  int64_t size = 0;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    // All weights of the chunk come first: amid the rest of the work, which is much, too few of
    // them would be under way at once.
    float weights[kChunk];
    Vec sum = splat(0.f), high[2] = {sum, sum};
    sixteens(values, begin, end, -INFINITY, [&](const Vec& x, int64_t place) {
      __builtin_prefetch(ahead + place);
      const Vec w = weight(x, by.maximum, by.scale);
      for (int p = 0; p < kParts; p++) {
        const Found counts = reaches(x.part[p], bound.part[p]);
        sum.part[p] = add_where(sum.part[p], counts, w.part[p]);
      }
      store(weights + (place - begin), w);
    });
    sixteens(values, begin, end, -INFINITY, [&](const Vec& x, int64_t place) {
      const Vec w = load(weights + (place - begin));
      uint32_t bits = 0;
      for (int p = 0; p < kParts; p++) {
        Found inside{};
        for (int i = 0; i < 2; i++) {
          const Found over = reaches(x.part[p], upper[i].part[p]);
          high[i].part[p] = add_where(high[i].part[p], over, w.part[p]);
          inside |= without(reaches(x.part[p], lower[i].part[p]), over);
        }
        bits |= bits_of(inside) << (p * kPartLanes);
      }
      size = append_places(bits, place, split.places, size);
    });
    total += sum_of(sum);
    for (int i = 0; i < 2; i++) above[i] += sum_of(high[i]);
  }
  for (int i = 0; i < 2; i++) split.above[i] = above[i];
  fetch(values, split.places, size, split.found);
  split.size = size;
  return total;
}

// The sums of sixteen lanes in double precision.
class Sums {
 public:
  void operator+=(const Vec& x) {
    for (int p = 0; p < kParts; p++) {
      Half half[2];
      memcpy(half, &x.part[p], sizeof half);
      for (int i = 0; i < 2; i++) part_[2 * p + i] += __builtin_convertvector(half[i], Doubles);
    }
  }

  double total() const {
    double lanes[kLanes], total = 0.0;
    memcpy(lanes, part_, sizeof lanes);
    for (int i = 0; i < kLanes; i++) total += lanes[i];
    return total;
  }

 private:
  typedef float Half __attribute__((vector_size(kBytes / 2)));
  typedef double Doubles __attribute__((vector_size(kBytes)));
  Doubles part_[2 * kParts] = {};
};

constexpr int64_t kTogether = 128;  // values whose weights are summed up in float

// With that many of the edges, and the logarithms, or of the values below `top`. With kAllWeigh, each
// has a weight above 0.
template <int kEdges, bool kWithLogs, bool kAllWeigh>
static inline onnxport::Tally tally_by(const float* values, int64_t count, Weighing by, float top,
                                       const float* edges) {
  constexpr int kRoom = kEdges > 0 ? kEdges : 1;
  const Floats least = Floats{} - 127.f;  // the logarithm of what weighs nothing
  const Vec end = splat(top), none = splat(0.f);
  Vec bounds[kRoom];
  for (int e = 0; e < kEdges; e++) bounds[e] = splat(edges[e]);
  Sums weights, logs, above[kRoom];
  for (int64_t first = 0; first < count; first += kTogether) {
    const int64_t last = first + kTogether < count ? first + kTogether : count;
    Vec sum = none, products = none, parts[kRoom];
    for (int e = 0; e < kEdges; e++) parts[e] = none;
    sixteens(values, first, last, -INFINITY, [&](const Vec& x, int64_t place) {
      __builtin_prefetch(values + place + kAhead);
      const bool all_weigh = kAllWeigh && place + kLanes <= last;  // behind the last come -inf
      for (int p = 0; p < kParts; p++) {
        Floats log = (x.part[p] - by.maximum) * by.scale;
        Floats w = all_weigh ? part_exp2_within(log) : part_exp2(log);
        if (!kWithLogs) w = x.part[p] < end.part[p] ? w : Floats{};
        if (!all_weigh) log = log > least ? log : least;
        sum.part[p] += w;
        if (kWithLogs) products.part[p] += w * log;
        for (int e = 0; e < kEdges; e++) {
          parts[e].part[p] = add_where(parts[e].part[p], reaches(x.part[p], bounds[e].part[p]), w);
        }
      }
    });
    weights += sum;
    if (kWithLogs) logs += products;
    for (int e = 0; e < kEdges; e++) above[e] += parts[e];
  }
  onnxport::Tally tally{weights.total(), logs.total(), {}};
  for (int e = 0; e < kEdges; e++) tally.above[e] = above[e].total();
  return tally;
}

// With the logarithms, of values that are at least `least`.
template <int kEdges>
static inline onnxport::Tally tally_from(const float* values, int64_t count, Weighing by,
                                         float least, const float* edges) {
  return (least - by.maximum) * by.scale >= -126.f
             ? tally_by<kEdges, true, true>(values, count, by, INFINITY, edges)
             : tally_by<kEdges, true, false>(values, count, by, INFINITY, edges);
}

onnxport::Tally tally(const float* values, int64_t count, Weighing by, float top, float edge) {
  return tally_by<1, false, false>(values, count, by, top, &edge);
}

onnxport::Tally tally_all(const float* values, int64_t count, Weighing by, float least,
                          const float* edges) {
  return tally_from<onnxport::Tally::kEdges>(values, count, by, least, edges);
}

onnxport::Tally tally_logs(const float* values, int64_t count, Weighing by, float least) {
  return tally_from<0>(values, count, by, least, nullptr);
}

// With kIsOpen, the first bracket has no upper end.
template <bool kIsOpen>
static inline int64_t list_places(const float* values, int64_t count,
                                  const onnxport::Brackets& brackets, const float* ahead,
                                  int32_t* places) {
  Vec lower[3], upper[3];
  for (int b = 0; b < 3; b++) {
    lower[b] = splat(brackets.each[b].lower);
    upper[b] = splat(brackets.each[b].upper);
  }
  int64_t size = 0;
  sixteens(values, 0, count, -INFINITY, [&](const Vec& x, int64_t place) {
    __builtin_prefetch(ahead + place);
    uint32_t bits = 0;
    for (int p = 0; p < kParts; p++) {
      Found inside{};
      for (int b = 0; b < 3; b++) {
        const Found from = reaches(x.part[p], lower[b].part[p]);
        const bool is_open = kIsOpen && b == 0;
        inside = either(inside, is_open ? from : without(from, reaches(x.part[p], upper[b].part[p])));
      }
      bits |= bits_of(inside) << (p * kPartLanes);
    }
    size = append_places(bits, place, places, size);
  });
  return size;
}

int64_t list(const float* values, int64_t count, const onnxport::Brackets& brackets,
             const float* ahead, float* found, int32_t* places) {
  if (!ahead) ahead = values;
  const int64_t size = brackets.each[0].upper == INFINITY
                           ? list_places<true>(values, count, brackets, ahead, places)
                           : list_places<false>(values, count, brackets, ahead, places);
  fetch(values, places, size, found);
  return size;
}

int64_t gather_between(const float* values, int64_t count, onnxport::Bracket bracket, float* found,
                       int32_t* places) {
  const Vec lower = splat(bracket.lower), upper = splat(bracket.upper);
  int64_t size = 0;
  sixteens(values, 0, count, -INFINITY, [&](const Vec& x, int64_t place) {
    uint32_t bits = at_least(x, lower) & ~at_least(x, upper);
    if (count - place < kLanes) bits &= (1u << (count - place)) - 1;
    size = append(bits, x, place, found, places, size);
  });
  return size;
}

void copy_allowed(const float* values, int64_t count, const uint32_t* mask, float* out) {
  int32_t bits[kLanes];
  for (int i = 0; i < kLanes; i++) bits[i] = 1 << i;
  Ints lane[kParts];
  memcpy(lane, bits, sizeof lane);
  sixteens(values, 0, count, -INFINITY, [&](const Vec& x, int64_t place) {
    const int32_t half = static_cast<int32_t>(mask[place / 32] >> (place % 32));
    const Vec kept = each([&](int p) {
      const Ints allowed = (Ints{} + half) & lane[p];
      return allowed != 0 ? x.part[p] : Floats{} - INFINITY;
    });
    store_some(out + place, kept, count - place);
  });
}

// How many of values[begin, end) are at least `bound`, or only those above it.
static inline int64_t count_from(const float* values, int64_t begin, int64_t end, const Vec& bound,
                                 bool or_equal) {
  int64_t found = 0;
  sixteens(values, begin, end, -INFINITY, [&](const Vec& x, int64_t place) {
    uint32_t bits = or_equal ? at_least(x, bound) : at_least(x, bound) & ~at_least(bound, x);
    if (end - place < kLanes) bits &= (1u << (end - place)) - 1;
    found += __builtin_popcount(bits);
  });
  return found;
}

int64_t before(const float* values, int64_t count, const float* group_maxima, int64_t place) {
  const Vec bound = splat(values[place]);
  int64_t found = 0;
  groups_reaching(values, group_maxima, count, bound, [&](int64_t begin, int64_t end) {
    const int64_t middle = place < begin ? begin : place < end ? place : end;
    found += count_from(values, begin, middle, bound, true);
    found += count_from(values, middle, end, bound, false);
  });
  return found;
}

onnxport::Moments moments(const float* values, int64_t count, float maximum) {
  const Vec lowest = splat(-__FLT_MAX__), top = splat(maximum), one = splat(1.f);
  onnxport::Moments all{0.0, 0.0, 0.0};
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    Vec sum = splat(0.f), squares = sum, number = sum;
    sixteens(values, begin, end, -INFINITY, [&](const Vec& x, int64_t) {
      for (int p = 0; p < kParts; p++) {
        const Found finite = reaches(x.part[p], lowest.part[p]);
        const Floats below = x.part[p] - top.part[p];
        sum.part[p] = add_where(sum.part[p], finite, below);
        squares.part[p] = add_where(squares.part[p], finite, below * below);
        number.part[p] = add_where(number.part[p], finite, one.part[p]);
      }
    });
    all.sum += sum_of(sum);
    all.squares += sum_of(squares);
    all.count += sum_of(number);
  }
  return all;
}

int64_t count_bits(const uint32_t* mask, int64_t words) {
  int64_t found = 0;
  for (int64_t i = 0; i < words; i++) found += __builtin_popcount(mask[i]);
  return found;
}

onnxport::Spread spread(const float* values, int64_t count, float maximum) {
  constexpr float kReach = 87.f, kLog2E = 1.44269504f;  // exp(-87) is about the least above 0
  const Vec lowest = splat(-__FLT_MAX__), bound = splat(maximum - kReach), top = splat(maximum);
  const Vec one = splat(1.f);
  onnxport::Spread all{0.0, 0.0, 0.0};
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    Vec weights = splat(0.f), products = weights, number = weights;
    sixteens(values, begin, end, -INFINITY, [&](const Vec& x, int64_t) {
      const Vec w = weight(x, maximum, kLog2E);
      for (int p = 0; p < kParts; p++) {
        const Found weighs = reaches(x.part[p], bound.part[p]);
        const Floats below = x.part[p] - top.part[p];
        weights.part[p] = add_where(weights.part[p], weighs, w.part[p]);
        products.part[p] = add_where(products.part[p], weighs, w.part[p] * below);
        number.part[p] = add_where(number.part[p], reaches(x.part[p], lowest.part[p]), one.part[p]);
      }
    });
    all.weights += sum_of(weights);
    all.products += sum_of(products);
    all.count += sum_of(number);
  }
  return all;
}

constexpr onnxport::Kernels kKernels{
    ONNXPORT_KERNELS_NAME, scan, summarize, weigh_chunks, sums, weigh, near, near_sums, gather, bucket,
    gather_bucket, split, tally, tally_all, tally_logs, list, gather_between, copy_allowed, before, moments,
    count_bits, spread};

}  // namespace
