// Divides a feed-forward layer into tasks: the input to int8, then groups of features through gate,
// up, activation and to int8 again, then the panels of down.
#include "mlp.h"

#include <algorithm>
#include <atomic>

#include "kernels.h"
#include "mlp_lora.h"
#include "pack.h"
#include "product.h"

namespace onnxport {
namespace {

// Between two rows' floats: rows a power of two apart would share few lines of the cache.
constexpr int64_t kGap = 16;

float* thread_outputs(int64_t floats) {
  thread_local Buffer buffer;
  return buffer.reserve<float>(static_cast<size_t>(floats));
}

struct Run {
  const MatMulKernels& kernels;
  const Kernels& activations;
  const GatedMlp& mlp;
  Product gate_up, down;
  int64_t features, groups;  // features of a group
  const MlpAdapters& adapters;
  std::atomic<bool> out_of_memory{false};

  Run(const MatMulKernels& used, const GatedMlp& layer, const MatMul& first, const MatMul& second,
      const MlpAdapters& added)
      : kernels(used),
        activations(*active_kernels()),
        mlp(layer),
        gate_up(used, first),
        down(used, second),
        adapters(added) {
    features = group_features(second.block_size);
    groups = ceil_div(mlp.inner, features);
  }

  int64_t activate_tasks() const { return groups * ceil_div(down.call.rows, kernels.chunk_rows); }

  // A group's features of a chunk of rows: all that down needs to know of them.
  void activate(int64_t index) {
    const int64_t row_begin = index / groups * kernels.chunk_rows;
    const int64_t row_end = std::min(down.call.rows, row_begin + kernels.chunk_rows);
    const int64_t first = index % groups * features, count = std::min(features, mlp.inner - first);
    const int64_t panels = ceil_div(count, kPanel), panel = 2 * first / kPanel;
    const int64_t width = panels * kPanel, stride = 2 * width + kGap;
    float* outputs;
    try {
      outputs = thread_outputs((row_end - row_begin) * stride);
    } catch (const std::bad_alloc&) {  // may not cross the caller's thread pool
      out_of_memory = true;
      return;
    }
    kernels.multiply(gate_up.call,
                     {panel, panel + 2 * panels, row_begin, row_end, outputs, stride});
    adapters.expand(row_begin, row_end, first, count, outputs, width, stride);
    const int64_t block = first / down.call.block_size;
    const int64_t block_end = block + ceil_div(count, down.call.block_size);
    for (int64_t row = row_begin; row < row_end; row++, outputs += stride) {
      alignas(64) float activated[kLargestBlock];
      Gate gate{outputs, outputs + width, nullptr, nullptr, activated, count, mlp.is_gelu};
      adapters.connect(gate, row, first);
      activations.gate(gate);
      kernels.quantize(down.call, activated, row, block, block_end);
    }
    if (row_end < down.call.rows) return;
    for (int64_t row = row_end; row < down.call.padded_rows; row++)
      kernels.quantize(down.call, nullptr, row, block, block_end);
  }
};

}  // namespace

void complete(GatedMlp& mlp) {
  mlp.gate_up.n = 2 * ceil_div(mlp.inner, kPanel) * kPanel;
  mlp.down.k = mlp.inner;
}

void pack_gate_up(const GatedMlp& mlp, const uint8_t* quants, const Scales& scales,
                  uint8_t* packed) {
  const int64_t features = group_features(mlp.down.block_size), blocks = num_blocks(mlp.gate_up);
  const int64_t row_bytes = blocks * mlp.gate_up.block_size * mlp.gate_up.bits / 8;
  const int64_t half_bytes = features / kPanel * panel_bytes(mlp.gate_up);
  in_parts(ceil_div(mlp.inner, features), 2 * half_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; group++) {
      const int64_t first = group * features;
      uint8_t* to = packed + group * 2 * half_bytes;
      MatMul part = mlp.gate_up;
      part.n = std::min(features, mlp.inner - first);
      for (const int64_t row : {first, mlp.inner + first}) {
        pack_weights(part, quants + row * row_bytes, scales_from(scales, row * blocks), to);
        to += num_panels(part) * panel_bytes(part);
      }
    }
  });
}

int run_mlp(const MatMulKernels& kernels, const GatedMlp& mlp, ParallelFor parallel_for,
            void* context) {
  if (mlp.gate_up.rows == 0) return 0;
  // The calling thread's; the others only use it until this call is over.
  thread_local Quantized inputs, activations;
  MatMul gate_up = mlp.gate_up, down = mlp.down;
  down.rows = gate_up.rows;
  inputs.reserve(kernels, gate_up);
  activations.reserve(kernels, down);
  const MlpAdapters adapters(kernels, mlp, gate_up, down);
  Run run(kernels, mlp, gate_up, down, adapters);
  const auto step = [&](int64_t count, Task task) {
    return run_tasks(count, task, &run, parallel_for, context);
  };
  int result = step(run.gate_up.quantize_tasks(), [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->gate_up.quantize(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  result = step(adapters.tasks(), [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->adapters.run(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  result = step(run.activate_tasks(), [](void* argument, size_t index) {
    static_cast<Run*>(argument)->activate(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  if (run.out_of_memory) throw std::bad_alloc();
  return run_product(run.down, adapters.down(), parallel_for, context);
}

}  // namespace onnxport
