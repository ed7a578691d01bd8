// LoRA adapters in their slots, and dividing what they add to a product into tasks. Free of ONNX
// Runtime. The layout of a slot is `slot_layout`'s in graphs/lora.py.
#pragma once

#include <vector>

#include "kernels.h"

namespace onnxport {

constexpr size_t kLoraParts = 3;  // projections that one product computes, at most

// All slots, and which token has which.
struct LoraSlots {
  LoraType type;
  const int32_t* tokens;  // the slot of each; 0: none
  const int32_t* ranks;   // [slots + 1][ranks_stride]
  const char* weights;    // [slots][numbers]
  const float* scales;    // [slots + 1][ranks_stride][max_rank]; null: all are 1
  int64_t ranks_stride, numbers, max_rank;
};

// Where a product lies in every slot.
struct LoraPlace {
  int64_t offset;               // of its first projection, in numbers
  int64_t ranks;                // of its first projection, from the start of a slot's ranks
  int64_t depth;                // input features
  int64_t parts;                // projections
  int64_t columns[kLoraParts];  // of each
};

// Tokens [first, first + count) of one adapter, few enough to share what they load.
struct LoraChunk {
  int64_t first, count;
  int32_t slot;
};

// Numbers of a row in whole panels.
static inline int64_t in_lora_panels(int64_t count) {
  return (count + kLoraPanel - 1) / kLoraPanel * kLoraPanel;
}

int64_t lora_rank(const LoraSlots& slots, const LoraPlace& place, int32_t slot, int64_t part);

// Multiplications that a token takes with an adapter.
int64_t lora_work(const LoraSlots& slots, const LoraPlace& place, int32_t slot);

// What adapters add to a product of `rows` tokens, in tasks that may run in any order. Tokens
// without an adapter, or with one that has no part in the product, are left alone.
class LoraSum {
 public:
  LoraSum() = default;
  LoraSum(const LoraSlots& slots, const LoraPlace& place, int64_t rows);

  // [rows][depth], and [rows][all columns]: added to, or set.
  void set(const float* input, float* output, bool is_added);

  // Few chunks are divided further, so that each thread has something to do; little work is not.
  int64_t tasks() const;
  void run(int64_t index) const;

 private:
  void run_chunk(size_t index, int64_t first, int64_t last) const;
  void run_part(const LoraChunk& chunk, int64_t part, const char* end, int64_t jump) const;
  const char* begin_of(int32_t slot, int64_t part) const;

  LoraSlots slots_{};
  LoraPlace place_{};
  const float* input_ = nullptr;
  float* output_ = nullptr;
  bool is_added_ = true;
  int64_t width_ = 0, work_ = 0;
  std::vector<LoraChunk> chunks_;
};

}  // namespace onnxport
