// The experts of a mixture-of-experts layer as one computation, free of ONNX Runtime: of each row
//
//   output = sum over the top_k experts, in order, of weight * down(silu(gate(x)) * up(x))
//
// with the bits of GatedMlp for each of them; or with those of products that have biases, and with
// a Swiglu in place of silu; or, without a gate, of down(relu(up(x))^2). Each row's experts are its
// own, so rows are gathered by expert, and each step is done for all experts before the next one:
// one wait for other threads a step, not one an expert.
#pragma once

#include "mlp.h"
#include "routing.h"

namespace onnxport {

struct GatedExperts {
  // Any of them, and the call; its weights, their zeros, and down's bias are the first one's.
  GatedMlp expert;
  Routing routing;
  const float* logits;  // [rows][num_experts]
  const float* gate_up_bias = nullptr;  // [num_experts][parts()][inner], gate's, then up's; null
};

// Bytes of one expert's packed weights; the next one's lie behind them.
static inline int64_t packed_bytes(const MatMul& m) { return num_panels(m) * panel_bytes(m); }

// Fills the packed weights of all experts, at a cache line. quants [num_experts][parts() * inner]
// [blocks][block_size * bits / 8] and scales [num_experts][parts() * inner][blocks] have a row of
// gate, then the same one of up. What is packed of a file leaves the process's memory.
void pack_experts_gate_up(const GatedExperts& experts, const uint8_t* quants, const Scales& scales,
                          uint8_t* packed);

// Likewise; quants [num_experts][n][blocks][block_size * bits / 8], scales [num_experts][n][blocks].
void pack_experts_down(const GatedExperts& experts, const uint8_t* quants, const Scales& scales,
                       uint8_t* packed);

// Fills the packed zeros of all experts, packed_zeros of each, from rows of stored_zero_bytes in the
// order of those two.
void pack_experts_gate_up_zeros(const GatedExperts& experts, const uint8_t* stored,
                                uint16_t* packed);
void pack_experts_down_zeros(const GatedExperts& experts, const uint8_t* stored, uint16_t* packed);

// Computes the output; rows, input and output are those of expert.gate_up.rows, expert.gate_up.input
// and expert.down.output. Returns zero or what parallel_for returned. Throws std::bad_alloc only.
int run_experts(const MatMulKernels& kernels, const GatedExperts& experts,
                ParallelFor parallel_for, void* context);

}  // namespace onnxport
