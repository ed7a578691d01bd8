// Divides a product into tasks: all activations to int8 first, then the panels.
#include "matmul.h"

#include <algorithm>
#include <cstring>

#include "product.h"
#include "tensor.h"

namespace onnxport {
namespace {

// Below this many activations, waking another thread costs more than it saves.
constexpr int64_t kSerialQuantize = 1 << 13;
constexpr int64_t kQuantizeTask = 1 << 12;
// Weights that a task reads: some ten microseconds from memory, so that threads finish together. Of
// many weights more, for what a task asks for ahead at its end may be another thread's.
constexpr int64_t kTaskBytes = 1 << 15, kLargestTaskBytes = 1 << 19, kFewTasks = 64;
constexpr int64_t kAskingRows = 32;
constexpr int64_t kChunkPanels = rows::kChunk / kPanel;

}  // namespace

void Quantized::reserve(const MatMulKernels& kernels, MatMul& call) {
  call.padded_rows = kernels.padded_rows(call.rows);
  const size_t row_blocks = static_cast<size_t>(call.padded_rows * num_blocks(call));
  call.quants = quants_.reserve<int8_t>(row_blocks * static_cast<size_t>(call.block_size));
  call.scales = scales_.reserve<float>(row_blocks);
  call.corrections = corrections_.reserve<int32_t>(row_blocks);
  call.sums = call.zeros ? sums_.reserve<float>(row_blocks) : nullptr;
}

LoraSum LoraSpace::prepare(const MatMulKernels& kernels, const ProductLora& adapters,
                           const MatMul& call) {
  LoraSum sum(adapters.slots, adapters.place, call.rows);
  if (!sum.is_empty())
    sum.set(kernels, call, factors_.reserve<float>(static_cast<size_t>(sum.num_factors())));
  return sum;
}

Product::Product(const MatMulKernels& used, const MatMul& product)
    : kernels(used), call(product), rows_per_quantize(product.padded_rows) {
  if (rows_per_quantize * call.k > kSerialQuantize)
    rows_per_quantize = std::max<int64_t>(1, kQuantizeTask / call.k);
  divide(num_panels(call) * panel_bytes(call));
}

void Product::divide(int64_t bytes) {
  panels_per_task = std::max<int64_t>(
      1, std::clamp(bytes / kFewTasks, kTaskBytes, kLargestTaskBytes) / panel_bytes(call));
  if (call.rows == 1) panels_per_task = ceil_div(panels_per_task, kernels.streams) * kernels.streams;
  if (summarizes()) panels_per_task = ceil_div(panels_per_task, kChunkPanels) * kChunkPanels;
  panel_tasks = ceil_div(num_panels(call), panels_per_task);
}

void Product::quantize(int64_t index) const {
  const int64_t begin = index * rows_per_quantize;
  const int64_t end = std::min(call.padded_rows, begin + rows_per_quantize);
  for (int64_t row = begin; row < end; row++) {
    const float* x = row < call.rows ? call.input + row * call.k : nullptr;
    kernels.quantize(call, x, row, 0, num_blocks(call));
  }
}

void Product::multiply(int64_t index) const {
  const int64_t panel = index % panel_tasks * panels_per_task;
  const int64_t row = index / panel_tasks * kernels.chunk_rows;
  const Part part{panel, std::min(num_panels(call), panel + panels_per_task), row,
                  std::min(call.rows, row + kernels.chunk_rows),
                  call.output + row * call.n + panel * kPanel, call.n};
  if (lora) return multiply_adapted(part);
  if (!summarizes()) return kernels.multiply(call, part);
  if (part.panel_begin == 0) announce(part);
  if (kernels.multiply_and_summarize && kernels.multiply_and_summarize(call, part)) return;
  kernels.multiply(call, part);
  summarize(part);
}

void Product::multiply_adapted(const Part& part) const {
  const int64_t first = part.panel_begin * kPanel;
  const LoraBlock block{part.row_begin, part.row_end, first,
                        std::min(call.n, part.panel_end * kPanel), part.output, part.stride};
  kernels.multiply(call, part);
  lora->expand_product(block);
}

// Says in the summaries what there will be in them.
void Product::announce(const Part& part) const {
  for (int64_t row = part.row_begin; row < part.row_end; row++)
    if (told_scale(call, row) >= rows::kNoSums)
      *summary_of(call, row).scale = told_scale(call, row);
}

// What a task has made is whole chunks of its rows, or their ends. Products of few rows wait for
// weights, and this does not: meanwhile the next task's first ones are asked for, as many lines as are
// looked at of these rows. With more rows it would take longer than they spare.
void Product::summarize(const Part& part) const {
  const int64_t begin = part.panel_begin * kPanel, end = std::min(call.n, part.panel_end * kPanel);
  const uint8_t* next = call.weights + part.panel_end * panel_bytes(call);
  const uint8_t* const last = call.weights + num_panels(call) * panel_bytes(call);
  const int64_t bytes = (end - begin) * static_cast<int64_t>(sizeof(float));
  const bool asks = part.row_end - part.row_begin <= kAskingRows;
  for (int64_t row = part.row_begin; row < part.row_end; row++) {
    const float scale = told_scale(call, row);
    if (!(scale >= rows::kNoSums)) continue;
    const bool has_next = asks && last - next >= bytes;
    const float* ahead = reinterpret_cast<const float*>(next) - begin;
    kernels.summarize(call.output + row * call.n, begin, end, scale, has_next ? ahead : nullptr,
                      summary_of(call, row));
    next += bytes;
  }
}

void check_product(const char* op, const MatMul& m) {
  if (!active_matmul()) refuse("%s: this processor has no AVX2 or dot products of int8", op);
  const bool known = (m.bits == 4 || m.bits == 8) && m.block_size >= 16 &&
                     m.block_size <= kLargestBlock && (m.block_size & (m.block_size - 1)) == 0;
  if (!known || m.k < 1 || m.n < 1)
    refuse("%s takes 4 or 8 bits in blocks of 16, 32, 64, 128 or 256, found K %lld, N %lld, "
           "bits %lld, block_size %lld",
           op, static_cast<long long>(m.k), static_cast<long long>(m.n),
           static_cast<long long>(m.bits), static_cast<long long>(m.block_size));
}

int run_tasks(int64_t count, Task task, void* argument, ParallelFor parallel_for, void* context) {
  if (count > 1) return parallel_for(context, static_cast<size_t>(count), task, argument);
  if (count == 1) task(argument, 0);
  return 0;
}

int run_product(Product& product, const LoraSum& lora, ParallelFor parallel_for, void* context) {
  struct Run {
    Product& product;
    const LoraSum& lora;
  } run{product, lora};
  const auto multiply = [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->product.multiply(static_cast<int64_t>(index));
  };
  const auto shrink = [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->lora.shrink(static_cast<int64_t>(index));
  };
  const auto add = [](void* argument, size_t index) {
    const Run& own = *static_cast<const Run*>(argument);
    own.lora.run(static_cast<int64_t>(index), own.product.call.output, true);
  };
  const auto step = [&](int64_t count, Task task) {
    return run_tasks(count, task, &run, parallel_for, context);
  };
  if (!lora.is_empty() && !lora.has_few_rows()) {
    product.lora = &lora;
    if (const int result = step(lora.tasks(), shrink)) return result;
  }
  const int result = step(product.multiply_tasks(), multiply);
  if (result != 0 || product.lora) return result;
  return step(lora.tasks(), add);
}

int run_matmul(const MatMulKernels& kernels, MatMul call, ParallelFor parallel_for,
               void* context, const ProductLora* adapters) {
  if (call.rows == 0) return 0;
  // The calling thread's; the others only use it until this call is over.
  thread_local Quantized quantized;
  thread_local LoraSpace space;
  quantized.reserve(kernels, call);
  LoraSum lora;
  if (adapters) lora = space.prepare(kernels, *adapters, call);
  Product product(kernels, call);
  const auto quantize = [](void* argument, size_t index) {
    static_cast<const Product*>(argument)->quantize(static_cast<int64_t>(index));
  };
  const int result =
      run_tasks(product.quantize_tasks(), quantize, &product, parallel_for, context);
  if (result != 0) return result;
  return run_product(product, lora, parallel_for, context);
}

}  // namespace onnxport
