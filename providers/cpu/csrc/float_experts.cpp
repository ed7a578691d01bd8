// Divides a layer of experts in floats into tasks: features of gate and up with the activation
// behind them, then outputs of down, then the sums of each row.
#include "float_experts.h"

#include <algorithm>
#include <vector>

#include "product.h"
#include "routed_rows.h"

namespace onnxport {
namespace {

// Of a task, at most: features, each of them a row of gate and one of up; outputs; and rows.
constexpr int64_t kFeatures = 32, kOutputs = 64, kTaskRows = 36;
// Rows that are computed at once, at most, by what they take up between the steps.
constexpr int64_t kMostRows = 1024, kMostBytes = 64 << 20;

// An expert that has rows. Its tasks are counted among those of all, from 0.
struct Active {
  int64_t number, first_part, count;
  int64_t activate_begin, multiply_begin;
};

// What a thread that calls keeps; others use it only until its call is over.
struct Memory {
  RoutedRows rows;
  Buffer inputs, activations, activation_rows, parts;
  std::vector<Active> active;
};

// What a task does: so many outputs from one on, for so many of an expert's rows.
struct Piece {
  const Active& expert;
  int64_t first, part, rows;
};

// So many rows from one on.
struct Run {
  const Kernels& kernels;
  const FloatExperts& experts;
  RoutedRows& routed;
  std::vector<Active>& active;
  int64_t first_row;
  const float** inputs;           // [num_parts], rows of the input
  float* activations;             // [num_parts][inner]
  const float** activation_rows;  // [num_parts]
  float* parts;                   // [num_parts][n]
  int64_t activate_tasks = 0, multiply_tasks = 0;

  Run(const FloatExperts& layer, Memory& memory, int64_t first, int64_t count)
      : kernels(*active_kernels()),
        experts(layer),
        routed(memory.rows),
        active(memory.active),
        first_row(first) {
    routed.reserve(layer.routing, layer.logits + first * layer.routing.num_experts, count);
    const auto size = static_cast<size_t>(routed.num_parts());
    inputs = memory.inputs.reserve<const float*>(size);
    activations = memory.activations.reserve<float>(size * static_cast<size_t>(layer.inner));
    activation_rows = memory.activation_rows.reserve<const float*>(size);
    parts = memory.parts.reserve<float>(size * static_cast<size_t>(layer.n));
  }

  // Gives each expert its rows, in order. After all rows are routed.
  void group() {
    active.clear();
    active.reserve(static_cast<size_t>(experts.routing.num_experts));
    routed.group([&](int64_t number, int64_t first, int64_t count) {
      active.push_back({number, first, count, activate_tasks, multiply_tasks});
      activate_tasks += ceil_div(experts.inner, kFeatures) * ceil_div(count, kTaskRows);
      multiply_tasks += ceil_div(experts.n, kOutputs) * ceil_div(count, kTaskRows);
    });
    for (int64_t part = 0; part < routed.num_parts(); part++) {
      inputs[part] = experts.input + (first_row + routed.row_of(part)) * experts.depth;
      activation_rows[part] = activations + part * experts.inner;
    }
  }

  void activate(int64_t index) const {
    const Piece piece = piece_at<&Active::activate_begin>(index, kFeatures);
    const int64_t count = std::min(kFeatures, experts.inner - piece.first);
    const int64_t parts = experts.parts(), width = parts * count;
    const int64_t row = parts * (piece.expert.number * experts.inner + piece.first);  // of gate_up
    float joined[kTaskRows * 2 * kFeatures];  // gate's number of a feature, then up's
    kernels.multiply_rows({experts.type, weights_at(experts.gate_up, row * experts.depth),
                           inputs + piece.part, joined, experts.depth, piece.rows, width, width});
    const float* bias = experts.gate_up_bias ? experts.gate_up_bias + row : nullptr;
    for (int64_t i = 0; i < piece.rows; i++) {
      const float* made = joined + i * width;
      const auto number = [&](int64_t j) { return made[j] + (bias ? bias[j] : 0.f); };
      float gate[kFeatures], up[kFeatures];
      for (int64_t j = 0; j < count; j++) gate[j] = number(parts * j);
      for (int64_t j = 0; j < width - count; j++) up[j] = number(parts * j + 1);
      float* output = activations + (piece.part + i) * experts.inner + piece.first;
      kernels.gate({gate, up, nullptr, nullptr, output, count, experts.is_gelu, experts.swiglu,
                    experts.is_relu2});
    }
  }

  void multiply(int64_t index) const {
    const Piece piece = piece_at<&Active::multiply_begin>(index, kOutputs);
    const int64_t count = std::min(kOutputs, experts.n - piece.first);
    const int64_t row = piece.expert.number * experts.n + piece.first;  // of the weights
    float* output = parts + piece.part * experts.n + piece.first;
    kernels.multiply_rows({experts.type, weights_at(experts.down, row * experts.inner),
                           activation_rows + piece.part, output, experts.inner, piece.rows, count,
                           experts.n});
    if (!experts.down_bias) return;
    for (int64_t i = 0; i < piece.rows; i++)
      for (int64_t j = 0; j < count; j++) output[i * experts.n + j] += experts.down_bias[row + j];
  }

  void combine_rows(int64_t index) const {
    routed.combine_rows(index, parts, experts.n, experts.output + first_row * experts.n);
  }

 private:
  // Tasks of the same weights are neighbours.
  template <int64_t Active::* kBegin>
  Piece piece_at(int64_t index, int64_t outputs) const {
    const auto is_before = [](int64_t number, const Active& one) { return number < one.*kBegin; };
    const Active& found = *(std::upper_bound(active.begin(), active.end(), index, is_before) - 1);
    const int64_t times = ceil_div(found.count, kTaskRows), own = index - found.*kBegin;
    const int64_t row = own % times * kTaskRows;
    return {found, own / times * outputs, found.first_part + row,
            std::min(kTaskRows, found.count - row)};
  }

  const void* weights_at(const void* weights, int64_t number) const {
    const int64_t bytes = experts.type == kFloat32 ? 4 : 2;
    return static_cast<const char*>(weights) + number * bytes;
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
  result = step(run.activate_tasks, [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->activate(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  result = step(run.multiply_tasks, [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->multiply(static_cast<int64_t>(index));
  });
  if (result != 0) return result;
  return step(run.routed.combine_tasks(run.experts.n), [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->combine_rows(static_cast<int64_t>(index));
  });
}

// Of equal parts, or almost, so that none has few rows.
int64_t rows_at_once(const FloatExperts& experts) {
  const int64_t bytes = (experts.inner + experts.n) * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::max<int64_t>(1, kMostBytes / (bytes * experts.routing.top_k));
  return ceil_div(experts.rows, ceil_div(experts.rows, std::min(most, kMostRows)));
}

}  // namespace

int run_float_experts(const FloatExperts& experts, ParallelFor parallel_for, void* context) {
  if (experts.rows == 0) return 0;
  thread_local Memory memory;
  const int64_t at_once = rows_at_once(experts);
  for (int64_t row = 0; row < experts.rows; row += at_once) {
    Run run(experts, memory, row, std::min(at_once, experts.rows - row));
    if (const int result = run_rows(run, parallel_for, context)) return result;
  }
  return 0;
}

}  // namespace onnxport
