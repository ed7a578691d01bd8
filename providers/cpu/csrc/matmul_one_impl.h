// One row's products: some panels side by side. Compiled once for each set.
//
// One row waits for memory. What brings it is the processor's own prefetching, which follows what is
// really read and runs further ahead on several streams than on one; and broadcasts are spared.
// Asking a short way ahead is what gets it across the ends of pages. The scales, a line of each block,
// are better not asked for.
#pragma once

#include "matmul_impl.h"

namespace onnxport {
namespace {

constexpr int kVectors = kPanel / Vec::kLanes;

// Adds a block's products of the row with the panels of the streams, `apart` bytes from one another.
template <class Dot>
ONNXPORT_INLINE void add_streams(const uint8_t* weights, int64_t apart, const int8_t* quants,
                                 int64_t block_size,
                                 typename Dot::Sum (&sums)[Vec::kStreams][kVectors]) {
  constexpr bool kWidens = Dot::kGroup != 0;
  const int64_t group = kWidens && Dot::kGroup < block_size ? Dot::kGroup : block_size;
  for (int64_t begin = 0; begin < block_size; begin += group) {
    typename Dot::Partial parts[Vec::kStreams][kVectors];
    ONNXPORT_UNROLL
    for (int s = 0; s < Vec::kStreams; s++) {
      ONNXPORT_UNROLL
      for (int c = 0; c < kVectors; c++)
        parts[s][c] = kWidens ? typename Dot::Partial() : sums[s][c];
    }
    int64_t i = begin;
    do {
      const auto x = Dot::inputs(quants + i, block_size);
      ONNXPORT_UNROLL
      for (int s = 0; s < Vec::kStreams; s++) {
        ONNXPORT_UNROLL
        for (int c = 0; c < kVectors; c++)
          Dot::add(parts[s][c], read_weights<Dot>(weights + s * apart, c, Vec::kStreamAhead), x);
      }
      weights += kPanel * Dot::kBits;
      i += 8;
    } while (i < begin + group);
    ONNXPORT_UNROLL
    for (int s = 0; s < Vec::kStreams; s++) {
      ONNXPORT_UNROLL
      for (int c = 0; c < kVectors; c++) {
        if constexpr (kWidens)
          Dot::widen(sums[s][c], parts[s][c]);
        else
          sums[s][c] = parts[s][c];
      }
    }
  }
}

// A row's outputs of a panel of each stream, `apart` panels from one another.
template <class Dot>
ONNXPORT_ALONE void multiply_streams(const MatMul& m, int64_t row, int64_t panel, int64_t apart,
                                 float* output) {
  Vec::Floats totals[Vec::kStreams][kVectors];
  ONNXPORT_UNROLL
  for (int s = 0; s < Vec::kStreams; s++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kVectors; c++) totals[s][c] = Vec::set1(0.f);
  }
  const int64_t apart_bytes = apart * panel_bytes(m), blocks = num_blocks(m);
  const uint8_t* weights = m.weights + panel * panel_bytes(m);
  for (int64_t block = 0; block < blocks; block++, weights += block_bytes(m)) {
    const int64_t at = row_block(m, row, block);
    typename Dot::Sum sums[Vec::kStreams][kVectors];
    ONNXPORT_UNROLL
    for (int s = 0; s < Vec::kStreams; s++) {
      ONNXPORT_UNROLL
      for (int c = 0; c < kVectors; c++) sums[s][c] = Dot::start(m.corrections + at);
      prefetch_zeros(m, panel + s * apart, block);
    }
    add_streams<Dot>(weights, apart_bytes, m.quants + at * m.block_size, m.block_size, sums);
    const Vec::Floats scale = Vec::set1(m.scales[at]);
    ONNXPORT_UNROLL
    for (int s = 0; s < Vec::kStreams; s++) {
      alignas(64) float converted[kPanel];
      const float* scales =
          read_scales(m, weights + s * apart_bytes + quant_bytes(m), 0, kPanel, converted);
      ONNXPORT_UNROLL
      for (int c = 0; c < kVectors; c++)
        totals[s][c] = accumulate(totals[s][c], sums[s][c], scale,
                                  Vec::load(scales + c * Vec::kLanes));
    }
  }
  ONNXPORT_UNROLL
  for (int s = 0; s < Vec::kStreams; s++) {
    const int64_t of_stream = panel + s * apart;
    float* to = output + s * apart * kPanel;
    store_outputs<kVectors>(to, m.n - of_stream * kPanel, totals[s]);
    finish_outputs(m, of_stream, row, to, 0, 1);
  }
}

// A part's outputs of its only row. Each stream is an equal share of the panels, from end to end.
template <class Dot>
void multiply_one(const MatMul& m, const Part& part) {
  const int64_t apart = (part.panel_end - part.panel_begin) / Vec::kStreams;
  for (int64_t i = 0; i < apart; i++)
    multiply_streams<Dot>(m, part.row_begin, part.panel_begin + i, apart, part.output + i * kPanel);
  Part left = part;
  left.panel_begin += Vec::kStreams * apart;
  left.output += Vec::kStreams * apart * kPanel;
  multiply_panels<Dot>(m, left);
}

// Whatever the number of rows.
template <template <Numbers> class Dots>
void multiply_dots_or_one(const MatMul& m, const Part& part) {
  if (m.rows > 1) return multiply_dots<Dots>(m, part);
  switch (numbers_of(m)) {
    case Numbers::kInt4: return multiply_one<Dots<Numbers::kInt4>>(m, part);
    case Numbers::kInt8: return multiply_one<Dots<Numbers::kInt8>>(m, part);
    case Numbers::kFp4: return multiply_one<Dots<Numbers::kFp4>>(m, part);
  }
}

}  // namespace
}  // namespace onnxport
