// What LoRA adapters add to a feed-forward layer, between the steps of run_mlp.
#pragma once

#include <vector>

#include "mlp.h"

namespace onnxport {

// Of one call. Where no row has an adapter nothing is done and nothing is kept.
struct MlpAdapters {
  LoraSum gate_up, down;
  std::vector<bool> has_gate_up, has_down;  // by row; empty where none has
  float* added = nullptr;       // to gate and up before SiLU, [rows][2 * inner]
  float* activated = nullptr;   // behind SiLU, what down's A is multiplied with, [rows][inner]
  float* normalized = nullptr;  // what that of gate and up is, where the layer has a norm

  // Throws std::bad_alloc. What it keeps is the calling thread's, good until its next call.
  explicit MlpAdapters(const GatedMlp& mlp);
};

}  // namespace onnxport
