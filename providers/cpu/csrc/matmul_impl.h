// Products over an instruction set's vectors; activations to int8 are in quantize_impl.h. Compiled
// once for each set.
//
// A matmul_vec_*.h, included before, defines Vec, vectors of kLanes outputs, and Dot<Numbers>, which
// multiplies eight inputs at a time with weights that are such numbers:
//
//   kRows        rows that one unit of inputs and sums holds
//   kOutputs     of a panel
//   kBits        of a weight
//   kMostUnits   units whose sums the registers hold, beside columns(units) vectors of outputs
//   kWholeBlocks  whether several rows read all of a panel's block before the next one; else they
//                read the panel once for each columns(units) vectors
//   Weights      eight inputs of kLanes outputs; prepare() makes them of twice four inputs
//   Inputs       eight inputs of kRows rows, block_size apart
//   Sum          of 32 bits; start() takes kRows corrections, rows() returns a vector for each row
//   Partial      what add() adds to: the sum itself, or where kGroup is not zero a narrower one,
//                zero at first, that holds kGroup inputs' products and goes into the sum by widen()
//   load_half    of Vec: kLanes float16, as floats
//   look_up      of Vec: what a table of 16 bytes has for each nibble
//   kZeroPoint8, kZeroPointFp4  of Vec: what prepare() adds to weights of eight bits, and of E2M1
//   kAhead       of Vec: how many bytes ahead several rows ask for a panel's weights
//   kStreams     of Vec: panels that one row reads side by side, and
//   kStreamAhead  how many bytes ahead it asks for each: see matmul_one_impl.h
#pragma once

#include <float.h>
#include <math.h>
#include <string.h>

#include "quantize_impl.h"

namespace onnxport {
namespace {

constexpr int64_t kChunkRows = 128;  // whose quants stay in the L2 cache
constexpr int64_t kCoarseRows = 8;  // more of them wait for instructions, not for memory
constexpr int64_t kFarInputs = 4096;  // or do not, of more input features than these

// Sums of integer products become their share of the output.
ONNXPORT_INLINE Vec::Floats accumulate(Vec::Floats total, Vec::Ints sum, Vec::Floats row_scale,
                                       Vec::Floats scales) {
  return Vec::fma(Vec::mul(Vec::to_floats(sum), row_scale), scales, total);
}

// A block's scales of `count` outputs from one on; halves become floats in the given memory. There,
// because what is made of them in registers costs the loop that multiplies some of its own.
ONNXPORT_INLINE const float* read_scales(const MatMul& m, const uint8_t* packed, int64_t first,
                                         int count, float* memory) {
  if (!m.half_scales) return reinterpret_cast<const float*>(packed + first * 4);
  for (int i = 0; i < count; i += Vec::kLanes)
    Vec::store(memory + i, Vec::load_half(packed + (first + i) * 2));
  return memory;
}

// Reads eight inputs' packed weights of outputs from vector c on, and asks for those `ahead` bytes
// behind them.
template <class Dot>
ONNXPORT_INLINE typename Dot::Weights read_weights(const uint8_t* weights, int c, int64_t ahead) {
  const uint8_t* first = weights + c * Vec::kLanes * 4;
  const bool is_line = c * Vec::kLanes % 16 == 0;
  if (is_line) Vec::prefetch(first + ahead);
  const Vec::Ints low = Vec::load_bytes(first);
  if (Dot::kBits == 4) return Dot::prepare(Vec::low_nibbles(low), Vec::high_nibbles(low));
  const uint8_t* second = first + Dot::kOutputs * 4;
  if (is_line) Vec::prefetch(second + ahead);
  return Dot::prepare(low, Vec::load_bytes(second));
}

// Adds the products of `count` inputs. Few units keep their inputs in registers, many the weights.
template <class Dot, int kUnits, int kColumns, class Sum>
ONNXPORT_INLINE void add_products(const uint8_t* weights, const int8_t* quants, int64_t block_size,
                                  int64_t count, int64_t ahead, Sum (&sums)[kUnits][kColumns]) {
  int64_t i = 0;
  do {
    if constexpr (kUnits < kColumns) {
      typename Dot::Inputs x[kUnits];
      ONNXPORT_UNROLL
      for (int u = 0; u < kUnits; u++)
        x[u] = Dot::inputs(quants + u * Dot::kRows * block_size + i, block_size);
      ONNXPORT_UNROLL
      for (int c = 0; c < kColumns; c++) {
        const auto w = read_weights<Dot>(weights, c, ahead);
        ONNXPORT_UNROLL
        for (int u = 0; u < kUnits; u++) Dot::add(sums[u][c], w, x[u]);
      }
    } else {
      typename Dot::Weights w[kColumns];
      ONNXPORT_UNROLL
      for (int c = 0; c < kColumns; c++) w[c] = read_weights<Dot>(weights, c, ahead);
      ONNXPORT_UNROLL
      for (int u = 0; u < kUnits; u++) {
        const auto x = Dot::inputs(quants + u * Dot::kRows * block_size + i, block_size);
        ONNXPORT_UNROLL
        for (int c = 0; c < kColumns; c++) Dot::add(sums[u][c], w[c], x);
      }
    }
    i += 8;
    weights += Dot::kOutputs * Dot::kBits;
  } while (i < count);  // not at the top: sums would be copied for the case of no input at all
}

template <class Dot, int kUnits, int kColumns>
ONNXPORT_INLINE void add_block(const uint8_t* weights, const int8_t* quants, int64_t block_size,
                               int64_t ahead, typename Dot::Sum (&sums)[kUnits][kColumns]) {
  if constexpr (Dot::kGroup == 0) {
    add_products<Dot>(weights, quants, block_size, block_size, ahead, sums);
  } else {
    const int64_t group = block_size < Dot::kGroup ? block_size : Dot::kGroup;
    for (int64_t i = 0; i < block_size; i += group) {
      typename Dot::Partial parts[kUnits][kColumns] = {};
      add_products<Dot>(weights, quants + i, block_size, group, ahead, parts);
      weights += group / 8 * Dot::kOutputs * Dot::kBits;
      ONNXPORT_UNROLL
      for (int u = 0; u < kUnits; u++) {
        ONNXPORT_UNROLL
        for (int c = 0; c < kColumns; c++) Dot::widen(sums[u][c], parts[u][c]);
      }
    }
  }
}

// Stores a row's vectors, or those of their outputs that there are.
template <int kColumns>
ONNXPORT_INLINE void store_outputs(float* output, int64_t left, const Vec::Floats* totals) {
  if (left >= kColumns * Vec::kLanes) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kColumns; c++) Vec::store(output + c * Vec::kLanes, totals[c]);
  } else if (left > 0) {
    float values[kPanel];
    for (int c = 0; c < kColumns; c++) Vec::store(values + c * Vec::kLanes, totals[c]);
    memcpy(output, values, static_cast<size_t>(left) * sizeof(float));
  }
}

// Of the outputs of one panel and row on.
struct Outputs {
  int64_t panel, row;
  float* first;
  int64_t stride;
  int64_t group, groups;  // of rows, that read the same panel
};

// From weights to those that are asked for meanwhile. The first group of rows asks some blocks ahead,
// kAhead bytes or more: the processor's own prefetching stops at the end of each page, and at the end
// of what it finds room to run ahead. Whole blocks, so that no line between two of them is left out. The
// other groups, who find their weights in the cache, share the next panel among them, so that memory
// is not idle while they multiply.
template <class Dot>
ONNXPORT_INLINE int64_t bytes_ahead(const MatMul& m, const Outputs& out, int64_t block) {
  const int64_t bytes = block_bytes(m, Dot::kOutputs);
  if (out.group == 0) return ceil_div(Vec::kAhead, bytes) * bytes;
  return block % (out.groups - 1) == out.group - 1 ? panel_bytes(m, Dot::kOutputs) : 0;
}

// Asks for a panel's scales.
ONNXPORT_INLINE void prefetch_scales(const MatMul& m, const uint8_t* packed, int64_t outputs = kPanel) {
  Vec::prefetch(packed);
  if (outputs == kPanel && !m.half_scales) Vec::prefetch(packed + 64);
}

// Asks for a block's zeros, which are needed once the panel's products are all there.
ONNXPORT_INLINE void prefetch_zeros(const MatMul& m, int64_t panel, int64_t block) {
  if (!m.zeros) return;
  static_assert(kPanel * sizeof(*m.zeros) == 64, "they are a line");
  Vec::prefetch(reinterpret_cast<const uint8_t*>(m.zeros + (panel * num_blocks(m) + block) * kPanel));
}

// Asks for what rows of outputs will be written to. It is rarely in a cache, and stores that wait
// for it hold up all the later ones, those of sums that find no register among them.
template <int kRows, int kColumns>
ONNXPORT_INLINE void prefetch_outputs(const Outputs& out, int64_t offset, int64_t rows) {
  for (int r = 0; r < kRows && r < rows; r++) {
    const float* row = out.first + r * out.stride + offset;
    for (int i = 0; i < kColumns * Vec::kLanes; i += 16)
      Vec::prefetch(reinterpret_cast<const uint8_t*>(row + i));
  }
}

// Asks for a group's inputs of a block, the next one. They lie a block of all rows further on,
// where the processor does not look by itself.
template <int kRows>
ONNXPORT_INLINE void prefetch_inputs(const MatMul& m, int64_t row, int64_t block) {
  const int8_t* first = m.quants + row_block(m, row, block) * m.block_size;
  for (int64_t i = 0; i < kRows * m.block_size; i += 64)
    Vec::prefetch(reinterpret_cast<const uint8_t*>(first + i));
}

// A panel's outputs of kUnits units of rows, from a vector on: kColumns vectors, or more where each
// block is gone through some vectors at a time.
template <class Dot, int kUnits, int kColumns>
ONNXPORT_ALONE void multiply_units(const MatMul& m, const Outputs& out, int64_t vector) {
  constexpr int kRows = kUnits * Dot::kRows;
  constexpr int kAll = Dot::kWholeBlocks ? static_cast<int>(Dot::kOutputs / Vec::kLanes) : kColumns;
  Vec::Floats totals[kRows][kAll];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kAll; c++) totals[r][c] = Vec::set1(0.f);
  }
  const int64_t offset = vector * Vec::kLanes, blocks = num_blocks(m);
  if constexpr (kRows > 1) prefetch_outputs<kRows, kAll>(out, offset, m.rows - out.row);
  const uint8_t* weights = m.weights + out.panel * panel_bytes(m, Dot::kOutputs);
  for (int64_t block = 0; block < blocks; block++, weights += block_bytes(m, Dot::kOutputs)) {
    const int64_t at = row_block(m, out.row, block), ahead = bytes_ahead<Dot>(m, out, block);
    alignas(64) float converted[kAll * Vec::kLanes];
    const uint8_t* packed = weights + quant_bytes(m, Dot::kOutputs);
    const float* scales = read_scales(m, packed, offset, kAll * Vec::kLanes, converted);
    prefetch_scales(m, packed + ahead, Dot::kOutputs);
    prefetch_zeros(m, out.panel, block);
    if constexpr (kRows > 1) {
      if (m.k > kFarInputs) prefetch_inputs<kRows>(m, out.row, block + 1);
    }
    for (int first = 0; first < kAll; first += kColumns) {
      typename Dot::Sum sums[kUnits][kColumns];
      ONNXPORT_UNROLL
      for (int u = 0; u < kUnits; u++) {
        ONNXPORT_UNROLL
        for (int c = 0; c < kColumns; c++)
          sums[u][c] = Dot::start(m.corrections + at + u * Dot::kRows);
      }
      add_block<Dot>(weights + (offset + first * Vec::kLanes) * 4, m.quants + at * m.block_size,
                     m.block_size, ahead, sums);
      ONNXPORT_UNROLL
      for (int u = 0; u < kUnits; u++) {
        ONNXPORT_UNROLL
        for (int c = 0; c < kColumns; c++) {
          Vec::Ints rows[Dot::kRows];
          Dot::rows(sums[u][c], rows);
          ONNXPORT_UNROLL
          for (int i = 0; i < Dot::kRows; i++) {
            const int r = u * Dot::kRows + i, v = first + c;
            totals[r][v] = accumulate(totals[r][v], rows[i], Vec::set1(m.scales[at + r]),
                                      Vec::load(scales + v * Vec::kLanes));
          }
        }
      }
    }
  }
  const int64_t left = m.n - out.panel * Dot::kOutputs - offset;
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++)
    if (out.row + r < m.rows)
      store_outputs<kAll>(out.first + r * out.stride + offset, left, totals[r]);
}

// Rows that zeros are added to at once, of one vector of outputs: as many as registers hold.
constexpr int kManyZeroRows = Vec::kLanes == 8 ? 12 : 16;
constexpr int kFewZeroRows = 4;  // or so many, of as many vectors
constexpr int kFewZeroVectors = kPanel / Vec::kLanes < 4 ? kPanel / Vec::kLanes : 8 / kFewZeroRows;

// Of a panel's outputs from a vector on.
template <int kRows, int kColumns>
ONNXPORT_INLINE void add_zeros(const MatMul& m, int64_t panel, int64_t row, int64_t vector,
                               float* outputs, int64_t stride) {
  constexpr int64_t kWidth = kColumns * Vec::kLanes;
  const int64_t offset = vector * Vec::kLanes, blocks = num_blocks(m);
  const int64_t left = m.n - panel * kPanel - offset;
  if (left <= 0) return;
  outputs += offset;
  Vec::Floats totals[kRows][kColumns];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    float filled[kWidth];
    const float* from = outputs + r * stride;
    if (left < kWidth) {
      memset(filled, 0, sizeof filled);
      memcpy(filled, from, static_cast<size_t>(left) * sizeof(float));
      from = filled;
    }
    ONNXPORT_UNROLL
    for (int c = 0; c < kColumns; c++) totals[r][c] = Vec::load(from + c * Vec::kLanes);
  }
  const uint8_t* packed = m.weights + panel * panel_bytes(m) + quant_bytes(m);
  const uint16_t* zeros = m.zeros + panel * blocks * kPanel + offset;
  for (int64_t block = 0; block < blocks; block++, packed += block_bytes(m), zeros += kPanel) {
    alignas(64) float converted[kWidth];
    const float* scales =
        m.has_offsets ? nullptr
                      : read_scales(m, packed, offset, static_cast<int>(kWidth), converted);
    const float* sums = m.sums + row_block(m, row, block);
    ONNXPORT_UNROLL
    for (int c = 0; c < kColumns; c++) {
      const auto* of_vector = reinterpret_cast<const uint8_t*>(zeros + c * Vec::kLanes);
      Vec::Floats zero = Vec::load_half(of_vector);
      if (!m.has_offsets) zero = Vec::mul(Vec::load(scales + c * Vec::kLanes), zero);
      ONNXPORT_UNROLL
      for (int r = 0; r < kRows; r++)
        totals[r][c] = Vec::fma(Vec::set1(sums[r]), zero, totals[r][c]);
    }
  }
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) store_outputs<kColumns>(outputs + r * stride, left, totals[r]);
}

template <int kRows, int kColumns>
ONNXPORT_INLINE void add_zero_rows(const MatMul& m, int64_t panel, int64_t row, float* outputs,
                                   int64_t stride) {
  for (int64_t vector = 0; vector < kPanel / Vec::kLanes; vector += kColumns)
    add_zeros<kRows, kColumns>(m, panel, row, vector, outputs, stride);
}

// Adds what zeros make of a panel's outputs in some rows, from `row` on, just stored. That is one
// multiplication for each block, so that products need not know of them.
ONNXPORT_ALONE void add_zero_points(const MatMul& m, int64_t panel, int64_t row, float* outputs,
                                    int64_t stride, int64_t rows) {
  int64_t r = 0;
  for (; rows - r >= kManyZeroRows; r += kManyZeroRows)
    add_zero_rows<kManyZeroRows, 1>(m, panel, row + r, outputs + r * stride, stride);
  for (; rows - r >= kFewZeroRows; r += kFewZeroRows)
    add_zero_rows<kFewZeroRows, kFewZeroVectors>(m, panel, row + r, outputs + r * stride, stride);
  for (; r < rows; r++)
    add_zero_rows<1, kPanel / Vec::kLanes>(m, panel, row + r, outputs + r * stride, stride);
}

// Adds the bias to a panel's outputs in some rows, just stored. Not where they are in registers: of
// those the loop before has none to spare.
ONNXPORT_ALONE void add_bias(const MatMul& m, int64_t panel, float* outputs, int64_t stride,
                             int64_t rows) {
  const int64_t first = panel * kPanel, left = m.n - first, count = left < kPanel ? left : kPanel;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < count; i++) outputs[row * stride + i] += m.bias[first + i];
}

// Whether something is left to add to outputs once they are stored, and adding it.
ONNXPORT_INLINE bool is_unfinished(const MatMul& m) { return m.zeros || m.bias; }
ONNXPORT_INLINE void finish_outputs(const MatMul& m, int64_t panel, int64_t row, float* outputs,
                                    int64_t stride, int64_t rows) {
  if (m.zeros) add_zero_points(m, panel, row, outputs, stride, rows);
  if (m.bias) add_bias(m, panel, outputs, stride, rows);
}

// A panel's outputs of up to kUnits units of rows.
template <class Dot, int kUnits = Dot::kMostUnits>
ONNXPORT_INLINE void multiply_group(const MatMul& m, const Outputs& out, int64_t units) {
  if constexpr (kUnits > 1) {
    if (units < kUnits) return multiply_group<Dot, kUnits - 1>(m, out, units);
  }
  constexpr int kColumns = Dot::columns(kUnits), kAll = Dot::kOutputs / Vec::kLanes;
  for (int64_t vector = 0; vector < kAll; vector += Dot::kWholeBlocks ? kAll : kColumns)
    multiply_units<Dot, kUnits, kColumns>(m, out, vector);
}

// A part's outputs, group by group of rows. Groups are as large as each other, or larger by one unit:
// a unit by itself waits for its own sums, and takes as long as two or three.
template <class Dot>
void multiply_panels(const MatMul& m, const Part& part) {
  const int64_t units = ceil_div(part.row_end - part.row_begin, Dot::kRows);
  const int64_t groups = ceil_div(units, Dot::kMostUnits);
  for (int64_t panel = part.panel_begin; panel < part.panel_end; panel++) {
    float* output = part.output + (panel - part.panel_begin) * Dot::kOutputs;
    int64_t row = part.row_begin;
    for (int64_t group = 0; group < groups; group++) {
      const int64_t of_group = units / groups + (group < units % groups);
      const int64_t left = part.row_end - row, rows = of_group * Dot::kRows;
      multiply_group<Dot>(m, {panel, row, output, part.stride, group, groups}, of_group);
      finish_outputs(m, panel, row, output, part.stride, left < rows ? left : rows);
      row += rows;
      output += rows * part.stride;
    }
  }
}

// A Dot whose panels have half as many outputs.
template <class Dot>
struct Half : Dot {
  static constexpr int64_t kOutputs = kHalfPanel;
  static constexpr int columns(int units) {
    constexpr int kAll = kHalfPanel / Vec::kLanes;
    return Dot::columns(units) < kAll ? Dot::columns(units) : kAll;
  }
};

// See MatMulKernels::multiply_half. Those are adapters', of integers.
template <template <Numbers> class Dots>
void multiply_half(const MatMul& m, const Part& part) {
  if (m.bits == 4)
    multiply_panels<Half<Dots<Numbers::kInt4>>>(m, part);
  else
    multiply_panels<Half<Dots<Numbers::kInt8>>>(m, part);
}

// See MatMulKernels::scale_outputs.
void scale_outputs(float* outputs, int64_t count, float factor, const uint32_t* allowed,
                   float* largest) {
  constexpr int kVectors = kPanel / Vec::kLanes;
  const Vec::Floats by = Vec::set1(factor), zero = Vec::set1(0.f);
  const Vec::Floats forbidden = Vec::set1(kForbidden);
  Vec::Floats check = zero;
  const int64_t panels = ceil_div(count, kPanel), whole = count / kPanel;
  for (int64_t panel = 0; panel < whole; panel++, outputs += kPanel) {
    Vec::Floats top = Vec::set1(-INFINITY);
    ONNXPORT_UNROLL
    for (int v = 0; v < kVectors; v++) {
      Vec::Floats x = Vec::mul(Vec::load(outputs + v * Vec::kLanes), by);
      check = Vec::fma(x, zero, check);
      if (allowed) x = Vec::keep(x, allowed[panel] >> v * Vec::kLanes, forbidden);
      Vec::store(outputs + v * Vec::kLanes, x);
      top = Vec::max(top, x);
    }
    largest[panel] = Vec::largest_lane(top);
  }
  float lanes[Vec::kLanes], sum = 0.f, top = -INFINITY;
  Vec::store(lanes, check);
  for (float lane : lanes) sum += lane;
  for (int64_t i = 0; i < count - whole * kPanel; i++) {
    outputs[i] *= factor;
    sum += outputs[i] * 0.f;
    if (allowed && !(allowed[whole] >> i & 1)) outputs[i] = kForbidden;
    top = outputs[i] > top ? outputs[i] : top;
  }
  if (whole < panels) largest[whole] = top;
  for (int64_t panel = 0; sum != 0.f && panel < panels; panel++) largest[panel] = NAN;
}

// Those of whole units, but a single row stays alone.
template <int kRows>
int64_t rows_of_units(int64_t rows) {
  return rows == 1 ? 1 : ceil_div(rows, kRows) * kRows;
}

template <template <Numbers> class Dots>
void multiply_dots(const MatMul& m, const Part& part) {
  switch (numbers_of(m)) {
    case Numbers::kInt4: return multiply_panels<Dots<Numbers::kInt4>>(m, part);
    case Numbers::kInt8: return multiply_panels<Dots<Numbers::kInt8>>(m, part);
    case Numbers::kFp4: return multiply_panels<Dots<Numbers::kFp4>>(m, part);
  }
}

}  // namespace
}  // namespace onnxport
