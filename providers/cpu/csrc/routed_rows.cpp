#include "routed_rows.h"

#include <algorithm>

namespace onnxport {
namespace {

// Logits, and products of a weight and a float, in a task: some ten microseconds.
constexpr int64_t kRouteTask = 1 << 14, kCombineTask = 1 << 15;

int64_t tasks_of(int64_t rows, int64_t rows_per_task) {
  return (rows + rows_per_task - 1) / rows_per_task;
}

int64_t rows_per_route(const Routing& routing) {
  return std::max<int64_t>(1, kRouteTask / routing.num_experts);
}

}  // namespace

void RoutedRows::reserve(const Routing& routing, const float* logits, int64_t rows) {
  routing_ = routing;
  logits_ = logits;
  rows_ = rows;
  const auto size = static_cast<size_t>(num_parts());
  chosen_ = chosen_memory_.reserve<int32_t>(size);
  weights_ = weight_memory_.reserve<float>(size);
  place_of_ = place_memory_.reserve<int32_t>(size);
  row_of_ = row_memory_.reserve<int32_t>(size);
  first_ = first_memory_.reserve<int64_t>(static_cast<size_t>(routing.num_experts) + 1);
}

int64_t RoutedRows::route_tasks() const { return tasks_of(rows_, rows_per_route(routing_)); }

void RoutedRows::route_rows(int64_t index) const {
  const int64_t count = rows_per_route(routing_), top_k = routing_.top_k;
  const int64_t begin = index * count, end = std::min(rows_, begin + count);
  for (int64_t row = begin; row < end; row++)
    route(routing_, logits_ + row * routing_.num_experts, chosen_ + row * top_k,
          weights_ + row * top_k);
}

const int64_t* RoutedRows::count_parts() {
  std::fill(first_, first_ + routing_.num_experts + 1, 0);
  for (int64_t i = 0; i < num_parts(); i++) first_[chosen_[i] + 1]++;
  for (int64_t expert = 0; expert < routing_.num_experts; expert++)
    first_[expert + 1] += first_[expert];
  return first_;
}

// Uses up the first parts.
void RoutedRows::number_parts() {
  for (int64_t i = 0; i < num_parts(); i++) {
    place_of_[i] = static_cast<int32_t>(first_[chosen_[i]]++);
    row_of_[place_of_[i]] = static_cast<int32_t>(i / routing_.top_k);
  }
}

int64_t RoutedRows::rows_per_combine(int64_t size) const {
  return std::max<int64_t>(1, kCombineTask / (routing_.top_k * size));
}

int64_t RoutedRows::combine_tasks(int64_t size) const {
  return tasks_of(rows_, rows_per_combine(size));
}

void RoutedRows::combine_rows(int64_t index, const float* parts, int64_t size,
                              float* output) const {
  const int64_t count = rows_per_combine(size), top_k = routing_.top_k;
  const int64_t begin = index * count, end = std::min(rows_, begin + count);
  for (int64_t row = begin; row < end; row++)
    combine(parts, place_of_ + row * top_k, weights_ + row * top_k, top_k, size,
            output + row * size);
}

}  // namespace onnxport
