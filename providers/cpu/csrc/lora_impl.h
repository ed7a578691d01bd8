// What a LoRA adapter adds to a projection. Compiled once per instruction set.
//
// However many tokens and rows of A are held in registers at once, each number is made by the same
// additions in the same order, so a token's result does not depend on the others.
#pragma once

#include <string.h>

#include "micro_impl.h"

namespace {

constexpr int kLoraTokens = 4;                            // that share the loaded A and B
constexpr int kLoraRanks = 64;                            // whose factors are held at once
constexpr int kLoraRows = Vec::kMaxRows >= 8 ? 4 : 2;     // of A in registers, beside the tokens
constexpr int kLoraColumns = Vec::kMaxRows >= 8 ? 4 : 2;  // vectors of the output in registers
constexpr int kPanelVectors = static_cast<int>(kLoraPanel) / Vec::kWidth;

// Likewise of a token alone: whole panels, as many as it takes to hide what an addition waits for.
constexpr int kAloneRows = Vec::kMaxRows >= 8 ? 16 : 8;
constexpr int kAlonePanels = kPanelVectors < 8 ? 2 : 1;

// How far ahead of a token alone A and B are asked for: a projection of an adapter is too short a
// stretch for the processor to find out by itself in time.
constexpr int64_t kLoraAhead = 6144;  // bytes
constexpr int kLineBytes = 64;

// How an adapter is stored.
struct LoraFloat {
  using Value = float;
  static inline Vec::T load(const float* p) { return Vec::load(p); }
};
struct LoraHalf {
  using Value = uint16_t;
  static inline Vec::T load(const uint16_t* p) { return Vec::load_half(p); }
};
struct LoraInt8 {
  using Value = int8_t;
  static inline Vec::T load(const int8_t* p) { return Vec::load_int8(p); }
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

// Asks for what is read kLoraAhead bytes after one row's part of a panel, be it of another adapter.
template <class Value>
static inline void ask_ahead(const Lora& l, const Value* row) {
  const char* ahead = reinterpret_cast<const char*>(row) + kLoraAhead;
  ahead += ahead < l.end ? 0 : l.jump;
  constexpr int kBytes = static_cast<int>(kLoraPanel * sizeof(Value));
  for (int i = 0; i < kBytes; i += kLineBytes) prefetch(ahead + i);
}

// Where a column of one row of B lies; the row behind is kLoraPanel on.
template <class Type>
static inline const typename Type::Value* panel_of(const Lora& l, int64_t row, int64_t column) {
  return static_cast<const typename Type::Value*>(l.b) +
         (column / kLoraPanel * l.rank + row) * kLoraPanel + column % kLoraPanel;
}

// factors[t][r] = scales[r] * (input[t] . a[r]) for kTokens tokens and kRows rows of A.
template <class Type, int kTokens, int kRows>
static inline void lora_factors(const Lora& l, int64_t token, int64_t row, float* factors) {
  Vec::T sum[kTokens][kRows];
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) sum[t][r] = Vec::set1(0.f);
  }
  const float* input = l.input + token * l.depth;
  const auto* a = static_cast<const typename Type::Value*>(l.a) + row * kLoraPanel;
  const int64_t whole = l.depth / Vec::kWidth * Vec::kWidth;
  for (int64_t d = 0; d < whole; d += kLoraPanel, a += l.rank * kLoraPanel) {
    if (kTokens == 1)
      for (int r = 0; r < kRows; r++) ask_ahead(l, a + r * kLoraPanel);
    const int64_t count = whole - d < kLoraPanel ? whole - d : kLoraPanel;
    for (int64_t i = 0; i < count; i += Vec::kWidth) {
      Vec::T x[kTokens];
      ONNXPORT_UNROLL
      for (int t = 0; t < kTokens; t++) x[t] = Vec::load(input + t * l.depth + d + i);
      ONNXPORT_UNROLL
      for (int r = 0; r < kRows; r++) {
        const Vec::T w = Type::load(a + r * kLoraPanel + i);
        ONNXPORT_UNROLL
        for (int t = 0; t < kTokens; t++) sum[t][r] = Vec::fma(x[t], w, sum[t][r]);
      }
    }
  }
  const int64_t rest = l.depth - whole;
  if (rest && whole % kLoraPanel) a -= l.rank * kLoraPanel - whole % kLoraPanel;
  for (int t = 0; t < kTokens; t++)
    for (int r = 0; r < kRows; r++) {
      Vec::T s = sum[t][r];
      if (rest)
        s = Vec::fma(load_some<LoraFloat>(input + t * l.depth + whole, rest),
                     load_some<Type>(a + r * kLoraPanel, rest), s);
      const float factor = Vec::reduce_add(s);
      factors[t * kLoraRanks + r] = l.scales ? factor * l.scales[row + r] : factor;
    }
}

// Whether the output holds what is to be added to when this row of B is the first one.
static inline bool is_sum(const Lora& l, int64_t row) { return l.is_added || row > 0; }

// output[t] += factors[t] x b over kCols vectors of each of kPanels panels, for `ranks` rows of B.
template <class Type, int kTokens, int kPanels, int kCols>
static inline void lora_columns(const Lora& l, int64_t token, int64_t row, int64_t ranks,
                                const float* factors, int64_t column) {
  static_assert(kPanels == 1 || kCols == kPanelVectors, "several panels are whole");
  constexpr int kAll = kPanels * kCols;
  float* output = l.output + token * l.stride + column;
  const auto* b = panel_of<Type>(l, row, column);
  Vec::T sum[kTokens][kAll];
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kAll; c++)
      sum[t][c] = is_sum(l, row) ? Vec::load(output + t * l.stride + c * Vec::kWidth)
                                 : Vec::set1(0.f);
  }
  for (int64_t r = 0; r < ranks; r++, b += kLoraPanel) {
    Vec::T w[kAll];
    ONNXPORT_UNROLL
    for (int p = 0; p < kPanels; p++) {
      if (kTokens == 1 && kCols == kPanelVectors) ask_ahead(l, b + p * l.rank * kLoraPanel);
      ONNXPORT_UNROLL
      for (int c = 0; c < kCols; c++)
        w[p * kCols + c] = Type::load(b + p * l.rank * kLoraPanel + c * Vec::kWidth);
    }
    ONNXPORT_UNROLL
    for (int t = 0; t < kTokens; t++) {
      const Vec::T factor = Vec::set1(factors[t * kLoraRanks + r]);
      ONNXPORT_UNROLL
      for (int c = 0; c < kAll; c++) sum[t][c] = Vec::fma(factor, w[c], sum[t][c]);
    }
  }
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kAll; c++) Vec::store(output + t * l.stride + c * Vec::kWidth, sum[t][c]);
  }
}

// The columns behind the last whole vector.
template <class Type>
static inline void lora_rest(const Lora& l, int64_t token, int64_t row, int64_t ranks,
                             const float* factors, int64_t column) {
  const int64_t count = l.columns - column;
  float* output = l.output + token * l.stride + column;
  const auto* b = panel_of<Type>(l, row, column);
  Vec::T sum = is_sum(l, row) ? load_some<LoraFloat>(output, count) : Vec::set1(0.f);
  for (int64_t r = 0; r < ranks; r++)
    sum = Vec::fma(Vec::set1(factors[r]), load_some<Type>(b + r * kLoraPanel, count), sum);
  store_some(output, sum, count);
}

template <class Type, int kTokens>
static inline void lora_tokens(const Lora& l, int64_t token) {
  constexpr int W = Vec::kWidth;
  float factors[kTokens * kLoraRanks];
  int64_t row = 0;
  do {  // once without a rank, too: the output may have to be set
    const int64_t ranks = l.rank - row < kLoraRanks ? l.rank - row : kLoraRanks;
    int64_t r = 0, c = 0;
    if constexpr (kTokens == 1) {
      for (; r + kAloneRows <= ranks; r += kAloneRows)
        lora_factors<Type, 1, kAloneRows>(l, token, row + r, factors + r);
      for (; r + kAloneRows / 2 <= ranks; r += kAloneRows / 2)
        lora_factors<Type, 1, kAloneRows / 2>(l, token, row + r, factors + r);
    }
    for (; r + kLoraRows <= ranks; r += kLoraRows)
      lora_factors<Type, kTokens, kLoraRows>(l, token, row + r, factors + r);
    for (; r < ranks; r++) lora_factors<Type, kTokens, 1>(l, token, row + r, factors + r);
    if constexpr (kTokens == 1) {
      for (; c + kAlonePanels * kLoraPanel <= l.columns; c += kAlonePanels * kLoraPanel)
        lora_columns<Type, 1, kAlonePanels, kPanelVectors>(l, token, row, ranks, factors, c);
    }
    for (; c + kLoraColumns * W <= l.columns; c += kLoraColumns * W)
      lora_columns<Type, kTokens, 1, kLoraColumns>(l, token, row, ranks, factors, c);
    for (; c + W <= l.columns; c += W)
      lora_columns<Type, kTokens, 1, 1>(l, token, row, ranks, factors, c);
    if (c < l.columns)
      for (int t = 0; t < kTokens; t++)
        lora_rest<Type>(l, token + t, row, ranks, factors + t * kLoraRanks, c);
    row += kLoraRanks;
  } while (row < l.rank);
}

template <class Type>
static void add_lora_of(const Lora& l) {
  int64_t token = 0;
  for (; token + kLoraTokens <= l.tokens; token += kLoraTokens)
    lora_tokens<Type, kLoraTokens>(l, token);
  for (; token < l.tokens; token++) lora_tokens<Type, 1>(l, token);
}

static void add_lora(const Lora& l) {
  switch (l.type) {
    case kLoraFloat: return add_lora_of<LoraFloat>(l);
    case kLoraHalf: return add_lora_of<LoraHalf>(l);
    case kLoraInt8: return add_lora_of<LoraInt8>(l);
  }
}

}  // namespace
