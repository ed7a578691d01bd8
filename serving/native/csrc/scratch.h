// Memory that a thread keeps between rows: to get new memory from the system for every row costs
// more than the arithmetic.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "kernels.h"

namespace onnxport {

// Values, and where they are in the row; null: they are the row.
struct Candidates {
  const float* values;
  const int32_t* places;
  int64_t size;

  int32_t place(int64_t i) const { return places ? places[i] : static_cast<int32_t>(i); }
};

// Memory of candidates.
struct Shelf {
  std::vector<float> values;
  std::vector<int32_t> places;

  void make_room(int64_t size) {
    const size_t wanted = static_cast<size_t>(size + kSlack);
    if (values.size() >= wanted) return;
    values.resize(wanted);
    places.resize(wanted);
  }
  Candidates first(int64_t size) const { return {values.data(), places.data(), size}; }
};

// An old value that has to come back.
struct Undo {
  int64_t token;
  float value;
};

struct Scratch {
  const float* ahead = nullptr;  // the row that this thread is likely to do next; null: none
  Shelf allowed, head, kept, sorted, typical, others, bounds, split, bracketed, parts[2];
  std::vector<float> given, changed;  // summaries: of a row, and of what is chosen from
  std::vector<float> weights, factors, sample;
  float sample_minimum = 0.f;
  std::vector<double> sums;
  std::vector<uint64_t> keys;
  std::vector<Undo> undo;
  std::vector<int64_t> stale;    // groups
  std::vector<int64_t> members;  // of a bucket
  std::vector<int32_t> buckets;
};

}  // namespace onnxport
