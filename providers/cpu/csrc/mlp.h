// The feed-forward layer of a decoder as one computation, free of ONNX Runtime:
//
//   output = down(activation(gate(x)) * up(x))
//
// with the bits of two products and a gate, one after the other. For some two hundred rows
// and more, what gate and up give is larger than the layer's weights; here it lives in a thread's
// cache until it is quantized for the next product, and never gets to memory.
#pragma once

#include "lora.h"
#include "matmul.h"

namespace onnxport {

// Features between the two products that a task computes: whole panels, and whole blocks of down.
static inline int64_t group_features(int64_t block_size) {
  return block_size < 64 ? 64 : block_size;
}

// Adapters of the rows, which add to the outputs of all three projections.
struct MlpLora {
  LoraSlots slots;
  LoraPlace gate_up, down;  // of two parts, and of one
};

struct GatedMlp {
  int64_t inner;   // features between the two products
  MatMul gate_up;  // n: all packed outputs, a multiple of parts() * kPanel; see pack_gate_up
  MatMul down;     // k is inner
  const MlpLora* lora = nullptr;
  bool is_gelu = false;  // see Gate
  const Swiglu* swiglu = nullptr;  // likewise
  bool is_relu2 = false;           // likewise, of experts alone: gate_up is up

  // Outputs of gate_up that make a feature.
  int64_t parts() const { return is_relu2 ? 1 : 2; }
};

// Sets what follows from the rest: n of gate_up and k of down.
void complete(GatedMlp& mlp);

// Fills gate_up's packed weights, num_panels * panel_bytes at a cache line: of each group of
// features first those of gate, then those of up, each filled up with zeros to whole panels. quants
// [2 * inner][blocks][block_size * bits / 8] and scales [2 * inner][blocks] have all of gate first.
void pack_gate_up(const GatedMlp& mlp, const uint8_t* quants, const Scales& scales,
                  uint8_t* packed);

// As pack_gate_up, zero points: from [2 * inner][stored_zero_bytes] to num_panels * blocks * kPanel.
void pack_gate_up_zeros(const GatedMlp& mlp, const uint8_t* stored, uint16_t* packed);

// Computes the output; rows, input and output are those of gate_up.rows, gate_up.input and
// down.output. Returns zero or what parallel_for returned. Throws std::bad_alloc only.
int run_mlp(const MatMulKernels& kernels, const GatedMlp& mlp, ParallelFor parallel_for,
            void* context);

}  // namespace onnxport
