// The largest of many outputs, as far as a coarse product has to know them.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "coarse.h"

namespace onnxport {

// The largest ones of some numbers.
class Largest {
 public:
  explicit Largest(int64_t count) : count_(count) {
    std::fill(numbers_, numbers_ + kMostExact, -INFINITY);
  }

  void add(float number) {
    if (!(number > numbers_[0])) return;
    std::pop_heap(numbers_, numbers_ + count_, std::greater<float>());
    numbers_[count_ - 1] = number;
    std::push_heap(numbers_, numbers_ + count_, std::greater<float>());
  }

  // The least of them, or what is less than all where there are not enough.
  float last() const { return numbers_[0]; }

 private:
  float numbers_[kMostExact];
  const int64_t count_;
};

// The outputs with the largest sums.
class Front {
 public:
  explicit Front(int64_t most) : most_(static_cast<size_t>(most)) {}

  void add(double sum, int32_t output) {
    if (!(sum > last())) return;
    if (size_ == most_) {
      std::pop_heap(found_, found_ + size_, std::greater<Found>());
      size_--;
    }
    found_[size_++] = {sum, output};
    std::push_heap(found_, found_ + size_, std::greater<Found>());
  }

  // What a sum has to be above to count.
  double last() const { return size_ < most_ ? -INFINITY : found_[0].first; }

  int64_t copy_to(int32_t* outputs) const {
    for (size_t i = 0; i < size_; i++) outputs[i] = found_[i].second;
    return static_cast<int64_t>(size_);
  }

 private:
  using Found = std::pair<double, int32_t>;
  Found found_[kMostExact];
  const size_t most_;
  size_t size_ = 0;
};

}  // namespace onnxport
