// The rows of a layer of experts, by the experts that they are given to. Not for the objects of an
// instruction set: the members here are code.
#pragma once

#include <cstdint>

#include "routing.h"
#include "scratch.h"

namespace onnxport {

// A part is what one expert makes of a row. The parts of the first expert come first, in the order
// of their rows, then those of the second one, and so on. Kept from call to call, for the memory.
class RoutedRows {
 public:
  // Room for so many rows, whose logits are [rows][num_experts].
  void reserve(const Routing& routing, const float* logits, int64_t rows);

  int64_t rows() const { return rows_; }
  int64_t num_parts() const { return rows_ * routing_.top_k; }

  // Chooses experts, in tasks that may run in any order.
  int64_t route_tasks() const;
  void route_rows(int64_t index) const;

  // Once all rows are routed: calls add(expert, first_part, count) for each expert that has rows,
  // in order, and numbers the parts.
  template <class F>
  void group(F add) {
    const int64_t* first = count_parts();
    for (int64_t expert = 0; expert < routing_.num_experts; expert++)
      if (first[expert + 1] > first[expert])
        add(expert, first[expert], first[expert + 1] - first[expert]);
    number_parts();
  }
  int64_t row_of(int64_t part) const { return row_of_[part]; }

  // Adds up the parts of each row, [num_parts][size], to output, [rows][size]; likewise in tasks.
  int64_t combine_tasks(int64_t size) const;
  void combine_rows(int64_t index, const float* parts, int64_t size, float* output) const;

 private:
  int64_t rows_per_combine(int64_t size) const;
  const int64_t* count_parts();  // [num_experts + 1], the first part of each
  void number_parts();

  Routing routing_{};
  const float* logits_ = nullptr;
  int64_t rows_ = 0;
  Buffer chosen_memory_, weight_memory_, first_memory_, row_memory_, place_memory_;
  int32_t* chosen_ = nullptr;    // [rows][top_k], experts
  float* weights_ = nullptr;     // [rows][top_k]
  int32_t* place_of_ = nullptr;  // [rows][top_k], of the part
  int32_t* row_of_ = nullptr;    // [num_parts]
  int64_t* first_ = nullptr;     // [num_experts + 1]
};

}  // namespace onnxport
