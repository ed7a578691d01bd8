// What a feed-forward layer and one of many experts have in common: the step between the two
// products, and how gate and up are packed.
#pragma once

#include "mlp.h"
#include "pack.h"

namespace onnxport {

class MlpAdapters;
struct Kernels;

// Gate, up, activation and to int8 again, in tasks that may run in any order: a group of features
// of some rows. Both products are those of a call, and have their memory for quantized activations.
struct Activation {
  const MatMulKernels& kernels;
  const Kernels& vectors;
  const MatMul &gate_up, &down;
  const MlpAdapters* adapters;  // null: none
  int64_t inner, features, groups;  // features of a group
  int64_t parts;                    // outputs of gate_up that make a feature
  bool is_gelu, is_relu2;
  const Swiglu* swiglu;
  // [parts][inner], gate's and up's, where there are no adapters; or null.
  const float* bias = nullptr;

  Activation(const MatMulKernels& kernels, const Kernels& vectors, const GatedMlp& mlp,
             const MatMul& gate_up, const MatMul& down, const MlpAdapters* adapters);

  int64_t tasks() const { return groups * ceil_div(down.rows, kernels.chunk_rows); }

  // False: there is no memory. A std::bad_alloc may not cross the caller's thread pool.
  bool run(int64_t index) const;
};

// Rows of gate and of up among those that are stored: the first ones, and how far the next are.
// Without a gate those of up are in its place.
struct GateUpRows {
  int64_t gate, up, step;
};

// Packs a group of `count` features.
void pack_group(const GatedMlp& mlp, const uint8_t* quants, const Scales& scales,
                const GateUpRows& rows, int64_t count, uint8_t* packed);

// Likewise its zeros; returns what is behind them.
uint16_t* pack_group_zeros(const GatedMlp& mlp, const uint8_t* stored, const GateUpRows& rows,
                           int64_t count, uint16_t* packed);

}  // namespace onnxport
