// A product's steps, for computations that have other work between them. Not for the objects of an
// instruction set: the members here are code.
#pragma once

#include "lora.h"
#include "matmul.h"
#include "scratch.h"

namespace onnxport {

// What a product's activations are quantized into, kept from call to call.
class Quantized {
 public:
  // Makes room for the call's rows, and lets it point there.
  void reserve(const MatMulKernels& kernels, MatMul& call);

 private:
  Buffer quants_, scales_, corrections_, sums_;
};

// What a product's adapters work in, kept from call to call.
class LoraSpace {
 public:
  // What adapters add to the call's rows. The call has its memory for quantized activations.
  LoraSum prepare(const MatMulKernels& kernels, const ProductLora& adapters, const MatMul& call);

 private:
  Buffer factors_;
};

// A product in tasks that may run in any order, all of quantize before the first of multiply.
struct Product {
  const MatMulKernels& kernels;
  MatMul call;
  int64_t rows_per_quantize, panels_per_task, panel_tasks;
  const LoraSum* lora = nullptr;  // expanded to the outputs of each task

  // The call has its memory for quantized activations.
  Product(const MatMulKernels& kernels, const MatMul& call);

  // Divides into tasks anew, where products that are multiplied together read so many bytes of
  // weights; the constructor takes this one to be alone.
  void divide(int64_t bytes);

  int64_t quantize_tasks() const { return ceil_div(call.padded_rows, rows_per_quantize); }
  void quantize(int64_t index) const;
  bool summarizes() const { return call.summaries && kernels.summarize; }
  int64_t multiply_tasks() const {
    return panel_tasks * ceil_div(call.rows, kernels.chunk_rows);
  }
  void multiply(int64_t index) const;

 private:
  void multiply_adapted(const Part& part) const;
  void announce(const Part& part) const;
  void summarize(const Part& part) const;
};

// Multiplies, and adds what adapters do: all there is to do once the activations are quantized.
int run_product(Product& product, const LoraSum& lora, ParallelFor parallel_for, void* context);

// Runs a step's tasks; a single one on this thread.
int run_tasks(int64_t count, Task task, void* argument, ParallelFor parallel_for, void* context);

}  // namespace onnxport
