// Divides a layer of experts into tasks over all that have rows: the rows to int8, then groups of
// features as in a feed-forward layer, then the panels of down, and the sums of each row.
#include "experts.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "kernels.h"
#include "mlp_step.h"
#include "pages.h"
#include "product.h"
#include "routed_rows.h"

namespace onnxport {
namespace {

// Below this many activations, waking another thread costs more than it saves; and what a task has.
constexpr int64_t kSerialQuantize = 1 << 13, kQuantizeTask = 1 << 12;
// Rows that are computed at once, at most, by what they take up between the steps. Each time all
// experts' weights are read, so they are many: with 8 of 128 experts, 64 rows for each of them.
constexpr int64_t kMostRows = 1024, kMostBytes = 64 << 20;
constexpr int64_t kLine = 16;  // numbers of 32 bits

// Quantized activations of several calls, each at a cache line.
class QuantizedCalls {
 public:
  // Makes room for so many rows' blocks, for calls with such weights.
  void reserve(int64_t row_blocks, const MatMul& weights) {
    const auto blocks = static_cast<size_t>(row_blocks);
    quants_ = quant_memory_.reserve<int8_t>(blocks * static_cast<size_t>(weights.block_size));
    scales_ = scale_memory_.reserve<float>(blocks);
    corrections_ = correction_memory_.reserve<int32_t>(blocks);
    sums_ = weights.zeros ? sum_memory_.reserve<float>(blocks) : nullptr;
  }

  // What a call takes up.
  static int64_t row_blocks(const MatMul& call) {
    return ceil_div(call.padded_rows * num_blocks(call), kLine) * kLine;
  }

  void connect(MatMul& call, int64_t place) const {
    call.quants = quants_ + place * call.block_size;
    call.scales = scales_ + place;
    call.corrections = corrections_ + place;
    call.sums = sums_ ? sums_ + place : nullptr;
  }

 private:
  Buffer quant_memory_, scale_memory_, correction_memory_, sum_memory_;
  int8_t* quants_ = nullptr;
  float* scales_ = nullptr;
  int32_t* corrections_ = nullptr;
  float* sums_ = nullptr;  // null where no weights have zeros
};

// An expert that has rows. Its tasks and its quantized rows are counted among those of all, from 0.
struct Active {
  MatMul gate_up;
  Product down;
  const float* gate_up_bias;  // or null
  int64_t first_part;         // of its rows
  int64_t quantize_begin = 0, activate_begin = 0, multiply_begin = 0;
};

// What a thread that calls keeps; others use it only until its call is over.
struct Memory {
  RoutedRows rows;
  Buffer parts;
  QuantizedCalls inputs, activations;
  std::vector<Active> active;
};

// So many rows from one on.
struct Run {
  const MatMulKernels& kernels;
  const Kernels& vectors;
  const GatedExperts& experts;
  const GatedMlp& expert;
  Memory& memory;
  RoutedRows& routed;
  int64_t first_row, rows;
  float* parts;  // [num_parts][n]
  int64_t quantize_rows, activate_tasks, multiply_tasks, rows_per_quantize;
  std::atomic<bool> out_of_memory{false};

  Run(const MatMulKernels& used, const GatedExperts& layer, Memory& kept, int64_t first,
      int64_t count)
      : kernels(used),
        vectors(*active_kernels()),
        experts(layer),
        expert(layer.expert),
        memory(kept),
        routed(kept.rows),
        first_row(first),
        rows(count) {
    routed.reserve(layer.routing, layer.logits + first * layer.routing.num_experts, count);
    parts = kept.parts.reserve<float>(static_cast<size_t>(routed.num_parts() * expert.down.n));
  }

  int64_t quantize_tasks() const { return ceil_div(quantize_rows, rows_per_quantize); }

  // Gives each expert its rows, in order, and makes its calls. After all rows are routed.
  void group() {
    memory.active.clear();
    memory.active.reserve(static_cast<size_t>(experts.routing.num_experts));
    routed.group([&](int64_t number, int64_t first, int64_t count) {
      activate_expert(number, first, count);
    });
    connect();
  }

  void quantize(int64_t index) const {
    int64_t left = std::min(rows_per_quantize, quantize_rows - index * rows_per_quantize);
    const Active* active = &active_at<&Active::quantize_begin>(index * rows_per_quantize);
    int64_t row = index * rows_per_quantize - active->quantize_begin;
    for (; left > 0; left--, row++) {
      if (row == active->gate_up.padded_rows) {
        active++;
        row = 0;
      }
      const MatMul& call = active->gate_up;
      const float* x = row < call.rows ? input_of(active->first_part + row) : nullptr;
      kernels.quantize(call, x, row, 0, num_blocks(call));
    }
  }

  void activate(int64_t index) {
    const Active& active = active_at<&Active::activate_begin>(index);
    if (!activation(active).run(index - active.activate_begin)) out_of_memory = true;
  }

  void multiply(int64_t index) const {
    const Active& active = active_at<&Active::multiply_begin>(index);
    active.down.multiply(index - active.multiply_begin);
  }

  void combine_rows(int64_t index) const {
    routed.combine_rows(index, parts, expert.down.n, expert.down.output + first_row * expert.down.n);
  }

 private:
  const float* input_of(int64_t part) const {
    return expert.gate_up.input + (first_row + routed.row_of(part)) * expert.gate_up.k;
  }

  Activation activation(const Active& active) const {
    Activation made(kernels, vectors, expert, active.gate_up, active.down.call, nullptr);
    made.bias = active.gate_up_bias;
    return made;
  }

  // The one that has a task. All have some, but for a single row's quantization.
  template <int64_t Active::*kBegin>
  const Active& active_at(int64_t index) const {
    const auto is_before = [](int64_t number, const Active& one) { return number < one.*kBegin; };
    return *(std::upper_bound(memory.active.begin(), memory.active.end(), index, is_before) - 1);
  }

  void activate_expert(int64_t number, int64_t first, int64_t count) {
    MatMul gate_up = expert.gate_up, down = expert.down;
    gate_up.rows = down.rows = count;
    gate_up.padded_rows = down.padded_rows = kernels.padded_rows(count);
    gate_up.weights += number * packed_bytes(gate_up);
    down.weights += number * packed_bytes(down);
    for (MatMul* call : {&gate_up, &down})
      if (call->zeros) call->zeros += number * packed_zeros(*call);
    down.output = parts + first * down.n;
    if (down.bias) down.bias += number * down.n;
    const float* bias = experts.gate_up_bias;
    if (bias) bias += number * expert.parts() * expert.inner;
    memory.active.push_back({gate_up, Product(kernels, down), bias, first});
  }

  // Gives the calls their memory for quantized activations, and counts the tasks. The quants of a
  // single row, which is alone with each of its experts, are the same for all of them.
  void connect() {
    int64_t inputs = 0, activations = 0, bytes = 0;
    for (const Active& active : memory.active) {
      inputs = rows == 1 ? 0 : inputs;
      inputs += QuantizedCalls::row_blocks(active.gate_up);
      activations += QuantizedCalls::row_blocks(active.down.call);
      bytes += packed_bytes(active.down.call);
    }
    memory.inputs.reserve(inputs, expert.gate_up);
    memory.activations.reserve(activations, expert.down);
    inputs = activations = quantize_rows = activate_tasks = multiply_tasks = 0;
    for (Active& active : memory.active) {
      memory.inputs.connect(active.gate_up, inputs);
      memory.activations.connect(active.down.call, activations);
      active.down.divide(bytes);
      active.quantize_begin = quantize_rows;
      active.activate_begin = activate_tasks;
      active.multiply_begin = multiply_tasks;
      activations += QuantizedCalls::row_blocks(active.down.call);
      activate_tasks += activation(active).tasks();
      multiply_tasks += active.down.multiply_tasks();
      if (rows == 1) {
        quantize_rows = 1;
        continue;
      }
      inputs += QuantizedCalls::row_blocks(active.gate_up);
      quantize_rows += active.gate_up.padded_rows;
    }
    rows_per_quantize = quantize_rows;
    if (quantize_rows * expert.gate_up.k > kSerialQuantize)
      rows_per_quantize = std::max<int64_t>(1, kQuantizeTask / expert.gate_up.k);
  }
};

int run_rows(Run& run, ParallelFor parallel_for, void* context) {
  const auto step = [&](int64_t count, Task task) {
    return run_tasks(count, task, &run, parallel_for, context);
  };
  int result = step(run.routed.route_tasks(), [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->routed.route_rows(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  run.group();
  result = step(run.quantize_tasks(), [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->quantize(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  result = step(run.activate_tasks, [](void* argument, size_t index) {
    static_cast<Run*>(argument)->activate(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  if (run.out_of_memory) throw std::bad_alloc();
  result = step(run.multiply_tasks, [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->multiply(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  return step(run.routed.combine_tasks(run.expert.down.n), [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->combine_rows(static_cast<int64_t>(index));
  });
}

// Of equal parts, or almost, so that none has few rows.
int64_t rows_at_once(const GatedExperts& experts) {
  const GatedMlp& expert = experts.expert;
  int64_t bytes = expert.down.n * static_cast<int64_t>(sizeof(float));
  for (const MatMul& m : {expert.gate_up, expert.down})
    bytes += num_blocks(m) * (m.block_size + (m.zeros ? 12 : 8));  // scales, corrections, sums
  const int64_t most = std::max<int64_t>(1, kMostBytes / (bytes * experts.routing.top_k));
  const int64_t rows = expert.gate_up.rows, times = ceil_div(rows, std::min(most, kMostRows));
  return ceil_div(rows, times);
}

}  // namespace

void pack_experts_gate_up(const GatedExperts& experts, const uint8_t* quants, const Scales& scales,
                          uint8_t* packed) {
  const GatedMlp& expert = experts.expert;
  const MatMul& m = expert.gate_up;
  const int64_t features = group_features(expert.down.block_size), inner = expert.inner;
  const int64_t groups = ceil_div(inner, features);
  const int64_t parts = expert.parts();
  const int64_t bytes = parts * features / kPanel * panel_bytes(m);
  const int64_t row_bytes = num_blocks(m) * m.block_size * m.bits / 8;
  // The feature of an expert that a group begins with, and its row among those of all.
  const auto feature = [&](int64_t group) { return group % groups * features; };
  const auto row = [&](int64_t group) { return parts * (group / groups * inner + feature(group)); };
  in_parts(experts.routing.num_experts * groups, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; group++)
      pack_group(expert, quants, scales, {row(group), row(group) + 1, parts},
                 std::min(features, inner - feature(group)),
                 packed + group / groups * packed_bytes(m) + group % groups * bytes);
    forget_file_pages(quants + row(begin) * row_bytes,
                      static_cast<size_t>((row(end) - row(begin)) * row_bytes));
  });
}

void pack_experts_down(const GatedExperts& experts, const uint8_t* quants, const Scales& scales,
                       uint8_t* packed) {
  const MatMul& m = experts.expert.down;
  const int64_t panels = num_panels(m), blocks = num_blocks(m);
  const int64_t row_bytes = blocks * m.block_size * m.bits / 8;
  const auto row = [&](int64_t panel) { return panel / panels * m.n + panel % panels * kPanel; };
  in_parts(experts.routing.num_experts * panels, panel_bytes(m), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
      MatMul part = m;
      part.n = std::min(kPanel, m.n - panel % panels * kPanel);
      pack_weights(part, quants + row(panel) * row_bytes,
                   scales_from(scales, row(panel) * blocks), packed + panel * panel_bytes(m));
    }
    forget_file_pages(quants + row(begin) * row_bytes,
                      static_cast<size_t>((row(end) - row(begin)) * row_bytes));
  });
}

void pack_experts_gate_up_zeros(const GatedExperts& experts, const uint8_t* stored,
                                uint16_t* packed) {
  const GatedMlp& expert = experts.expert;
  const int64_t features = group_features(expert.down.block_size), inner = expert.inner;
  const int64_t parts = expert.parts();
  for (int64_t number = 0; number < experts.routing.num_experts; number++)
    for (int64_t first = 0; first < inner; first += features) {
      const int64_t row = parts * (number * inner + first);
      packed = pack_group_zeros(expert, stored, {row, row + 1, parts},
                                std::min(features, inner - first), packed);
    }
}

void pack_experts_down_zeros(const GatedExperts& experts, const uint8_t* stored, uint16_t* packed) {
  const MatMul& m = experts.expert.down;
  for (int64_t number = 0; number < experts.routing.num_experts; number++)
    pack_zeros(m, stored + number * m.n * stored_zero_bytes(m), packed + number * packed_zeros(m));
}

int run_experts(const MatMulKernels& kernels, const GatedExperts& experts,
                ParallelFor parallel_for, void* context) {
  const int64_t rows = experts.expert.gate_up.rows;
  if (rows == 0) return 0;
  thread_local Memory memory;
  const int64_t at_once = rows_at_once(experts);
  for (int64_t row = 0; row < rows; row += at_once) {
    Run run(kernels, experts, memory, row, std::min(at_once, rows - row));
    if (const int result = run_rows(run, parallel_for, context)) return result;
  }
  return 0;
}

}  // namespace onnxport
