// What LoRA adapters add to a feed-forward layer, between the steps of run_mlp.
#pragma once

#include <vector>

#include "mlp.h"
#include "product.h"

namespace onnxport {

// Of one call. Where no row has an adapter nothing is done and nothing is kept.
class MlpAdapters {
 public:
  // Both products are those of the call. Throws std::bad_alloc. What it keeps is the calling
  // thread's, good until its next call.
  MlpAdapters(const GatedMlp& mlp, MatMul& gate_up, const MatMul& down);

  const LoraSum& gate_up() const { return gate_up_; }
  const LoraSum& down() const { return down_; }

  // Adds to the features [first, first + count) of gate and up in some rows, whose outputs are
  // `stride` floats apart, those of up `width` behind those of gate.
  void expand(int64_t row_begin, int64_t row_end, int64_t first, int64_t count, float* outputs,
              int64_t width, int64_t stride) const;

  // Where a row's features from `first` on go for down's A to be multiplied with them; null: nowhere.
  float* activated(int64_t row, int64_t first) const;

 private:
  int64_t rows_, inner_;
  LoraSum gate_up_, down_;
  std::vector<bool> has_down_;  // by row; empty where none has
  float* activated_ = nullptr;  // [rows][inner]
};

}  // namespace onnxport
