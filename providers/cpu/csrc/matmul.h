// Products with block-quantized weights in plain pointers and integers, free of ONNX Runtime.
//
// Weights are as com.microsoft.MatMulNBits stores them: a value is (quant - zero) * scale, and
// block_size input features of an output share scale and zero point, which without zero points is
// 2^(bits - 1). Or they are MXFP4, see Numbers, with scales that are powers of two.
// Activations are rounded to int8 when called: a row's block of inputs shares the scale
// max|x| / 127. So |x - quant * scale| <= max|x| / 254, and an output differs from the product
// with exact activations by no more than the sum over its blocks of max|x| / 254 * sum|w|.
//
// A row that holds a value that is not finite becomes NaN; no other row is the worse for it.
//
//   y[row][n] = sum over blocks, in order, of fma(float(S) * x_scale, w_scale, y)
//
// with S, the block's sum of products of integers around 2^(bits - 1), exact. With zero points follows
//
//   y[row][n] = sum over blocks, in order, of fma(float(T) * x_scale, w_scale * (2^(bits - 1) - zero), y)
//
// with T, the sum of the row's integers; the bias is added last. In place of zero points blocks may have
// offsets: a value is (quant - 2^(bits - 1)) * scale + offset then, and what follows is
//
//   y[row][n] = sum over blocks, in order, of fma(float(T) * x_scale, offset, y)
//
// Every path computes just this, so the bits of a row's result depend on that row and the weights
// alone: not on the other rows, on their number, on the number of threads or on the instruction set.
#pragma once

#include <float.h>
#include <stdint.h>

#include "attention.h"
#include "summaries.h"

namespace onnxport {

constexpr int64_t kPanel = 32;  // output features that are stored together
constexpr int64_t kHalfPanel = kPanel / 2;  // or, of adapters, are where there are no more
constexpr int64_t kLargestBlock = 256;

// What weights are: integers of four or eight bits, or E2M1 (OCP Microscaling Formats, 1.0): a sign,
// two bits of exponent and one of mantissa, which are 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Twice such a
// number is an integer from -12 to 12. That is what is multiplied, and scales are packed as half of
// what they are, so that nothing is rounded.
enum class Numbers { kInt4, kInt8, kFp4 };

// What is done to activations before they are quantized: residual = input + skip, and of that
//
//   residual[i] / sqrt(mean of squares + epsilon) * gamma[i]
//
// Root Mean Square Layer Normalization (Zhang and Sennrich, 2019), as ONNX Runtime's
// SkipSimplifiedLayerNormalization has it, but for the order of its sum, which is the same with
// every instruction set.
struct Norm {
  const float* gamma;  // [k], or null for no norm
  const float* skip;   // [rows][k]
  float* residual;     // [rows][k]
  float* normalized;   // [rows][k], for others to read, or null
  float epsilon;
};

// Packed weights: one panel after the other; of each panel one block after the other:
//   quants [block_size * bits / 32][kPanel] of 32 bits, scales [kPanel] of float or float16
// The 32 bits are what MatMulNBits stores for one output feature: four or, at 4 bits, eight inputs
// of which the even ones are in the low nibbles. At 8 bits the quants' zero point is subtracted.
// Panels and scales are filled up with zeros to whole blocks.
struct MatMul {
  int64_t k;           // input features
  int64_t n;           // output features
  int64_t bits;        // 4 or 8
  int64_t block_size;  // 16, 32, 64, 128 or 256
  bool half_scales;    // scales are packed as float16; see are_halves
  bool is_fp4;         // 4 bits are E2M1; see Numbers
  const uint8_t* weights;
  // float16 [panels][blocks][kPanel], see pack_zeros: zero points or offsets; null: neither.
  const uint16_t* zeros;
  bool has_offsets;   // what zeros are
  const float* bias;  // [n], added to every row; null: none

  int64_t rows;
  const float* input;  // [rows][k]; run_matmul's, as is the output: kernels get theirs by argument
  float* output;       // [rows][n]
  Norm norm;
  const float* summary_scales;  // [rows], what is to be known of each: see rows/summary.h; null: nothing
  float* summaries;             // [rows][summary_floats(n)]

  // Quantized activations, [blocks][padded_rows] of each: block_size quants, inputs beyond k zero,
  // and at 4 bits four even ones ahead of four odd ones; their scale; and what takes the weights'
  // zero point out of a sum over weights that still have one, -zero_point * sum of quants.
  int64_t padded_rows;
  int8_t* quants;
  float* scales;
  int32_t* corrections;
  float* sums;  // likewise, of weights with zeros: what quants add up to, times their scale
};

// The outputs of some panels and rows, at most the kernels' chunk_rows. row_begin is a multiple of
// what their row_unit says, and row_end is another or the end of all rows.
struct Part {
  int64_t panel_begin, panel_end;
  int64_t row_begin, row_end;
  float* output;   // where the first row's outputs of the first panel go
  int64_t stride;  // from one row's to the next one's
};

// What outputs are that do not count: less than all others, and a number.
constexpr float kForbidden = -FLT_MAX;

struct MatMulKernels {
  const char* name;

  int64_t chunk_rows;  // rows that share one pass over the weights, at most

  // How many rows are quantized for so many: those that are multiplied at once are all there.
  int64_t (*padded_rows)(int64_t rows);

  // Quantizes blocks [begin, end) of a row. x holds their inputs, or is null for a row that only
  // fills up the last ones: zeros. With a norm, the blocks must be all of the row. How quants are
  // stored is between this and multiply, but for 8 bits: there they are signed and in order. AVX2's
  // for 4 bits are unsigned where there are many rows.
  void (*quantize)(const MatMul& call, const float* x, int64_t row, int64_t begin, int64_t end);

  void (*multiply)(const MatMul& call, const Part& part);

  // As multiply, of one panel that holds kHalfPanel outputs: `weights` is its place, and n counts its
  // outputs. There is no bias.
  void (*multiply_half)(const MatMul& call, const Part& part);

  // Up to so many rows a product of few outputs may be computed in two passes, see coarse.h: sums
  // of 4-bit weights begin with the corrections, to which others may have been added.
  int64_t coarse_rows;

  // Multiplies so many outputs of a row, from a panel's first one on, by a factor, and finds the
  // largest one of each panel; if one is not finite, all of `largest` becomes NaN. Those without a
  // bit in their panel's word of `allowed` become kForbidden; null: none.
  void (*scale_outputs)(float* outputs, int64_t count, float factor, const uint32_t* allowed,
                        float* largest);

  Summarize summarize;  // null: cannot

  // A single row's panels are read so many at a time; a task that has as many loses nothing.
  int64_t streams = 1;

  // As multiply, and summarizes the outputs while they are in registers; false: not these, and
  // nothing was done. Null: none.
  bool (*multiply_and_summarize)(const MatMul& call, const Part& part) = nullptr;

  // Parts of a call with so many rows begin and end at multiples of what this returns. Null: anywhere.
  int64_t (*row_unit)(int64_t rows) = nullptr;
};

// Null where this build or this processor cannot run them.
const MatMulKernels* matmul_amx();
const MatMulKernels* matmul_avx512vnni();
const MatMulKernels* matmul_avxvnni();
const MatMulKernels* matmul_avx2();
const MatMulKernels* matmul_i8mm();
const MatMulKernels* matmul_dotprod();

// The set in use, null for none: the best one, unless set_matmul_isa chose. set_matmul_isa(null)
// returns to the best one; an unknown or unsupported name returns false and changes nothing.
const MatMulKernels* active_matmul();
bool set_matmul_isa(const char* name);

// static, not members or inline alone: an instruction set's object must never provide code to
// another's.
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t num_blocks(const MatMul& m) { return ceil_div(m.k, m.block_size); }
static inline int64_t num_panels(const MatMul& m) { return ceil_div(m.n, kPanel); }
static inline Numbers numbers_of(const MatMul& m) {
  if (m.bits == 8) return Numbers::kInt8;
  return m.is_fp4 ? Numbers::kFp4 : Numbers::kInt4;
}
static inline int64_t quant_bytes(const MatMul& m, int64_t panel = kPanel) {
  return panel * m.block_size * m.bits / 8;
}
static inline int64_t block_bytes(const MatMul& m, int64_t panel = kPanel) {
  return quant_bytes(m, panel) + panel * (m.half_scales ? 2 : 4);
}
static inline int64_t panel_bytes(const MatMul& m, int64_t panel = kPanel) {
  return num_blocks(m) * block_bytes(m, panel);
}

static inline rows::Summary summary_of(const MatMul& m, int64_t row) {
  return rows::summary_at(m.summaries + row * rows::summary_floats(m.n), m.n);
}

// What is told of a row: what is asked for, but no sums where there are many rows. These are not in a
// near cache by then, and whoever reads them has no less to do here than later.
constexpr int64_t kSummedRows = 32;
static inline float told_scale(const MatMul& m, int64_t row) {
  const float scale = m.summary_scales[row];
  return scale > rows::kNoSums && m.rows > kSummedRows ? rows::kNoSums : scale;
}

// Position of a row's scale for a block; its quants are block_size times that far.
static inline int64_t row_block(const MatMul& m, int64_t row, int64_t block) {
  return block * m.padded_rows + row;
}

// Scales as they are stored. E8M0 is a power of two, as its exponent plus 127 in a byte; 255 is NaN.
// Weights that have such scales are E2M1.
struct Scales {
  enum Type { kFloat, kFloat16, kE8M0 };
  const void* data;
  Type type;

  Scales(const float* floats) : data(floats), type(kFloat) {}
  Scales(const void* stored, Type of) : data(stored), type(of) {}
};
static inline int64_t scale_bytes(Scales::Type type) {
  return type == Scales::kFloat ? 4 : type == Scales::kFloat16 ? 2 : 1;
}

// Whether each of so many scales is a float16; a float that is zero or in the normal range of
// float16 and has no bit that it lacks; or an E8M0 of which half is a float16, be it subnormal:
// packing it as one loses nothing. Products of one row wait for memory, of which float scales are
// one byte in 17 at 4 bits in blocks of 128, and one in five in blocks of 32.
bool are_halves(const Scales& scales, int64_t count);

// Fills the packed weights, num_panels * panel_bytes at a cache line, from the operator's inputs:
// quants [n][blocks][block_size * bits / 8], scales [n][blocks]. Scales of E8M0 are halved.
void pack_weights(const MatMul& call, const uint8_t* quants, const Scales& scales,
                  uint8_t* packed);

// Bytes of an output feature's zero points as the operator has them: two blocks to a byte at 4 bits,
// the even one in the low nibble. Or of its offsets: float16.
static inline int64_t stored_zero_bytes(const MatMul& m) {
  return m.has_offsets ? num_blocks(m) * 2 : ceil_div(num_blocks(m) * m.bits, 8);
}

static inline int64_t packed_zeros(const MatMul& m) {
  return num_panels(m) * num_blocks(m) * kPanel;
}

// Fills the packed zeros from the operator's, [n][stored_zero_bytes]: offsets, or 2^(bits - 1) less each
// zero point, so that what fills up panels takes nothing. Of every step-th row of those that are stored.
void pack_zeros(const MatMul& call, const uint8_t* stored, uint16_t* packed, int64_t step = 1);

// Throws an InvalidInput for a product that our kernels cannot compute, whatever its weights.
void check_product(const char* op, const MatMul& product);

struct ProductLora;  // see lora.h

// Computes the output, the bias and then what adapters add included, and the summaries that are asked
// for, not both of the last two; what activations are quantized into is taken care of. Returns zero or
// what parallel_for returned. Throws std::bad_alloc only.
int run_matmul(const MatMulKernels& kernels, MatMul call, ParallelFor parallel_for, void* context,
               const ProductLora* lora = nullptr);

}  // namespace onnxport
