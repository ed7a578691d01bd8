// What LoRA adapters add to a feed-forward layer, between the steps of run_mlp.
#pragma once

#include <vector>

#include "mlp.h"
#include "product.h"

namespace onnxport {

// Of one call. Where no row has an adapter nothing is done and nothing is kept.
class MlpAdapters {
 public:
  // Both products are those of the call, and have their memory for quantized activations. Throws
  // std::bad_alloc. What it keeps is the calling thread's, good until its next call.
  MlpAdapters(const MatMulKernels& kernels, const GatedMlp& mlp, const MatMul& gate_up,
              const MatMul& down);

  // What has to be done before the outputs of gate and up are used; and what down's adapters add.
  int64_t tasks() const { return gate_up_.tasks(); }
  void run(int64_t index) const;
  const LoraSum& down() const { return down_; }

  // Where B is read in pieces, adds to the features [first, first + count) of gate and up in some of them, whose
  // outputs are `stride` floats apart, those of up `width` behind those of gate.
  void expand(int64_t row_begin, int64_t row_end, int64_t first, int64_t count, float* outputs,
              int64_t width, int64_t stride) const;

  // Where it is not, lets features of a row from `first` on have what is added to gate and up.
  void connect(Gate& gate, int64_t row, int64_t first) const;

 private:
  int64_t inner_;
  LoraSum gate_up_, down_;
  float* added_ = nullptr;          // to gate and up, [rows][2 * inner]; null: in pieces
  std::vector<bool> has_gate_up_;  // by row, where something is added
};

}  // namespace onnxport
