// What operators share that keep states of sequences in a pool: the last three inputs are lengths,
// then the slots that are read and written, and the output 1 is the pool.
#pragma once

#include <initializer_list>

#include "op.h"
#include "state_slots.h"

namespace onnxport::op {

// One call's inputs. All that does not fit throws a Failure, or an InvalidInput.
class PoolCall {
 public:
  PoolCall(const Api& api, ort::KernelContext* context, const char* op)
      : api_(api), context_(context), op_(op) {}

  bool has(size_t input) const { return optional_input(api_, context_, input) != nullptr; }

  // An input that has exactly these dimensions; -1 allows any.
  Tensor tensor(size_t input, const char* name, std::initializer_list<int64_t> dims) const;

  // An input [rows][…], as one [rows][width]; -1 allows any.
  Tensor rows(size_t input, const char* name, int64_t rows = -1, int64_t width = -1) const;

  // The slots of the sequences, of the inputs from the lengths on.
  StateSlots slots(int64_t num_tokens, int64_t num_slots, size_t lengths) const;

  // The pool to update: the output's memory, which is the input's where they are bound to one
  // another. Where they are not, the whole pool is copied, which is correct and slow.
  float* open_pool(const Tensor& pool) const;

  // Throws a Failure: a row is not of heads of this size, and so many numbers besides.
  [[noreturn]] void refuse_width(const char* name, int64_t width, int64_t head_size,
                                 int64_t besides) const;

 private:
  const Api& api_;
  ort::KernelContext* context_;
  const char* op_;
};

// An operator of so many inputs, of which the pool is one, and the lengths the first of integers.
// Its name, which inputs it may do without, and its kernels are still to be set.
template <size_t kPool, size_t kLengths, size_t kInputs>
ort::CustomOp pool_operator() {
  ort::CustomOp op = base_operator();
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    return index < kLengths ? ort::kFloat : ort::kInt32;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return kInputs; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{2}; };
  op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  op.may_inplace = op.alias_map = [](int** inputs, int** outputs) {
    static int from[] = {kPool};
    static int to[] = {1};
    *inputs = from;
    *outputs = to;
    return size_t{1};
  };
  return op;
}

}  // namespace onnxport::op
