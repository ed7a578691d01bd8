// Attention over an int8 cache in integers. Queries are rounded to int8 and a chunk's softmax weights
// to uint8, each row with a scale of its own, so that products are of bytes and their sums exact: on
// every instruction set the same, in any order. Against floats this takes half the instructions on
// AVX2, a quarter and less where products of bytes are added by one.
//
// AVX2 adds two products of a uint8 and an int8 in 16 bits. Keys, 128 added to each, are at most 255,
// so two neighbours of a query may come to 128 together; values are at most 127, so two neighbours
// among the weights to 258. The scales are chosen by sums of two, which is nearly eight bits where
// one alone is large. Compiled once per instruction set.
#pragma once

#include <math.h>

#include "vectors_impl.h"

namespace {

constexpr int32_t kKeyZeroPoint = 128;     // of keys as uint8
constexpr float kMostQueryPair = 127.f;    // before rounding, which may add one
constexpr float kMostWeightPair = 255.f;   // likewise; a single one is no more than that, either
constexpr float kSmallestPair = 1e-36f;    // below it, numbers count as zero

// Of the largest sum of two magnitudes: what to multiply with to make it `most`, and the inverse of
// that. Without a usable one numbers become zero, and their products NaN where it is not finite.
struct Rounding {
  float factor, scale;

  Rounding(uint32_t largest_bits, float most) {
    const float largest = bits_float(largest_bits);
    const bool finite = largest_bits < 0x7f800000u, usable = finite && largest >= kSmallestPair;
    factor = usable ? most / largest : 0.f;
    scale = usable ? largest / most : finite ? 0.f : bits_float(0x7fc00000u);
  }
};

// A query as query_floats() describes it: numbers, scale, and minus the zero point of the keys times
// the sum of the numbers.
static inline void round_query(const float* x, int64_t n, float* out) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; i += 2) {
    const uint32_t pair = float_bits(fabsf(x[i]) + fabsf(x[i + 1])) & 0x7fffffffu;
    largest = pair > largest ? pair : largest;
  }
  const Rounding rounding(largest, kMostQueryPair);
  int8_t numbers[kMaxLatentSize];
  int32_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    // zero times what is not finite is no number, which must not be converted
    const float number = rounding.factor > 0.f ? nearbyintf(x[i] * rounding.factor) : 0.f;
    numbers[i] = static_cast<int8_t>(number);
    sum += numbers[i];
  }
  const int32_t correction = -kKeyZeroPoint * sum;
  memcpy(out, numbers, static_cast<size_t>(n));
  out[n / 4] = rounding.scale;
  memcpy(out + n / 4 + 1, &correction, sizeof correction);
}

// kRows queries, query_floats apart, against kCols vectors of keys from `column` on:
// scores[r][column * width ...] for rows kChunk apart.
template <bool kAhead, int kRows, int kCols>
static inline void score_quads(const float* queries, int64_t head_size,
                               const KeyVectors<Int8>& vectors, int column, float* scores) {
  const int64_t quads = head_size / 4, row = quads + 2;
  Vec::Ints sum[kRows][kCols];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    const Vec::Ints correction = Vec::set1_int(queries + r * row + quads + 1);
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) sum[r][c] = correction;
  }
  ONNXPORT_TWICE
  for (int64_t d = 0; d < quads; d++) {
    Vec::Quads key[kCols];
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) {
      const int8_t* from = vectors.key[column + c] + d * 4 * kTile;
      key[c] = Vec::add_128(Vec::load_quads(from));
      if (kAhead) prefetch_ahead(from, vectors.ahead[column + c]);
    }
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Vec::Quads query = Vec::set1_quad(queries + r * row + d);
      ONNXPORT_UNROLL
      for (int c = 0; c < kCols; c++) sum[r][c] = Vec::add_quads(key[c], query, sum[r][c]);
    }
  }
  ONNXPORT_UNROLL
  for (int c = 0; c < kCols; c++) {
    const Vec::T key_scale = Vec::load(vectors.scale[column + c]);
    if (kAhead) prefetch_ahead(vectors.scale[column + c], vectors.ahead[column + c]);
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Vec::T scale = Vec::mul(key_scale, Vec::set1(queries[r * row + quads]));
      Vec::store(scores + r * kChunk + (column + c) * Vec::kWidth,
                 Vec::mul(Vec::to_floats(sum[r][c]), scale));
    }
  }
}

// Rounds a row's weights [begin, end) of a chunk, which are not negative, to as many bytes at the
// row's begin. Largest holds, lane by lane, their largest sums of two neighbours. Returns the scale.
static inline float round_weights(Vec::T largest, int begin, int end, float* weights) {
  const Rounding rounding(Vec::reduce_max_bits(largest), kMostWeightPair);
  const Vec::T factor = Vec::set1(rounding.factor);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(weights);  // behind what is still to be read
  for (int t = begin; t < end; t += Vec::kWidth)
    Vec::store_bytes(bytes + t, Vec::mul(Vec::load(weights + t), factor));
  return rounding.scale;
}

// sums[r][0 .. kCols * width) = factor[r] * sums + scale[r] * weights[r] x values over the tiles of
// tokens [first, last). Weights are bytes, kChunk floats from a row to the next, and zero for a token
// that a row does not see: there its value may be anything.
template <bool kAhead, int kRows, int kCols>
static inline void value_quads(const float* weights, const float* scale, const Tiles<Int8>& tiles,
                               int64_t channel, int first, int last, const float* factor,
                               int64_t row, float* sums) {
  Vec::Ints sum[kRows][kCols];
  const float zero = 0.f;  // the bits of an integer's zero, too
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) sum[r][c] = Vec::set1_int(&zero);
  }
  for (int tile = first / kTile; tile * kTile < last; tile++) {
    const int64_t stride = tiles.value_stride[tile], ahead = tiles.ahead[tile];
    const int8_t* value = tiles.value[tile] + 4 * channel;
    if (kAhead && channel == 0) prefetch_ahead(tiles.value_scale[tile], ahead);
    const float* of_tile = weights + tile * (kTile / 4);
    ONNXPORT_UNROLL
    for (int quad = 0; quad < kTile / 4; quad++, value += stride) {
      Vec::Quads x[kCols];
      ONNXPORT_UNROLL
      for (int c = 0; c < kCols; c++) {
        x[c] = Vec::load_quads(value + c * 4 * Vec::kWidth);
        if (kAhead) prefetch_ahead(value + c * 4 * Vec::kWidth, ahead);
      }
      ONNXPORT_UNROLL
      for (int r = 0; r < kRows; r++) {
        const Vec::Quads w = Vec::set1_quad(of_tile + r * kChunk + quad);
        ONNXPORT_UNROLL
        for (int c = 0; c < kCols; c++) sum[r][c] = Vec::add_quads(w, x[c], sum[r][c]);
      }
    }
  }
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    const Vec::T by = Vec::set1(factor[r]), scales = Vec::set1(scale[r]);
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) {
      float* to = sums + r * row + channel + c * Vec::kWidth;
      Vec::store(to, Vec::fma(scales, Vec::to_floats(sum[r][c]), Vec::mul(by, Vec::load(to))));
    }
  }
}

}  // namespace
