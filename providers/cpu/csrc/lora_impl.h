// What a LoRA adapter adds to a projection. Compiled once per instruction set.
//
// However many tokens and rows of A are held in registers at once, each number is made by the same
// additions in the same order, so a token's result does not depend on the others.
#pragma once

#include <string.h>

#include "micro_impl.h"

namespace {

constexpr int kLoraTokens = 4;                            // that share the loaded A and B
constexpr int kLoraRanks = 16;                            // whose factors are held at once
constexpr int kLoraRows = Vec::kMaxRows >= 8 ? 4 : 2;     // of A in registers, beside the tokens
constexpr int kLoraColumns = Vec::kMaxRows >= 8 ? 4 : 2;  // vectors of the output in registers
constexpr int kLoraAlone = 2 * Vec::kMaxRows;             // likewise, of a token alone

// How an adapter is stored.
struct LoraFloat {
  using Value = float;
  static inline Vec::T load(const float* p) { return Vec::load(p); }
};
struct LoraHalf {
  using Value = uint16_t;
  static inline Vec::T load(const uint16_t* p) { return Vec::load_half(p); }
};

// The first `count` of a vector, and zeros.
template <class Type>
static inline Vec::T load_some(const typename Type::Value* from, int64_t count) {
  typename Type::Value values[16] = {};
  memcpy(values, from, static_cast<size_t>(count) * sizeof(values[0]));
  return Type::load(values);
}

static inline void store_some(float* to, Vec::T x, int64_t count) {
  float values[16];
  Vec::store(values, x);
  memcpy(to, values, static_cast<size_t>(count) * sizeof(float));
}

// factors[t][r] = input[t] . a[r] for kTokens tokens and kRows rows of A.
template <class Type, int kTokens, int kRows>
static inline void lora_factors(const Lora& l, int64_t token, int64_t row, float* factors) {
  Vec::T sum[kTokens][kRows];
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) sum[t][r] = Vec::set1(0.f);
  }
  const float* input = l.input + token * l.depth;
  const auto* a = static_cast<const typename Type::Value*>(l.a) + row * l.depth;
  int64_t d = 0;
  for (; d + Vec::kWidth <= l.depth; d += Vec::kWidth) {
    Vec::T x[kTokens];
    ONNXPORT_UNROLL
    for (int t = 0; t < kTokens; t++) x[t] = Vec::load(input + t * l.depth + d);
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      // What the next rows need: each row is a short stretch, at whose end the processor's own
      // prefetching has to start again.
      if (kTokens == 1) prefetch_ahead(a + (kRows + r) * l.depth + d, 0);
      const Vec::T w = Type::load(a + r * l.depth + d);
      ONNXPORT_UNROLL
      for (int t = 0; t < kTokens; t++) sum[t][r] = Vec::fma(x[t], w, sum[t][r]);
    }
  }
  for (int t = 0; t < kTokens; t++)
    for (int r = 0; r < kRows; r++) {
      Vec::T s = sum[t][r];
      if (d < l.depth)
        s = Vec::fma(load_some<LoraFloat>(input + t * l.depth + d, l.depth - d),
                     load_some<Type>(a + r * l.depth + d, l.depth - d), s);
      factors[t * kLoraRanks + r] = Vec::reduce_add(s);
    }
}

// output[t] += factors[t] x b over kCols vectors of columns, for `ranks` rows of B.
template <class Type, int kTokens, int kCols>
static inline void lora_columns(const Lora& l, int64_t token, int64_t row, int64_t ranks,
                                const float* factors, int64_t column) {
  float* output = l.output + token * l.stride + column;
  const auto* b = static_cast<const typename Type::Value*>(l.b) + row * l.stride + column;
  Vec::T sum[kTokens][kCols];
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++)
      sum[t][c] = Vec::load(output + t * l.stride + c * Vec::kWidth);
  }
  for (int64_t r = 0; r < ranks; r++, b += l.stride) {
    Vec::T w[kCols];
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) {
      if (kTokens == 1) prefetch_ahead(b + (kCols + c) * Vec::kWidth, 0);
      w[c] = Type::load(b + c * Vec::kWidth);
    }
    ONNXPORT_UNROLL
    for (int t = 0; t < kTokens; t++) {
      const Vec::T factor = Vec::set1(factors[t * kLoraRanks + r]);
      ONNXPORT_UNROLL
      for (int c = 0; c < kCols; c++) sum[t][c] = Vec::fma(factor, w[c], sum[t][c]);
    }
  }
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++)
      Vec::store(output + t * l.stride + c * Vec::kWidth, sum[t][c]);
  }
}

// The columns behind the last whole vector.
template <class Type>
static inline void lora_rest(const Lora& l, int64_t token, int64_t row, int64_t ranks,
                             const float* factors, int64_t column) {
  const int64_t count = l.columns - column;
  float* output = l.output + token * l.stride + column;
  const auto* b = static_cast<const typename Type::Value*>(l.b) + row * l.stride + column;
  Vec::T sum = load_some<LoraFloat>(output, count);
  for (int64_t r = 0; r < ranks; r++)
    sum = Vec::fma(Vec::set1(factors[r]), load_some<Type>(b + r * l.stride, count), sum);
  store_some(output, sum, count);
}

template <class Type, int kTokens>
static inline void lora_tokens(const Lora& l, int64_t token) {
  constexpr int W = Vec::kWidth;
  float factors[kTokens * kLoraRanks];
  for (int64_t row = 0; row < l.rank; row += kLoraRanks) {
    const int64_t ranks = l.rank - row < kLoraRanks ? l.rank - row : kLoraRanks;
    int64_t r = 0;
    for (; r + kLoraRows <= ranks; r += kLoraRows)
      lora_factors<Type, kTokens, kLoraRows>(l, token, row + r, factors + r);
    for (; r < ranks; r++) lora_factors<Type, kTokens, 1>(l, token, row + r, factors + r);
    int64_t c = 0;
    if constexpr (kTokens == 1) {
      for (; c + kLoraAlone * W <= l.columns; c += kLoraAlone * W)
        lora_columns<Type, 1, kLoraAlone>(l, token, row, ranks, factors, c);
    }
    for (; c + kLoraColumns * W <= l.columns; c += kLoraColumns * W)
      lora_columns<Type, kTokens, kLoraColumns>(l, token, row, ranks, factors, c);
    for (; c + W <= l.columns; c += W)
      lora_columns<Type, kTokens, 1>(l, token, row, ranks, factors, c);
    if (c < l.columns)
      for (int t = 0; t < kTokens; t++)
        lora_rest<Type>(l, token + t, row, ranks, factors + t * kLoraRanks, c);
  }
}

template <class Type>
static void add_lora_of(const Lora& l) {
  int64_t token = 0;
  for (; token + kLoraTokens <= l.tokens; token += kLoraTokens)
    lora_tokens<Type, kLoraTokens>(l, token);
  for (; token < l.tokens; token++) lora_tokens<Type, 1>(l, token);
}

static void add_lora(const Lora& l) {
  l.is_half ? add_lora_of<LoraHalf>(l) : add_lora_of<LoraFloat>(l);
}

}  // namespace
