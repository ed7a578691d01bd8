#include "mlp_lora.h"

namespace onnxport {

MlpAdapters::MlpAdapters(const GatedMlp& mlp, MatMul& gate_up, const MatMul& down)
    : rows_(gate_up.rows), inner_(mlp.inner) {
  if (!mlp.lora) return;
  thread_local LoraSpace gate_up_space, down_space;
  thread_local Buffer activated;
  const MlpLora& lora = *mlp.lora;
  gate_up_ = gate_up_space.prepare({lora.slots, lora.gate_up}, gate_up);
  has_down_.resize(static_cast<size_t>(rows_));
  bool any = false;
  for (int64_t row = 0; row < rows_; row++) {
    const bool has = lora_work(lora.slots, lora.down, lora.slots.tokens[row]) > 0;
    has_down_[static_cast<size_t>(row)] = has;
    any |= has;
  }
  if (!any) has_down_.clear();
  if (!any) return;
  activated_ = activated.reserve<float>(static_cast<size_t>(rows_ * inner_));
  MatMul call = down;
  call.input = activated_;
  down_ = down_space.prepare({lora.slots, lora.down}, call);
}

void MlpAdapters::expand(int64_t row_begin, int64_t row_end, int64_t first, int64_t count,
                         float* outputs, int64_t width, int64_t stride) const {
  if (gate_up_.is_empty()) return;
  for (const int64_t part : {0, 1})
    gate_up_.expand(part, {row_begin, row_end, first, first + count, outputs + part * width, stride});
}

float* MlpAdapters::activated(int64_t row, int64_t first) const {
  const bool has = !has_down_.empty() && has_down_[static_cast<size_t>(row)];
  return has ? activated_ + row * inner_ + first : nullptr;
}

}  // namespace onnxport
