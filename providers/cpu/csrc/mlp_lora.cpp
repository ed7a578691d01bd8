#include "mlp_lora.h"

namespace onnxport {
namespace {

// The rows that an adapter adds to.
std::vector<bool> rows_of(const LoraSlots& slots, const LoraPlace& place, int64_t rows) {
  std::vector<bool> found(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; row++)
    found[static_cast<size_t>(row)] = lora_work(slots, place, slots.tokens[row]) > 0;
  return found;
}

}  // namespace

MlpAdapters::MlpAdapters(const MatMulKernels& kernels, const GatedMlp& mlp, const MatMul& gate_up,
                         const MatMul& down)
    : inner_(mlp.inner) {
  if (!mlp.lora) return;
  thread_local LoraSpace gate_up_space, down_space;
  thread_local Buffer added;
  const int64_t rows = gate_up.rows;
  const MlpLora& lora = *mlp.lora;
  gate_up_ = gate_up_space.prepare(kernels, {lora.slots, lora.gate_up}, gate_up);
  down_ = down_space.prepare(kernels, {lora.slots, lora.down}, down);
  if (gate_up_.is_empty() || gate_up_.reads_pieces()) return;
  has_gate_up_ = rows_of(lora.slots, lora.gate_up, rows);
  added_ = added.reserve<float>(static_cast<size_t>(rows * 2 * inner_));
}

void MlpAdapters::run(int64_t index) const {
  if (added_)
    gate_up_.run(index, added_, false);
  else
    gate_up_.shrink(index);
}

void MlpAdapters::expand(int64_t row_begin, int64_t row_end, int64_t first, int64_t count,
                         float* outputs, int64_t width, int64_t stride) const {
  if (gate_up_.is_empty() || added_) return;
  for (const int64_t part : {0, 1})
    gate_up_.expand(part, {row_begin, row_end, first, first + count, outputs + part * width, stride});
}

void MlpAdapters::connect(Gate& gate, int64_t row, int64_t first) const {
  if (!added_ || !has_gate_up_[static_cast<size_t>(row)]) return;
  gate.gate_added = added_ + row * 2 * inner_ + first;
  gate.up_added = gate.gate_added + inner_;
}

}  // namespace onnxport
