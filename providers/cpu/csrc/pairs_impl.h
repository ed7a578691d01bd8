// The register-blocked inner loops of the paired layout: products of pairs of bfloat16, which are
// added in float. Compiled once per instruction set.
#pragma once

#include "vectors_impl.h"

namespace {

// kRows queries [rows][head_size], in bfloat16, against kCols vectors of keys from `column` on:
// scores[r][column * width ...] for rows kChunk apart.
template <bool kAhead, int kRows, int kCols>
static inline void score_pairs(const float* queries, int64_t head_size,
                               const KeyVectors<PairedBFloat16>& vectors, int column,
                               float* scores) {
  Vec::T sum[kRows][kCols];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) sum[r][c] = Vec::set1(0.f);
  }
  const int64_t pairs = head_size / 2;
  for (int64_t d = 0; d < pairs; d++) {
    Vec::Pairs key[kCols];
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) {
      const uint16_t* from = vectors.key[column + c] + d * 2 * kTile;
      key[c] = Vec::load_pairs(from);
      if (kAhead) prefetch_ahead(from, vectors.ahead[column + c]);
    }
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Vec::Pairs query = Vec::set1_pair(queries + r * pairs + d);
      ONNXPORT_UNROLL
      for (int c = 0; c < kCols; c++) sum[r][c] = Vec::add_pairs(query, key[c], sum[r][c]);
    }
  }
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++)
      Vec::store(scores + r * kChunk + (column + c) * Vec::kWidth, sum[r][c]);
  }
}

// sums[r][0 .. kCols * width) = factor[r] * sums + weights[r] x values over tokens [first, last).
// Weights [rows][2 * kChunk] are bfloat16, zero for tokens of a tile outside [first, last). There the
// values may be anything, so that they are left out of the products, too.
template <bool kAhead, int kRows, int kCols>
static inline void value_pairs(const float* weights, const Tiles<PairedBFloat16>& tiles,
                               int64_t channel, int first, int last, const float* factor,
                               int64_t row, float* sums) {
  Vec::T sum[kRows][kCols];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    const Vec::T f = Vec::set1(factor[r]);
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++)
      sum[r][c] = Vec::mul(f, Vec::load(sums + r * row + channel + c * Vec::kWidth));
  }
  const auto add = [&](const uint16_t* value, int t, int64_t ahead, bool is_first, bool is_last) {
    Vec::Pairs x[kCols];
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) {
      x[c] = Vec::load_pairs(value + c * 2 * Vec::kWidth);
      if (kAhead) prefetch_ahead(value + c * 2 * Vec::kWidth, ahead);
      if (is_first || is_last) x[c] = Vec::one_of_pairs(x[c], is_first);
    }
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Vec::Pairs w = Vec::set1_pair(weights + r * kChunk + t / 2);
      ONNXPORT_UNROLL
      for (int c = 0; c < kCols; c++) sum[r][c] = Vec::add_pairs(w, x[c], sum[r][c]);
    }
  };
  for (int tile = first / kTile; tile * kTile < last; tile++) {
    const int base = tile * kTile;
    const int64_t stride = tiles.value_stride[tile], ahead = tiles.ahead[tile];
    const uint16_t* value = tiles.value[tile] + 2 * channel;
    if (first <= base && base + kTile <= last) {
      for (int t = base; t < base + kTile; t += 2, value += stride)
        add(value, t, ahead, false, false);
      continue;
    }
    const int from = first > base ? first / 2 * 2 : base;
    const int end = base + kTile < last ? base + kTile : last;
    value += (from - base) / 2 * stride;
    for (int t = from; t < end; t += 2, value += stride)
      add(value, t, ahead, t < first, t + 1 == last);
  }
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++)
      Vec::store(sums + r * row + channel + c * Vec::kWidth, sum[r][c]);
  }
}

}  // namespace
