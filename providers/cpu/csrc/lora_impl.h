// What a LoRA adapter adds to a projection. Compiled once per instruction set.
//
// However many tokens and rows of A are held in registers at once, each number is made by the same
// additions in the same order, so a token's result does not depend on the others.
#pragma once

#include <string.h>

#include "micro_impl.h"

namespace {

constexpr int kLoraTokens = 4;                            // that share the loaded A and B
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

// Of a row's part of a panel.
template <class Type>
constexpr int64_t kRowBytes = kLoraPanel * static_cast<int64_t>(sizeof(typename Type::Value));

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

// Asks for kBytes that are read kLoraAhead bytes after others, be they of another adapter.
template <int64_t kBytes, class Call>
static inline void ask_ahead(const Call& l, const void* others) {
  if (!l.end) return;
  const char* ahead = static_cast<const char*>(others) + kLoraAhead;
  ahead += ahead < l.end ? 0 : l.jump;
  for (int64_t i = 0; i < kBytes; i += kLineBytes) prefetch(ahead + i);
}

// Where a column of the first row of B lies; the row behind is kLoraPanel on.
template <class Type>
static inline const typename Type::Value* panel_of(const LoraExpand& l, int64_t column) {
  return static_cast<const typename Type::Value*>(l.b) + column / kLoraPanel * l.rank * kLoraPanel +
         column % kLoraPanel;
}

// factors[t][r] = input[t] . a[r] for kTokens tokens and kRows rows of A.
template <class Type, int kTokens, int kRows>
static inline void lora_factors(const LoraShrink& l, int64_t token, int64_t row) {
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
      for (int r = 0; r < kRows; r++) ask_ahead<kRowBytes<Type>>(l, a + r * kLoraPanel);
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
      l.factors[(token + t) * l.stride + row + r] = Vec::reduce_add(s);
    }
}

template <class Type, int kTokens>
static inline void shrink_tokens(const LoraShrink& l, int64_t token) {
  int64_t row = 0;
  if constexpr (kTokens == 1) {
    for (; row + kAloneRows <= l.rank; row += kAloneRows)
      lora_factors<Type, 1, kAloneRows>(l, token, row);
    for (; row + kAloneRows / 2 <= l.rank; row += kAloneRows / 2)
      lora_factors<Type, 1, kAloneRows / 2>(l, token, row);
  }
  for (; row + kLoraRows <= l.rank; row += kLoraRows)
    lora_factors<Type, kTokens, kLoraRows>(l, token, row);
  for (; row < l.rank; row++) lora_factors<Type, kTokens, 1>(l, token, row);
}

// output[t] (+)= factors[t] x b over kCols vectors of each of kPanels panels.
template <class Type, int kTokens, int kPanels, int kCols>
static inline void lora_columns(const LoraExpand& l, int64_t token, int64_t column) {
  static_assert(kPanels == 1 || kCols == kPanelVectors, "several panels are whole");
  constexpr int kAll = kPanels * kCols;
  float* output = l.output + token * l.stride + column - l.column_begin;
  const float* factors = l.factors + token * l.factor_stride;
  const auto* b = panel_of<Type>(l, column);
  Vec::T sum[kTokens][kAll];
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kAll; c++) sum[t][c] = Vec::set1(0.f);
  }
  for (int64_t r = 0; r < l.rank; r++, b += kLoraPanel) {
    Vec::T w[kAll];
    ONNXPORT_UNROLL
    for (int p = 0; p < kPanels; p++) {
      if (kTokens == 1 && kCols == kPanelVectors)
        ask_ahead<kRowBytes<Type>>(l, b + p * l.rank * kLoraPanel);
      ONNXPORT_UNROLL
      for (int c = 0; c < kCols; c++)
        w[p * kCols + c] = Type::load(b + p * l.rank * kLoraPanel + c * Vec::kWidth);
    }
    ONNXPORT_UNROLL
    for (int t = 0; t < kTokens; t++) {
      const Vec::T factor = Vec::set1(factors[t * l.factor_stride + r]);
      ONNXPORT_UNROLL
      for (int c = 0; c < kAll; c++) sum[t][c] = Vec::fma(factor, w[c], sum[t][c]);
    }
  }
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kAll; c++) {
      float* to = output + t * l.stride + c * Vec::kWidth;
      Vec::store(to, l.is_added ? Vec::add(Vec::load(to), sum[t][c]) : sum[t][c]);
    }
  }
}

// Fewer columns than a vector has.
template <class Type>
static inline void lora_rest(const LoraExpand& l, int64_t token, int64_t column, int64_t count) {
  float* output = l.output + token * l.stride + column - l.column_begin;
  const float* factors = l.factors + token * l.factor_stride;
  const auto* b = panel_of<Type>(l, column);
  Vec::T sum = Vec::set1(0.f);
  for (int64_t r = 0; r < l.rank; r++)
    sum = Vec::fma(Vec::set1(factors[r]), load_some<Type>(b + r * kLoraPanel, count), sum);
  if (l.is_added) sum = Vec::add(load_some<LoraFloat>(output, count), sum);
  store_some(output, sum, count);
}

// Columns [column, end) of one panel.
template <class Type, int kTokens>
static inline void expand_panel(const LoraExpand& l, int64_t token, int64_t column, int64_t end) {
  constexpr int W = Vec::kWidth;
  for (; column + kLoraColumns * W <= end; column += kLoraColumns * W)
    lora_columns<Type, kTokens, 1, kLoraColumns>(l, token, column);
  for (; column + W <= end; column += W) lora_columns<Type, kTokens, 1, 1>(l, token, column);
  if (column < end)
    for (int t = 0; t < kTokens; t++) lora_rest<Type>(l, token + t, column, end - column);
}

template <class Type, int kTokens>
static inline void expand_tokens(const LoraExpand& l, int64_t token) {
  for (int64_t column = l.column_begin; column < l.column_end;) {
    if constexpr (kTokens == 1) {
      constexpr int64_t kSeveral = kAlonePanels * kLoraPanel;
      if (column % kLoraPanel == 0 && column + kSeveral <= l.column_end) {
        lora_columns<Type, 1, kAlonePanels, kPanelVectors>(l, token, column);
        column += kSeveral;
        continue;
      }
    }
    const int64_t next = (column / kLoraPanel + 1) * kLoraPanel;
    const int64_t end = next < l.column_end ? next : l.column_end;
    expand_panel<Type, kTokens>(l, token, column, end);
    column = end;
  }
}

template <class Type>
static void shrink_of(const LoraShrink& l) {
  int64_t token = 0;
  for (; token + kLoraTokens <= l.tokens; token += kLoraTokens)
    shrink_tokens<Type, kLoraTokens>(l, token);
  for (; token < l.tokens; token++) shrink_tokens<Type, 1>(l, token);
}

template <class Type>
static void expand_of(const LoraExpand& l) {
  int64_t token = 0;
  for (; token + kLoraTokens <= l.tokens; token += kLoraTokens)
    expand_tokens<Type, kLoraTokens>(l, token);
  for (; token < l.tokens; token++) expand_tokens<Type, 1>(l, token);
}

// Tokens' products with kVectors vectors of B in int4, from a column on: all of one panel.
template <int kTokens, int kVectors>
static inline void int4_products(const LoraExpand& l, int64_t token, int64_t column,
                                 Vec::T (&product)[kTokens][kVectors]) {
  constexpr int64_t kQuad = 4;
  const int64_t quads = lora_int4_factors(l.rank) - 2, in_panel = column % kLoraPanel;
  const auto* panel =
      static_cast<const int8_t*>(l.b) + column / kLoraPanel * lora_int4_panel(l.rank);
  const int8_t* b = panel + kLoraPanel + in_panel * kQuad;
  const float* factors = l.factors + token * l.factor_stride;
  Vec::Ints sum[kTokens][kVectors];
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    const Vec::Ints correction = Vec::set1_int(factors + t * l.factor_stride + quads + 1);
    ONNXPORT_UNROLL
    for (int c = 0; c < kVectors; c++) sum[t][c] = correction;
  }
  if (kTokens == 1) ask_ahead<kLoraPanel>(l, panel);
  for (int64_t q = 0; q < quads; q += 2, b += kQuad * kLoraPanel) {
    if (kTokens == 1) ask_ahead<kQuad * kLoraPanel>(l, b);
    Vec::Quads low[kVectors], high[kVectors];
    ONNXPORT_UNROLL
    for (int c = 0; c < kVectors; c++) {
      const Vec::Quads both = Vec::load_quads(b + c * kQuad * Vec::kWidth);
      low[c] = Vec::low_halves(both);
      high[c] = Vec::high_halves(both);
    }
    ONNXPORT_UNROLL
    for (int t = 0; t < kTokens; t++) {
      const float* own = factors + t * l.factor_stride + q;
      const Vec::Quads first = Vec::set1_quad(own), second = Vec::set1_quad(own + 1);
      ONNXPORT_UNROLL
      for (int c = 0; c < kVectors; c++) {
        sum[t][c] = Vec::add_quads(low[c], first, sum[t][c]);
        sum[t][c] = Vec::add_quads(high[c], second, sum[t][c]);
      }
    }
  }
  ONNXPORT_UNROLL
  for (int c = 0; c < kVectors; c++) {
    const Vec::T scales = Vec::load_int8(panel + in_panel + c * Vec::kWidth);
    ONNXPORT_UNROLL
    for (int t = 0; t < kTokens; t++) {
      const Vec::T scale = Vec::set1(factors[t * l.factor_stride + quads]);
      product[t][c] = Vec::mul(Vec::to_floats(sum[t][c]), Vec::mul(scales, scale));
    }
  }
}

template <int kTokens, int kVectors>
static inline void int4_columns(const LoraExpand& l, int64_t token, int64_t column) {
  Vec::T product[kTokens][kVectors];
  int4_products<kTokens, kVectors>(l, token, column, product);
  float* output = l.output + token * l.stride + column - l.column_begin;
  ONNXPORT_UNROLL
  for (int t = 0; t < kTokens; t++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kVectors; c++) {
      float* to = output + t * l.stride + c * Vec::kWidth;
      Vec::store(to, l.is_added ? Vec::add(Vec::load(to), product[t][c]) : product[t][c]);
    }
  }
}

// Columns [column, end) of one vector.
static inline void int4_rest(const LoraExpand& l, int64_t token, int64_t column, int64_t end) {
  const int64_t first = column / Vec::kWidth * Vec::kWidth;
  Vec::T product[1][1];
  int4_products<1, 1>(l, token, first, product);
  float lanes[16];
  Vec::store(lanes, product[0][0]);
  float* output = l.output + token * l.stride + column - l.column_begin;
  for (int64_t i = 0; i < end - column; i++)
    output[i] = (l.is_added ? output[i] : 0.f) + lanes[column - first + i];
}

template <int kTokens>
static inline void int4_tokens(const LoraExpand& l, int64_t token) {
  constexpr int W = Vec::kWidth;
  constexpr int kMost = kPanelVectors < 8 ? kPanelVectors : 8;
  constexpr int kVectors = kTokens == 1 ? kMost : kLoraColumns;
  for (int64_t column = l.column_begin; column < l.column_end;) {
    if (column % (kVectors * W) == 0 && column + kVectors * W <= l.column_end) {
      int4_columns<kTokens, kVectors>(l, token, column);
      column += kVectors * W;
    } else if (column % W == 0 && column + W <= l.column_end) {
      int4_columns<kTokens, 1>(l, token, column);
      column += W;
    } else {
      const int64_t next = (column / W + 1) * W, end = next < l.column_end ? next : l.column_end;
      for (int t = 0; t < kTokens; t++) int4_rest(l, token + t, column, end);
      column = end;
    }
  }
}

static void expand_int4(const LoraExpand& l) {
  if (l.rank == 0) return expand_of<LoraInt8>(l);  // nobody's factors: zeros are set
  int64_t token = 0;
  for (; token + kLoraTokens <= l.tokens; token += kLoraTokens) int4_tokens<kLoraTokens>(l, token);
  for (; token < l.tokens; token++) int4_tokens<1>(l, token);
}

static void lora_shrink(const LoraShrink& l) {
  switch (l.type) {
    case kLoraFloat: return shrink_of<LoraFloat>(l);
    case kLoraHalf: return shrink_of<LoraHalf>(l);
    case kLoraInt8:
    case kLoraInt4: return;  // nobody asks: lora.cpp multiplies these as products
  }
}

static void lora_expand(const LoraExpand& l) {
  switch (l.type) {
    case kLoraFloat: return expand_of<LoraFloat>(l);
    case kLoraHalf: return expand_of<LoraHalf>(l);
    case kLoraInt8: return expand_of<LoraInt8>(l);
    case kLoraInt4: return expand_int4(l);
  }
}

}  // namespace
