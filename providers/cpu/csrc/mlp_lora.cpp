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

MlpAdapters::MlpAdapters(const GatedMlp& mlp) {
  if (!mlp.lora) return;
  const int64_t rows = mlp.gate_up.rows;
  const MlpLora& lora = *mlp.lora;
  has_gate_up = rows_of(lora.slots, lora.gate_up, rows);
  has_down = rows_of(lora.slots, lora.down, rows);
  thread_local Buffer buffers[3];
  const auto reserve = [&](int index, int64_t width) {
    return buffers[index].reserve<float>(static_cast<size_t>(rows * width));
  };
  if (!has_gate_up.empty()) {
    const Norm& norm = mlp.gate_up.norm;
    if (norm.gamma) normalized = norm.normalized ? norm.normalized : reserve(0, mlp.gate_up.k);
    added = reserve(1, 2 * mlp.inner);
    gate_up = LoraSum(lora.slots, lora.gate_up, rows);
    gate_up.set(norm.gamma ? normalized : mlp.gate_up.input, added, false);
  }
  if (!has_down.empty()) {
    activated = reserve(2, mlp.inner);
    down = LoraSum(lora.slots, lora.down, rows);
    down.set(activated, mlp.down.output, true);
  }
}

}  // namespace onnxport
