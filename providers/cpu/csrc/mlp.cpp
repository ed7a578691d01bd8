// Divides a feed-forward layer into tasks: the input to int8, then groups of features through gate,
// up, activation and to int8 again, then the panels of down.
#include "mlp.h"

#include <algorithm>
#include <atomic>

#include "kernels.h"
#include "mlp_lora.h"
#include "mlp_step.h"
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
  const MlpAdapters& adapters;
  Product gate_up, down;
  Activation activation;
  std::atomic<bool> out_of_memory{false};

  Run(const MatMulKernels& kernels, const GatedMlp& mlp, const MatMul& first, const MatMul& second,
      const MlpAdapters& added)
      : adapters(added),
        gate_up(kernels, first),
        down(kernels, second),
        activation(kernels, *active_kernels(), mlp, gate_up.call, down.call, &added) {}
};

}  // namespace

Activation::Activation(const MatMulKernels& used, const Kernels& used_vectors, const GatedMlp& mlp,
                       const MatMul& first, const MatMul& second, const MlpAdapters* added)
    : kernels(used),
      vectors(used_vectors),
      gate_up(first),
      down(second),
      adapters(added),
      inner(mlp.inner),
      features(group_features(second.block_size)),
      groups(ceil_div(inner, features)),
      parts(mlp.parts()),
      is_gelu(mlp.is_gelu),
      is_relu2(mlp.is_relu2),
      swiglu(mlp.swiglu) {}

// A group's features of a chunk of rows: all that down needs to know of them.
bool Activation::run(int64_t index) const {
  const int64_t row_begin = index / groups * kernels.chunk_rows;
  const int64_t row_end = std::min(down.rows, row_begin + kernels.chunk_rows);
  const int64_t first = index % groups * features, count = std::min(features, inner - first);
  const int64_t panels = ceil_div(count, kPanel), panel = parts * first / kPanel;
  const int64_t width = panels * kPanel, stride = parts * width + kGap;
  float* outputs;
  try {
    outputs = thread_outputs((row_end - row_begin) * stride);
  } catch (const std::bad_alloc&) {
    return false;
  }
  kernels.multiply(gate_up, {panel, panel + parts * panels, row_begin, row_end, outputs, stride});
  if (adapters) adapters->expand(row_begin, row_end, first, count, outputs, width, stride);
  const int64_t block = first / down.block_size;
  const int64_t block_end = block + ceil_div(count, down.block_size);
  for (int64_t row = row_begin; row < row_end; row++, outputs += stride) {
    alignas(64) float activated[kLargestBlock];
    const float* up = is_relu2 ? nullptr : outputs + width;
    Gate gate{outputs, up, nullptr, nullptr, activated, count, is_gelu, swiglu, is_relu2};
    if (adapters) adapters->connect(gate, row, first);
    if (bias) {
      gate.gate_added = bias + first;
      if (!is_relu2) gate.up_added = gate.gate_added + inner;
    }
    vectors.gate(gate);
    kernels.quantize(down, activated, row, block, block_end);
  }
  if (row_end < down.rows) return true;
  for (int64_t row = row_end; row < down.padded_rows; row++)
    kernels.quantize(down, nullptr, row, block, block_end);
  return true;
}

void complete(GatedMlp& mlp) {
  mlp.gate_up.n = mlp.parts() * ceil_div(mlp.inner, kPanel) * kPanel;
  mlp.down.k = mlp.inner;
}

void pack_group(const GatedMlp& mlp, const uint8_t* quants, const Scales& scales,
                const GateUpRows& rows, int64_t count, uint8_t* packed) {
  MatMul part = mlp.gate_up;
  part.n = count;
  const int64_t blocks = num_blocks(part), row_bytes = blocks * part.block_size * part.bits / 8;
  const int64_t of_parts[] = {rows.gate, rows.up};
  for (int64_t i = 0; i < mlp.parts(); i++) {
    const int64_t row = of_parts[i];
    pack_rows(part, quants + row * row_bytes, scales_from(scales, row * blocks), rows.step, packed);
    packed += num_panels(part) * panel_bytes(part);
  }
}

uint16_t* pack_group_zeros(const GatedMlp& mlp, const uint8_t* stored, const GateUpRows& rows,
                           int64_t count, uint16_t* packed) {
  MatMul part = mlp.gate_up;
  part.n = count;
  const int64_t of_parts[] = {rows.gate, rows.up};
  for (int64_t i = 0; i < mlp.parts(); i++) {
    pack_zeros(part, stored + of_parts[i] * stored_zero_bytes(part), packed, rows.step);
    packed += packed_zeros(part);
  }
  return packed;
}

void pack_gate_up(const GatedMlp& mlp, const uint8_t* quants, const Scales& scales,
                  uint8_t* packed) {
  const int64_t features = group_features(mlp.down.block_size);
  const int64_t bytes = 2 * features / kPanel * panel_bytes(mlp.gate_up);
  in_parts(ceil_div(mlp.inner, features), bytes, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; group++) {
      const int64_t first = group * features;
      pack_group(mlp, quants, scales, {first, mlp.inner + first, 1},
                 std::min(features, mlp.inner - first), packed + group * bytes);
    }
  });
}

void pack_gate_up_zeros(const GatedMlp& mlp, const uint8_t* stored, uint16_t* packed) {
  const int64_t features = group_features(mlp.down.block_size);
  for (int64_t first = 0; first < mlp.inner; first += features)
    packed = pack_group_zeros(mlp, stored, {first, mlp.inner + first, 1},
                              std::min(features, mlp.inner - first), packed);
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
  result = step(run.activation.tasks(), [](void* argument, size_t index) {
    Run& own = *static_cast<Run*>(argument);
    if (!own.activation.run(static_cast<int64_t>(index))) own.out_of_memory = true;
  });
  if (result != 0) return result;
  if (run.out_of_memory) throw std::bad_alloc();
  return run_product(run.down, adapters.down(), parallel_for, context);
}

}  // namespace onnxport
