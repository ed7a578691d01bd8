// Activations to int8, and products, over an instruction set's vectors. Compiled once for each set.
//
// A matmul_vec_*.h, included before, defines Vec, vectors of kLanes outputs, and Dot<bits>, which
// multiplies eight inputs at a time:
//
//   kRows        rows that one unit of inputs and sums holds
//   kMostUnits   units whose sums the registers hold, beside columns(units) vectors of outputs
//   Weights      eight inputs of kLanes outputs; prepare() makes them of twice four inputs
//   Inputs       eight inputs of kRows rows, block_size apart
//   Sum          of 32 bits; start() takes kRows corrections, rows() returns a vector for each row
//   Partial      what add() adds to: the sum itself, or where kGroup is not zero a narrower one,
//                zero at first, that holds kGroup inputs' products and goes into the sum by widen()
//   kZeroPoint8  of Vec: what prepare() adds to weights of eight bits
#pragma once

#include <float.h>
#include <math.h>
#include <string.h>

#include "matmul.h"

#if defined(_MSC_VER)
#define ONNXPORT_INLINE static __forceinline
#define ONNXPORT_ALONE static __declspec(noinline)
#else
#define ONNXPORT_INLINE static inline __attribute__((always_inline))
#define ONNXPORT_ALONE static __attribute__((noinline))
#endif

// Sums only stay in registers if every loop over them is gone.
#if defined(__clang__)
#define ONNXPORT_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define ONNXPORT_UNROLL _Pragma("GCC unroll 16")
#else
#define ONNXPORT_UNROLL
#endif

namespace onnxport {
namespace {

// Below it a block counts as zero: 127 over the largest magnitude must not overflow.
constexpr float kSmallest = 1e-36f;
constexpr int kVectors = kPanel / Vec::kLanes;
constexpr int64_t kChunkRows = 64;  // whose totals and quants of a strip stay in the L1 cache

// One block of one row.
ONNXPORT_INLINE void quantize_block(const MatMul& m, const float* x, int64_t at) {
  // Magnitudes compare like integers, and a NaN is then the largest of all.
  const float maximum = Vec::largest_magnitude(x, m.block_size);
  const bool usable = maximum >= kSmallest && maximum <= FLT_MAX;
  int8_t* quants = m.quants + at * m.block_size;
  int32_t sum = 0;
  if (usable)
    sum = Vec::round(x, m.block_size, 127.f / maximum, m.bits == 4 ? kEvenFirst : kInOrder, quants);
  else
    for (int64_t i = 0; i < m.block_size; i += 16) memset(quants + i, 0, 16);
  m.scales[at] = usable ? maximum / 127.f : maximum < kSmallest ? 0.f : NAN;
  m.corrections[at] = -sum * static_cast<int32_t>(m.bits == 4 ? 8 : Vec::kZeroPoint8);
}

void quantize(const MatMul& m, int64_t begin, int64_t end) {
  // What is beyond a row's last input, and the rows that fill up the last tile.
  float filled[kLargestBlock];
  for (int64_t row = begin; row < end; row++) {
    for (int64_t block = 0; block < num_blocks(m); block++) {
      const int64_t first = block * m.block_size, left = row < m.rows ? m.k - first : 0;
      const float* x = filled;
      if (left >= m.block_size) {
        x = m.input + row * m.k + first;
      } else {
        memset(filled, 0, sizeof filled);
        if (left > 0)
          memcpy(filled, m.input + row * m.k + first, static_cast<size_t>(left) * sizeof(float));
      }
      quantize_block(m, x, row_block(m, row, block));
    }
  }
}

// Sums of integer products become their share of the output.
ONNXPORT_INLINE Vec::Floats accumulate(Vec::Floats total, Vec::Ints sum, Vec::Floats row_scale,
                                       Vec::Floats scales) {
  return Vec::fma(Vec::mul(Vec::to_floats(sum), row_scale), scales, total);
}

// Weights of consecutive blocks of a panel: as they are packed, or Dot's Weights already.
struct Strip {
  int64_t begin, end;      // blocks
  const uint8_t* weights;  // of the first one
  const uint8_t* scales;
  int64_t weights_stride, scales_stride;  // bytes from block to block
};

// Reads eight inputs' packed weights of outputs from vector c on. Asks for those half a block or
// more ahead: the processor's own prefetching stops at the end of each page, and at the end of what
// it finds room to run ahead.
template <class Dot>
ONNXPORT_INLINE typename Dot::Weights read_packed(const uint8_t* weights, int c) {
  const uint8_t* first = weights + c * Vec::kLanes * 4;
  const bool is_line = c * Vec::kLanes % 16 == 0;
  if (is_line) Vec::prefetch(first + 2048);
  const Vec::Ints low = Vec::load_bytes(first);
  if (Dot::kBits == 4) return Dot::prepare(Vec::low_nibbles(low), Vec::high_nibbles(low));
  const uint8_t* second = first + kPanel * 4;
  if (is_line) Vec::prefetch(second + 2048);
  return Dot::prepare(low, Vec::load_bytes(second));
}

template <class Dot, bool kPrepared>
struct Source {
  using Weights = typename Dot::Weights;
  // Bytes from one vector of outputs to the next, and from eight inputs to the next.
  static constexpr int64_t kVector = kPrepared ? sizeof(Weights) : Vec::kLanes * 4;
  static constexpr int64_t kStep = kPrepared ? kVectors * sizeof(Weights) : kPanel * Dot::kBits;

  static inline Weights read(const uint8_t* weights, int c) {
    if constexpr (kPrepared)
      return reinterpret_cast<const Weights*>(weights)[c];
    else
      return read_packed<Dot>(weights, c);
  }
};

// Adds the products of `count` inputs. Few units keep their inputs in registers, many the weights.
template <class Dot, bool kPrepared, int kUnits, int kColumns, class Sum>
ONNXPORT_INLINE void add_products(const uint8_t* weights, const int8_t* quants, int64_t block_size,
                                  int64_t count, Sum (&sums)[kUnits][kColumns]) {
  using From = Source<Dot, kPrepared>;
  for (int64_t i = 0; i < count; i += 8, weights += From::kStep) {
    if constexpr (kUnits < kColumns) {
      typename Dot::Inputs x[kUnits];
      ONNXPORT_UNROLL
      for (int u = 0; u < kUnits; u++)
        x[u] = Dot::inputs(quants + u * Dot::kRows * block_size + i, block_size);
      ONNXPORT_UNROLL
      for (int c = 0; c < kColumns; c++) {
        const auto w = From::read(weights, c);
        ONNXPORT_UNROLL
        for (int u = 0; u < kUnits; u++) Dot::add(sums[u][c], w, x[u]);
      }
    } else {
      typename Dot::Weights w[kColumns];
      ONNXPORT_UNROLL
      for (int c = 0; c < kColumns; c++) w[c] = From::read(weights, c);
      ONNXPORT_UNROLL
      for (int u = 0; u < kUnits; u++) {
        const auto x = Dot::inputs(quants + u * Dot::kRows * block_size + i, block_size);
        ONNXPORT_UNROLL
        for (int c = 0; c < kColumns; c++) Dot::add(sums[u][c], w[c], x);
      }
    }
  }
}

template <class Dot, bool kPrepared, int kUnits, int kColumns>
ONNXPORT_INLINE void add_block(const uint8_t* weights, const int8_t* quants, int64_t block_size,
                               typename Dot::Sum (&sums)[kUnits][kColumns]) {
  if constexpr (Dot::kGroup == 0) {
    add_products<Dot, kPrepared>(weights, quants, block_size, block_size, sums);
  } else {
    const int64_t group = block_size < Dot::kGroup ? block_size : Dot::kGroup;
    for (int64_t i = 0; i < block_size; i += group) {
      typename Dot::Partial parts[kUnits][kColumns] = {};
      add_products<Dot, kPrepared>(weights, quants + i, block_size, group, parts);
      weights += group / 8 * Source<Dot, kPrepared>::kStep;
      ONNXPORT_UNROLL
      for (int u = 0; u < kUnits; u++) {
        ONNXPORT_UNROLL
        for (int c = 0; c < kColumns; c++) Dot::widen(sums[u][c], parts[u][c]);
      }
    }
  }
}

// Adds a strip's share to the totals [rows][kPanel] of kUnits units of rows, from a vector on.
template <class Dot, bool kPrepared, int kUnits, int kColumns>
ONNXPORT_ALONE void add_strip(const MatMul& m, const Strip& strip, int64_t row, int64_t vector, float* totals) {
  constexpr int kRows = kUnits * Dot::kRows;
  Vec::Floats total[kRows][kColumns];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kColumns; c++)
      total[r][c] = Vec::load(totals + r * kPanel + (vector + c) * Vec::kLanes);
  }
  const uint8_t* weights = strip.weights + vector * Source<Dot, kPrepared>::kVector;
  const uint8_t* block_scales = strip.scales;
  for (int64_t block = strip.begin; block < strip.end; block++) {
    const int64_t at = row_block(m, row, block);
    typename Dot::Sum sums[kUnits][kColumns];
    ONNXPORT_UNROLL
    for (int u = 0; u < kUnits; u++) {
      ONNXPORT_UNROLL
      for (int c = 0; c < kColumns; c++)
        sums[u][c] = Dot::start(m.corrections + at + u * Dot::kRows);
    }
    add_block<Dot, kPrepared>(weights, m.quants + at * m.block_size, m.block_size, sums);
    const float* scales = reinterpret_cast<const float*>(block_scales) + vector * Vec::kLanes;
    ONNXPORT_UNROLL
    for (int u = 0; u < kUnits; u++) {
      ONNXPORT_UNROLL
      for (int c = 0; c < kColumns; c++) {
        Vec::Ints rows[Dot::kRows];
        Dot::rows(sums[u][c], rows);
        ONNXPORT_UNROLL
        for (int i = 0; i < Dot::kRows; i++) {
          const int r = u * Dot::kRows + i;
          total[r][c] = accumulate(total[r][c], rows[i], Vec::set1(m.scales[at + r]),
                                   Vec::load(scales + c * Vec::kLanes));
        }
      }
    }
    weights += strip.weights_stride;
    block_scales += strip.scales_stride;
  }
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kColumns; c++)
      Vec::store(totals + r * kPanel + (vector + c) * Vec::kLanes, total[r][c]);
  }
}

template <class Dot, bool kPrepared, int kUnits = Dot::kMostUnits>
ONNXPORT_INLINE void add_units(const MatMul& m, const Strip& strip, int64_t row, int64_t units,
                               float* totals) {
  if constexpr (kUnits > 1) {
    if (units < kUnits) return add_units<Dot, kPrepared, kUnits - 1>(m, strip, row, units, totals);
  }
  constexpr int kColumns = Dot::columns(kPrepared ? Dot::kMostUnits : kUnits);
  for (int64_t vector = 0; vector < kVectors; vector += kColumns)
    add_strip<Dot, kPrepared, kUnits, kColumns>(m, strip, row, vector, totals);
}

// Adds a strip's share to the totals of rows, group by group; no group is part of two tiles.
template <class Dot, bool kPrepared>
void add_rows(const MatMul& m, const Strip& strip, int64_t row_begin, int64_t row_end,
              float* totals) {
  for (int64_t tile = row_begin; tile < row_end; tile += kRowTile) {
    const int64_t end = tile + kRowTile < row_end ? tile + kRowTile : row_end;
    int64_t units = ceil_div(end - tile, Dot::kRows);
    for (int64_t row = tile; units > 0; units -= Dot::kMostUnits) {
      add_units<Dot, kPrepared>(m, strip, row, units < Dot::kMostUnits ? units : Dot::kMostUnits,
                                totals + (row - row_begin) * kPanel);
      row += Dot::kMostUnits * Dot::kRows;
    }
  }
}

ONNXPORT_INLINE void store_panel(const MatMul& m, int64_t panel, int64_t row_begin,
                                 int64_t row_end, const float* totals) {
  const int64_t left = m.n - panel * kPanel;
  float* output = m.output + row_begin * m.n + panel * kPanel;
  for (int64_t row = row_begin; row < row_end; row++, output += m.n, totals += kPanel) {
    if (left >= kPanel)
      for (int v = 0; v < kVectors; v++)
        Vec::store(output + v * Vec::kLanes, Vec::load(totals + v * Vec::kLanes));
    else
      memcpy(output, totals, static_cast<size_t>(left) * sizeof(float));
  }
}

// Inputs whose weights are prepared at once.
constexpr int64_t kStripInputs = 128;

template <class Dot>
struct Prepared {
  typename Dot::Weights weights[kLargestBlock / 8 * kVectors];

  void fill(const MatMul& m, Strip& strip) {
    typename Dot::Weights* to = weights;
    for (int64_t block = strip.begin; block < strip.end; block++) {
      const uint8_t* from = strip.weights;
      for (int64_t i = 0; i < m.block_size; i += 8, from += Source<Dot, false>::kStep)
        for (int c = 0; c < kVectors; c++) *to++ = read_packed<Dot>(from, c);
      strip.weights += strip.weights_stride;
    }
    strip.weights = reinterpret_cast<const uint8_t*>(weights);
    strip.weights_stride = m.block_size / 8 * Source<Dot, true>::kStep;
  }
};

// One panel's outputs. Many rows prepare the weights once, a strip at a time.
template <class Dot>
void multiply_panel(const MatMul& m, int64_t panel, int64_t row_begin, int64_t row_end) {
  alignas(64) float totals[kChunkRows * kPanel];
  const int64_t blocks = num_blocks(m), rows = row_end - row_begin;
  const uint8_t* weights = m.weights + panel * panel_bytes(m);
  memset(totals, 0, static_cast<size_t>(ceil_div(rows, Dot::kRows) * Dot::kRows * kPanel) * 4);
  Strip strip{0, blocks, weights, weights + quant_bytes(m), block_bytes(m), block_bytes(m)};
  if (rows <= 2 * Dot::kMostUnits * Dot::kRows) {
    add_rows<Dot, false>(m, strip, row_begin, row_end, totals);
  } else {
    Prepared<Dot> prepared;
    const int64_t step = m.block_size < kStripInputs ? kStripInputs / m.block_size : 1;
    for (int64_t begin = 0; begin < blocks; begin += step) {
      const uint8_t* first = weights + begin * block_bytes(m);
      strip = {begin, begin + step < blocks ? begin + step : blocks, first,
               first + quant_bytes(m), block_bytes(m), block_bytes(m)};
      prepared.fill(m, strip);
      add_rows<Dot, true>(m, strip, row_begin, row_end, totals);
    }
  }
  store_panel(m, panel, row_begin, row_end, totals);
}

// How many rows a tile has: those of whole units, but a single row stays alone.
template <int kRows>
int64_t rows_of_tile(int64_t rows) {
  return rows == 1 ? 1 : rows < kRowTile ? ceil_div(rows, kRows) * kRows : kRowTile;
}

template <class Dot>
void multiply_panels(const MatMul& m, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                     int64_t row_end) {
  for (int64_t panel = panel_begin; panel < panel_end; panel++)
    for (int64_t row = row_begin; row < row_end; row += kChunkRows)
      multiply_panel<Dot>(m, panel, row, row + kChunkRows < row_end ? row + kChunkRows : row_end);
}

template <template <int> class Dots>
void multiply_dots(const MatMul& m, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                   int64_t row_end) {
  if (m.bits == 4)
    multiply_panels<Dots<4>>(m, panel_begin, panel_end, row_begin, row_end);
  else
    multiply_panels<Dots<8>>(m, panel_begin, panel_end, row_begin, row_end);
}

}  // namespace
}  // namespace onnxport
