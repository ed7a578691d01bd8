// Drawing from all of a row, or finding its likeliest token, by what is known of its groups: few
// values are read, whatever is allowed.
#pragma once

#include <algorithm>
#include <cmath>

#include "likeliest.h"
#include "request.h"
#include "rows/noise.h"

namespace onnxport {

constexpr double kLeastTemperature = 1e-20;  // a smaller one has no inverse in float32

// The largest of a row's values whose bits are set, of equals the first. Groups that cannot have it
// are passed over: their maxima are of all values. Where the model knew the mask, nothing but what
// is allowed is large, and one group has it.
class LikeliestAllowed {
 public:
  LikeliestAllowed(const Kernels& kernels, const Row& row, const uint32_t* mask)
      : kernels_(kernels), row_(row), mask_(mask) {
    const float* largest = row.summary.largest;
    const int64_t chunks = num_chunks(row.count);
    look_at(std::max_element(largest, largest + chunks) - largest);
    for (int64_t chunk = 0; chunk < chunks; chunk++)
      if (may_have(largest[chunk], chunk * kChunk)) look_at(chunk);
  }

  // -inf if no value is finite that is allowed.
  float value() const { return value_; }
  int64_t place() const { return place_; }

 private:
  bool may_have(float most, int64_t first) const {
    return most > value_ || (most == value_ && first < place_);
  }

  void look_at(int64_t chunk) {
    const int64_t end = std::min(row_.count, (chunk + 1) * kChunk);
    for (int64_t first = chunk * kChunk; first < end; first += kGroup) {
      if (!may_have(row_.summary.groups[first / kGroup], first)) continue;
      const int64_t count = std::min(kGroup, end - first);
      if (!(mask_[first / 32] | (count > 32 ? mask_[first / 32 + 1] : 0))) continue;
      float kept[kGroup + kSlack];
      kernels_.copy_allowed(row_.values + first, count, mask_ + first / 32, kept);
      const float most = kernels_.scan(kept, count).maximum;
      if (!may_have(most, first)) continue;
      value_ = most;
      place_ = first + (std::find(kept, kept + count, most) - kept);
    }
  }

  const Kernels& kernels_;
  const Row& row_;
  const uint32_t* mask_;
  float value_ = -INFINITY;
  int64_t place_ = 0;
};

// The value with the largest sum of it and its noise, see rows/noise.h: a token that is drawn from
// all that may come.
class Race {
 public:
  Race(const Request& request, const uint32_t* mask)
      : noise_(request.uniform),
        per_unit_(1.0 / std::max(request.temperature, kLeastTemperature)),
        mask_(mask) {}

  // Of a row, as LikeliestAllowed finds its own. The group that seems to have it comes first.
  void run(const Row& row) {
    const int64_t groups = (row.count + kGroup - 1) / kGroup;
    int64_t first = 0;
    double most = -INFINITY;
    for (int64_t group = 0; group < groups; group++) {
      const double sum = most_of(row, group);
      if (sum > most) {
        most = sum;
        first = group;
      }
    }
    look_at(row, first);
    for (int64_t group = 0; group < groups; group++)
      if (group != first && most_of(row, group) >= best_) look_at(row, group);
  }

  // Of few.
  void run(const Candidates& few) {
    const float* largest = std::max_element(few.values, few.values + few.size);
    try_token(few.place(largest - few.values), *largest);
    for (int64_t i = 0; i < few.size; i++) try_token(few.place(i), few.values[i]);
  }

  // False: no value is finite that is allowed.
  bool has_found() const { return best_ > -INFINITY; }
  int64_t token() const { return token_; }

 private:
  double most_of(const Row& row, int64_t group) const {
    if (mask_ && !bits_of(row, group)) return -INFINITY;
    return row.summary.groups[group] * per_unit_ + noise_.most_of_group(group);
  }

  void look_at(const Row& row, int64_t group) {
    const double most = noise_.most_of_group(group);
    for (uint64_t bits = bits_of(row, group); bits; bits &= bits - 1) {
      const int64_t token = group * kGroup + __builtin_ctzll(bits);
      if (row.values[token] * per_unit_ + most >= best_) try_token(token, row.values[token]);
    }
  }

  // The tokens of a group that may come.
  uint64_t bits_of(const Row& row, int64_t group) const {
    const int64_t left = row.count - group * kGroup;
    const uint64_t all = left < kGroup ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
    if (!mask_) return all;
    const uint64_t second = left > 32 ? mask_[group * 2 + 1] : 0;
    return (mask_[group * 2] | second << 32) & all;
  }

  void try_token(int64_t token, float value) {
    if (value == -INFINITY) return;
    const double scaled = value * per_unit_;
    if (!(scaled + noise_.most_of(token) >= best_)) return;
    const double sum = scaled + noise_.of(token);
    if (sum > best_ || (sum == best_ && token < token_)) {
      best_ = sum;
      token_ = token;
    }
  }

  const rows::Noise noise_;
  const double per_unit_;
  const uint32_t* mask_;
  double best_ = -INFINITY;
  int64_t token_ = 0;
};

static_assert(rows::Noise::kTokens == kGroup, "a group has a bound of its own");

}  // namespace onnxport
