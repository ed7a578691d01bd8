// Packs weights, and divides a product into tasks: all activations to int8 first, then the panels.
#include "matmul.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace onnxport {
namespace {

// Below this many activations, waking another thread costs more than it saves.
constexpr int64_t kSerialQuantize = 1 << 15;
constexpr int64_t kQuantizeTask = 1 << 14;
// Weights that a task reads: some ten microseconds from memory, so that threads finish together.
constexpr int64_t kTaskBytes = 1 << 16;

struct Run {
  const MatMulKernels& kernels;
  MatMul call;
  int64_t padded_rows, rows_per_quantize, panels_per_task, panel_tasks;

  void quantize(int64_t index) const {
    const int64_t begin = index * rows_per_quantize;
    kernels.quantize(call, begin, std::min(padded_rows, begin + rows_per_quantize));
  }
  void multiply(int64_t index) const {
    const int64_t panel = index % panel_tasks * panels_per_task;
    const int64_t row = index / panel_tasks * kernels.chunk_rows;
    kernels.multiply(call, panel, std::min(num_panels(call), panel + panels_per_task), row,
                     std::min(call.rows, row + kernels.chunk_rows));
  }
};

}  // namespace

void pack_weights(const MatMul& call, const uint8_t* quants, const float* scales,
                  uint8_t* packed) {
  const int64_t blocks = num_blocks(call), words = call.block_size * call.bits / 32;
  const uint32_t flip = call.bits == 8 ? 0x80808080u : 0;
  for (int64_t panel = 0; panel < num_panels(call); panel++) {
    const int64_t first = panel * kPanel, count = std::min(kPanel, call.n - first);
    for (int64_t block = 0; block < blocks; block++, packed += block_bytes(call)) {
      if (count < kPanel) std::memset(packed, 0, static_cast<size_t>(block_bytes(call)));
      uint8_t* packed_scales = packed + quant_bytes(call);
      for (int64_t j = 0; j < count; j++) {
        const int64_t from = (first + j) * blocks + block;
        for (int64_t i = 0; i < words; i++) {
          uint32_t word;
          std::memcpy(&word, quants + (from * words + i) * 4, 4);
          word ^= flip;
          std::memcpy(packed + (i * kPanel + j) * 4, &word, 4);
        }
        std::memcpy(packed_scales + j * 4, scales + from, 4);
      }
    }
  }
}

int run_matmul(const MatMulKernels& kernels, MatMul call, ParallelFor parallel_for,
               void* context) {
  if (call.rows == 0) return 0;
  // The calling thread's; the others only use it until this call is over.
  thread_local Buffer quants, scales, corrections;
  call.tile_rows = kernels.tile_rows(call.rows);
  const int64_t padded_rows = ceil_div(call.rows, kRowTile) * call.tile_rows;
  const size_t row_blocks = static_cast<size_t>(padded_rows * num_blocks(call));
  call.quants = quants.reserve<int8_t>(row_blocks * static_cast<size_t>(call.block_size));
  call.scales = scales.reserve<float>(row_blocks);
  call.corrections = corrections.reserve<int32_t>(row_blocks);

  Run run{kernels, call, padded_rows, padded_rows, 0, 0};
  const auto parallel = [&](int64_t tasks, Task task) {
    if (tasks > 1) return parallel_for(context, static_cast<size_t>(tasks), task, &run);
    task(&run, 0);
    return 0;
  };
  if (padded_rows * call.k > kSerialQuantize)
    run.rows_per_quantize = std::max<int64_t>(1, kQuantizeTask / call.k);
  const int result =
      parallel(ceil_div(padded_rows, run.rows_per_quantize), [](void* argument, size_t index) {
        static_cast<const Run*>(argument)->quantize(static_cast<int64_t>(index));
      });
  if (result != 0) return result;

  run.panels_per_task = std::max<int64_t>(1, kTaskBytes / panel_bytes(call));
  run.panel_tasks = ceil_div(num_panels(call), run.panels_per_task);
  return parallel(run.panel_tasks * ceil_div(call.rows, kernels.chunk_rows),
                  [](void* argument, size_t index) {
                    static_cast<const Run*>(argument)->multiply(static_cast<int64_t>(index));
                  });
}

}  // namespace onnxport
