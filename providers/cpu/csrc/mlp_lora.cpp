#include "mlp_lora.h"

#include <algorithm>

#include "scratch.h"

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

MlpAdapters::MlpAdapters(const GatedMlp& mlp) : inner_(mlp.inner) {
  if (!mlp.lora) return;
  const int64_t rows = mlp.gate_up.rows;
  const MlpLora& lora = *mlp.lora;
  has_gate_up_ = rows_of(lora.slots, lora.gate_up, rows);
  has_down_ = rows_of(lora.slots, lora.down, rows);
  thread_local Buffer buffers[3];
  const auto reserve = [&](int index, int64_t width) {
    return buffers[index].reserve<float>(static_cast<size_t>(rows * width));
  };
  if (!has_gate_up_.empty()) {
    const Norm& norm = mlp.gate_up.norm;
    if (norm.gamma) normalized = norm.normalized ? norm.normalized : reserve(0, mlp.gate_up.k);
    added_ = reserve(1, 2 * mlp.inner);
    gate_up = LoraSum(lora.slots, lora.gate_up, rows);
    gate_up.set(norm.gamma ? normalized : mlp.gate_up.input, added_, false);
  }
  if (!has_down_.empty()) {
    activated_ = reserve(2, mlp.inner);
    down = LoraSum(lora.slots, lora.down, rows);
    down.set(activated_, mlp.down.output, true);
  }
}

void MlpAdapters::connect(GatedSilu& silu, int64_t row, int64_t first) const {
  const auto index = static_cast<size_t>(row);
  if (!has_gate_up_.empty() && has_gate_up_[index]) {
    silu.gate_added = added_ + row * 2 * inner_ + first;
    silu.up_added = silu.gate_added + inner_;
  }
  if (!has_down_.empty() && has_down_[index]) silu.output = activated_ + row * inner_ + first;
}

}  // namespace onnxport
