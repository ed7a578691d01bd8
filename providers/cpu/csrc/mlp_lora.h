// What LoRA adapters add to a feed-forward layer, between the steps of run_mlp.
#pragma once

#include <vector>

#include "mlp.h"

namespace onnxport {

// Of one call. Where no row has an adapter nothing is done and nothing is kept.
struct MlpAdapters {
  LoraSum gate_up, down;
  float* normalized = nullptr;  // what A of gate and up is multiplied with, where there is a norm

  // Throws std::bad_alloc. What it keeps is the calling thread's, good until its next call.
  explicit MlpAdapters(const GatedMlp& mlp);

  // Lets features of a row from `first` on have what was added to gate and up, and go where down's
  // A is multiplied with them.
  void connect(GatedSilu& silu, int64_t row, int64_t first) const;

 private:
  int64_t inner_;
  std::vector<bool> has_gate_up_, has_down_;  // by row; empty where none has
  float* added_ = nullptr;                    // to gate and up, [rows][2 * inner]
  float* activated_ = nullptr;                // [rows][inner]
};

}  // namespace onnxport
