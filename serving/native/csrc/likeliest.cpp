#include "likeliest.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace onnxport {
namespace {

constexpr int64_t kFew = 64;      // candidates that are sorted rather than counted out
constexpr int64_t kSelect = 4096;  // candidates of which a few are selected without counting first

// Sorts as (largest value, first place): the bits of floats sort like integers once the negative
// ones are inverted and the others get the highest bit; all of it inverted sorts the largest first.
uint64_t key_of(float value, int64_t index) {
  value += 0.f;  // -0 becomes 0, which it equals
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t descending = bits >> 31 ? bits : bits ^ 0x7fffffffu;
  return static_cast<uint64_t>(descending) << 32 | static_cast<uint64_t>(index);
}

void make_keys(const Candidates& all, std::vector<uint64_t>& keys) {
  keys.resize(static_cast<size_t>(all.size));
  for (int64_t i = 0; i < all.size; i++) keys[static_cast<size_t>(i)] = key_of(all.values[i], i);
}

// The key of the `size`-th largest.
uint64_t last_key(const Kernels& kernels, const Candidates& all, int64_t size, Scratch& scratch) {
  std::vector<uint64_t>& keys = scratch.keys;
  const Range range = kernels.scan(all.values, all.size);
  if (all.size <= kSelect || !is_divisible(range)) {
    make_keys(all, keys);
  } else {
    const Bucketing by = divide(range);
    int64_t counts[kBuckets] = {};
    int32_t buckets[kChunk];
    for (int64_t begin = 0; begin < all.size; begin += kChunk) {
      const int64_t count = std::min(kChunk, all.size - begin);
      kernels.bucket(all.values + begin, count, by, buckets);
      for (int64_t i = 0; i < count; i++) counts[buckets[i]]++;
    }
    int32_t bucket = 0;
    for (; size > counts[bucket]; bucket++) size -= counts[bucket];
    Shelf& few = scratch.parts[0];
    few.make_room(all.size);
    const int64_t count = kernels.gather_bucket(all.values, all.size, by, bucket,
                                                few.values.data(), few.places.data());
    keys.clear();
    for (int64_t i = 0; i < count; i++) {
      const size_t at = static_cast<size_t>(i);
      keys.push_back(key_of(few.values[at], few.places[at]));
    }
  }
  const auto last = keys.begin() + (size - 1);
  std::nth_element(keys.begin(), last, keys.end());
  return *last;
}

// The `size`-th largest of `count` values, which are put in another order.
float select(float* values, int64_t count, int64_t size) {
  std::nth_element(values, values + (size - 1), values + count, std::greater<float>());
  return values[size - 1];
}

}  // namespace

bool is_divisible(Range range) {
  const float length = range.maximum - range.minimum;
  return length > 1e-30f && length < INFINITY;
}

Bucketing divide(Range range) {
  return {range.maximum, static_cast<float>(kBuckets) / (range.maximum - range.minimum)};
}

double total_of(const Kernels& kernels, const Row& row, float scale, Scratch& scratch) {
  const int64_t chunks = num_chunks(row.count);
  const rows::Summary& summary = row.summary;
  if (*summary.scale != scale) kernels.weigh_chunks(row.values, row.count, scale, summary);
  std::vector<float>& factors = scratch.factors;
  factors.resize(static_cast<size_t>(chunks));
  kernels.weigh(summary.largest, chunks, {row.range.maximum, scale}, factors.data());
  scratch.sums.resize(static_cast<size_t>(chunks));
  double total = 0.0;
  for (int64_t i = 0; i < chunks; i++) {
    const size_t at = static_cast<size_t>(i);
    scratch.sums[at] = static_cast<double>(factors[at]) * static_cast<double>(summary.sums[i]);
    total += scratch.sums[at];
  }
  return total;
}

float reached_by(const Kernels& kernels, const Row& row, int64_t size, Scratch& scratch) {
  const int64_t chunks = num_chunks(row.count), groups = chunks * kGroups;
  if (size > groups / 2) return -INFINITY;
  // Each group holds a value as large as its maximum, and each chunk does. Of few values the
  // chunks tell which groups to look at.
  Shelf& bounds = scratch.bounds;
  bounds.make_room(groups);
  float least = -INFINITY;
  if (size <= chunks / 2) {
    std::copy_n(row.summary.largest, chunks, bounds.values.data());
    least = select(bounds.values.data(), chunks, size);
  }
  const int64_t count = kernels.gather(row.summary.groups, groups, nullptr, least,
                                       bounds.values.data(), bounds.places.data());
  return count < size ? -INFINITY : select(bounds.values.data(), count, size);
}

Candidates gather(const Kernels& kernels, const Row& row, float least, int64_t size,
                  Scratch& scratch) {
  const Candidates all{row.values, nullptr, row.count};
  if (row.range.minimum >= least) return all;
  Shelf& head = scratch.head;
  head.make_room(row.count);
  const int64_t count = kernels.gather(row.values, row.count, row.summary.groups, least,
                                       head.values.data(), head.places.data());
  return count < size ? all : head.first(count);
}

Candidates reaching(const Kernels& kernels, const Row& row, const Candidates& all, float least,
                    Shelf& shelf) {
  shelf.make_room(all.size);
  const bool is_row = all.values == row.values && all.size == row.count;
  const int64_t count =
      kernels.gather(all.values, all.size, is_row ? row.summary.groups : nullptr, least,
                     shelf.values.data(), shelf.places.data());
  for (int64_t i = 0; i < count; i++) {
    int32_t& place = shelf.places[static_cast<size_t>(i)];
    place = all.place(place);
  }
  return shelf.first(count);
}

Candidates largest(const Kernels& kernels, const Candidates& all, int64_t size, Scratch& scratch) {
  if (size >= all.size) return all;
  const uint64_t last = last_key(kernels, all, size, scratch);
  Shelf& kept = scratch.kept;
  kept.make_room(size);
  int64_t count = 0;
  for (int64_t i = 0; i < all.size; i++) {
    kept.values[static_cast<size_t>(count)] = all.values[i];
    kept.places[static_cast<size_t>(count)] = all.place(i);
    count += key_of(all.values[i], i) <= last;
  }
  return kept.first(size);
}

Candidates sorted(const Candidates& all, Scratch& scratch) {
  make_keys(all, scratch.keys);
  std::sort(scratch.keys.begin(), scratch.keys.end());
  Shelf& sorted = scratch.sorted;
  sorted.make_room(all.size);
  for (size_t i = 0; i < scratch.keys.size(); i++) {
    const uint32_t from = static_cast<uint32_t>(scratch.keys[i]);
    sorted.values[i] = all.values[from];
    sorted.places[i] = all.place(from);
  }
  return sorted.first(all.size);
}

Descent::Descent(const Kernels& kernels, const Candidates& all, Range range, Weighing weighing,
                 Scratch& scratch, int level)
    : kernels_(kernels), all_(all), weighing_(weighing), scratch_(scratch), level_(level) {
  if (range.maximum == range.minimum) {
    order_ = Order::kEqual;
    float weight;
    kernels.weigh(all.values, 1, weighing, &weight);
    total_ = static_cast<double>(weight) * static_cast<double>(all.size);
  } else if (all.size <= kFew || !is_divisible(range)) {
    order_ = Order::kSorted;
    weigh_sorted();
  } else {
    order_ = Order::kBuckets;
    bucketing_ = divide(range);
    weigh_buckets();
  }
}

void Descent::weigh_sorted() {
  all_ = sorted(all_, scratch_);
  scratch_.weights.resize(static_cast<size_t>(all_.size));
  kernels_.weigh(all_.values, all_.size, weighing_, scratch_.weights.data());
  for (int64_t i = 0; i < all_.size; i++) total_ += scratch_.weights[static_cast<size_t>(i)];
}

void Descent::weigh_buckets() {
  memset(masses_, 0, sizeof masses_);
  int32_t buckets[kChunk];
  float weights[kChunk];
  for (int64_t begin = 0; begin < all_.size; begin += kChunk) {
    const int64_t count = std::min(kChunk, all_.size - begin);
    kernels_.bucket(all_.values + begin, count, bucketing_, buckets);
    kernels_.weigh(all_.values + begin, count, weighing_, weights);
    for (int64_t i = 0; i < count; i++) masses_[i % kCopies][buckets[i]] += weights[i];
  }
  for (int32_t i = 0; i < kBuckets; i++) total_ += masses_[0][i] + masses_[1][i];
}

Descent::Stop Descent::find(double target) const {
  switch (order_) {
    case Order::kSorted: return find_sorted(target);
    case Order::kEqual: return find_equal(target);
    default: return find_in_bucket(target);
  }
}

Descent::Stop Descent::find_sorted(double target) const {
  double sum = 0.0;
  for (int64_t i = 0; i < all_.size; i++) {
    sum += scratch_.weights[static_cast<size_t>(i)];
    if (sum > target) return {all_.place(i), sum};
  }
  return {all_.place(all_.size - 1), total_};
}

Descent::Stop Descent::find_equal(double target) const {
  const double weight = total_ / static_cast<double>(all_.size);
  const double passed = std::max(0.0, std::floor(target / weight));
  const int64_t index = std::min(all_.size - 1, static_cast<int64_t>(passed));
  return {all_.place(index), weight * static_cast<double>(index + 1)};
}

int32_t Descent::bucket_of(double target, double& before) const {
  double sum = 0.0;
  int32_t bucket = 0;
  for (int32_t i = 0; i < kBuckets && sum <= target; i++) {
    const double mass = masses_[0][i] + masses_[1][i];
    if (mass == 0.0) continue;
    bucket = i;
    before = sum;
    sum += mass;
  }
  return bucket;
}

Bracket Descent::bucket_around(double target) const {
  double before = 0.0;
  const float bucket = static_cast<float>(bucket_of(target, before));
  const Bucketing by = bucketing_;
  const float upper = bucket > 0.f ? by.top - bucket / by.per_unit : INFINITY;
  return {by.top - (bucket + 1.f) / by.per_unit, upper};
}

Descent::Stop Descent::find_in_bucket(double target) const {
  double before = 0.0;
  const int32_t bucket = bucket_of(target, before);
  Shelf& shelf = scratch_.parts[level_ % 2];
  shelf.make_room(all_.size);
  const Candidates members =
      shelf.first(kernels_.gather_bucket(all_.values, all_.size, bucketing_, bucket,
                                         shelf.values.data(), shelf.places.data()));
  for (int64_t i = 0; i < members.size; i++) {
    int32_t& place = shelf.places[static_cast<size_t>(i)];
    place = all_.place(place);
  }
  const Range range = kernels_.scan(members.values, members.size);
  const Descent descent(kernels_, members, range, weighing_, scratch_, level_ + 1);
  const Stop stop = descent.find(target - before);
  return {stop.place, before + stop.sum};
}

}  // namespace onnxport
