#include "mlp_lora.h"

#include <algorithm>

namespace onnxport {
namespace {

// The rows that an adapter adds to; empty if there are none.
std::vector<bool> rows_of(const LoraSlots& slots, const LoraPlace& place, int64_t rows) {
  std::vector<bool> found(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; row++)
    found[static_cast<size_t>(row)] = lora_work(slots, place, slots.tokens[row]) > 0;
  if (std::find(found.begin(), found.end(), true) == found.end()) found.clear();
  return found;
}

}  // namespace

MlpAdapters::MlpAdapters(const GatedMlp& mlp, MatMul& gate_up, const MatMul& down)
    : inner_(mlp.inner) {
  if (!mlp.lora) return;
  thread_local LoraSpace gate_up_space, down_space;
  thread_local Buffer added, activated;
  const int64_t rows = gate_up.rows;
  const MlpLora& lora = *mlp.lora;
  has_gate_up_ = rows_of(lora.slots, lora.gate_up, rows);
  has_down_ = rows_of(lora.slots, lora.down, rows);
  if (!has_gate_up_.empty()) {
    gate_up_ = gate_up_space.prepare({lora.slots, lora.gate_up}, gate_up);
    if (gate_up_.has_few_rows())
      added_ = added.reserve<float>(static_cast<size_t>(rows * 2 * inner_));
  }
  if (!has_down_.empty()) {
    activated_ = activated.reserve<float>(static_cast<size_t>(rows * inner_));
    MatMul call = down;
    call.input = activated_;
    down_ = down_space.prepare({lora.slots, lora.down}, call);
  }
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

void MlpAdapters::connect(GatedSilu& silu, int64_t row, int64_t first) const {
  const auto index = static_cast<size_t>(row);
  if (added_ && has_gate_up_[index]) {
    silu.gate_added = added_ + row * 2 * inner_ + first;
    silu.up_added = silu.gate_added + inner_;
  }
  if (activated_ && has_down_[index]) silu.output = activated_ + row * inner_ + first;
}

}  // namespace onnxport
