// LoRA adapters in their slots, and what they add to a product, in parts. Free of ONNX Runtime. The
// layout of a slot is `slot_layout`'s in graphs/lora.py.
//
// A and B of an adapter in floats lie in panels, see kernels.h, projection by projection. Of an adapter
// in int8, B does, behind A, which is the weights of one more product with the product's inputs, as
// these were quantized: those of all projections together, packed as matmul.h has it, in the bits and
// blocks of the product's own weights, with float scales. At 8 bits an output is a row of A. At 4 bits
// two are: the first half of a panel's outputs are rows' numbers without their last four bits, and the
// other half are these, so that a number is 16 * (first - 8) + (second - 8), with the sixteen in the
// scale. The last panel is half a panel where that has room enough. What fills it up is 0.
//
// Of an adapter in int4 an output is a row of A at 4 bits, too. B is multiplied in integers, in a layout
// of its own: see LoraExpand.
#pragma once

#include <vector>

#include "kernels.h"
#include "matmul.h"

namespace onnxport {

constexpr size_t kLoraParts = 3;  // projections that one product computes, at most
constexpr int64_t kFewLoraRows = 16;
constexpr size_t kFewPieces = 2;  // chunks

// All slots, and which token has which.
struct LoraSlots {
  LoraType type;
  const int32_t* tokens;  // the slot of each; 0: none
  const int32_t* ranks;   // [slots + 1][ranks_stride]
  const char* weights;    // [slots][numbers]
  const float* scales;    // of integers: [slots + 1][ranks_stride][max_rank], of the rows of B
  int64_t ranks_stride, numbers, max_rank;
};

// Where a product lies in every slot.
struct LoraPlace {
  int64_t offset;               // of its first projection, in numbers
  int64_t ranks;                // of its first projection, from the start of a slot's ranks
  int64_t depth;                // input features
  int64_t bits, block_size;     // of the product's weights, and of A in integers
  int64_t parts;                // projections
  int64_t columns[kLoraParts];  // of each
};

// Adapters of a product's rows.
struct ProductLora {
  LoraSlots slots;
  LoraPlace place;
};

// Tokens [first, first + count) of one adapter, few enough to share what they load.
struct LoraChunk {
  int64_t first, count;
  int32_t slot;
};

// Numbers of a row in whole panels.
static inline int64_t in_lora_panels(int64_t count) {
  return (count + kLoraPanel - 1) / kLoraPanel * kLoraPanel;
}

int64_t lora_rank(const LoraSlots& slots, const LoraPlace& place, int32_t slot, int64_t part);

// Numbers that an adapter takes with this rank in each projection.
int64_t lora_numbers(LoraType type, const LoraPlace& place, int64_t rank);

// Multiplications that a token takes with an adapter.
int64_t lora_work(const LoraSlots& slots, const LoraPlace& place, int32_t slot);

// Rows of A in integers, of all projections of a product, that lie together.
struct RowPanel {
  int64_t begin, rows;  // of which the last ones may be nobody's
  int64_t outputs;      // kPanel, or kHalfPanel
  int64_t offset;       // of its bytes, from those of the first panel
};

// Outputs of some rows and some of a projection's columns.
struct LoraBlock {
  int64_t row_begin, row_end;
  int64_t column_begin, column_end;
  float* output;   // of the first row and column
  int64_t stride;  // from one row's to the next one's
};

// What adapters add to a product of `rows` tokens. Tokens without an adapter, or with one that has
// no part in the product, are left alone.
//
// There are two ways to it, with the same bits. The tasks of run do all at once, from one end of an
// adapter to the other: with few rows that is all there is to wait for. Or the tasks of shrink come
// first, and then expand and expand_product add to any part of the outputs while a near cache has it:
// with many rows it has B, too. Tasks may run in any order.
class LoraSum {
 public:
  LoraSum() = default;
  LoraSum(const LoraSlots& slots, const LoraPlace& place, int64_t rows);

  bool is_empty() const { return chunks_.empty(); }
  bool has_few_rows() const { return rows_ <= kFewLoraRows; }

  // Whether B had better be read piece by piece, where outputs are: with many rows, and where it is
  // multiplied fast and is that of next to all rows.
  bool reads_pieces() const {
    return !has_few_rows() || (slots_.type == kLoraInt4 && chunks_.size() <= kFewPieces);
  }
  int64_t num_factors() const;  // floats that there must be room for

  // Of adapters in floats: the input, [rows][depth].
  void set(const float* input, float* factors);

  // Of adapters in integers: the product whose quantized activations are read.
  void set(const MatMulKernels& kernels, const MatMul& product, float* factors);

  // Few chunks are divided further, so that each thread has something to do; little work is not.
  int64_t tasks() const;

  // Adds to [rows][all columns], or sets them.
  void run(int64_t index, float* output, bool is_added) const;

  void shrink(int64_t index) const;
  void expand(int64_t part, const LoraBlock& block) const;
  void expand_product(const LoraBlock& block) const;  // columns of all projections together

 private:
  template <class F>
  void for_chunks(int64_t index, F f) const;
  template <class F>
  void for_rows(const LoraBlock& block, F f) const;
  void shrink_part(const LoraChunk& chunk, int64_t part, const char* end, int64_t jump) const;
  void shrink_product(const LoraChunk& chunk, int64_t first, int64_t last) const;
  void round_factors(const LoraChunk& chunk, int64_t first, int64_t last) const;
  void read_factors(const LoraChunk& chunk, int64_t first, int64_t last, const RowPanel& panel,
                    const float* outputs) const;
  LoraExpand expansion(const LoraChunk& chunk, int64_t part) const;
  bool has_product() const { return is_integer(slots_.type); }
  float* factors_of(int64_t row, int64_t part) const;
  int64_t column_of(int64_t part) const;
  int64_t rank_of(int32_t slot, int64_t part) const;
  int64_t ranks_before(int32_t slot, int64_t part) const;  // of all parts before
  const char* begin_of(int32_t slot) const;
  const char* a_of(int32_t slot, int64_t part) const;
  const char* b_of(int32_t slot, int64_t part) const;
  const char* end_of(int32_t slot, int64_t part) const;

  LoraSlots slots_{};
  LoraPlace place_{};
  const MatMulKernels* kernels_ = nullptr;
  MatMul product_{};
  const float* input_ = nullptr;
  float* factors_ = nullptr;  // [rows][parts][factor_stride_]
  int64_t rows_ = 0, width_ = 0, work_ = 0;
  int64_t factor_stride_ = 0;  // floats of a row's factors of one projection
  std::vector<LoraChunk> chunks_;
};

}  // namespace onnxport
