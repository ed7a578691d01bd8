// The register-blocked inner loops: scores = queries x keys, value sums, and the online softmax
// between them. Compiled once per instruction set.
#pragma once

#include "pairs_impl.h"
#include "quads_impl.h"

namespace {

constexpr float kHidden = -1e30f;  // below every logit, and no NaN when two are subtracted
// Rows whose logits become weights together: many independent chains of operations.
constexpr int kScoreRows = 4 * Vec::kMaxRows;
static_assert(kScoreRows <= kMostScoreRows && kScoreRows % Vec::kWidth == 0, "see softmax()");

// sum[r][c] += factors[r * row] * operand(c). What is kept in registers meanwhile is what there is
// less of: three rows and four columns would need more than AVX2's sixteen the other way round.
template <int kRows, int kCols, class Operand>
static inline void add_products(const float* factors, int64_t row, const Operand& operand,
                                Vec::T (&sum)[kRows][kCols]) {
  if constexpr (kRows < kCols) {
    Vec::T factor[kRows];
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) factor[r] = Vec::set1(factors[r * row]);
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) {
      const Vec::T x = operand(c);
      ONNXPORT_UNROLL
      for (int r = 0; r < kRows; r++) sum[r][c] = Vec::fma(factor[r], x, sum[r][c]);
    }
  } else {
    Vec::T x[kCols];
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) x[c] = operand(c);
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Vec::T factor = Vec::set1(factors[r * row]);
      ONNXPORT_UNROLL
      for (int c = 0; c < kCols; c++) sum[r][c] = Vec::fma(factor, x[c], sum[r][c]);
    }
  }
}

// kRows queries against kCols vectors of keys from `column` on: scores[r][column * width ...] for
// rows kChunk apart.
template <class Type, bool kAhead, int kRows, int kCols>
static inline void score_block(const float* queries, int64_t head_size,
                               const KeyVectors<Type>& vectors, int column, float* scores) {
  Vec::T sum[kRows][kCols];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++) sum[r][c] = Vec::set1(0.f);
  }
  ONNXPORT_TWICE
  for (int64_t d = 0; d < head_size; d++) {
    const auto key = [&](int c) {
      const typename Type::Element* from = vectors.key[column + c] + d * kTile;
      if (kAhead) prefetch_ahead(from, vectors.ahead[column + c]);
      return Type::load(from);
    };
    add_products(queries + d, head_size, key, sum);
  }
  ONNXPORT_UNROLL
  for (int c = 0; c < kCols; c++) {
    float* to = scores + (column + c) * Vec::kWidth;
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) Vec::store(to + r * kChunk, sum[r][c]);
  }
}

template <class Type, bool kAhead, int kRows, int kCols>
static inline void score_columns(const float* queries, int64_t head_size,
                                 const KeyVectors<Type>& vectors, int column, float* scores) {
  if constexpr (has_scales<Type>())
    score_quads<kAhead, kRows, kCols>(queries, head_size, vectors, column, scores);
  else if constexpr (is_paired<Type>())
    score_pairs<kAhead, kRows, kCols>(queries, head_size, vectors, column, scores);
  else
    score_block<Type, kAhead, kRows, kCols>(queries, head_size, vectors, column, scores);
}

// Rows whose products go together.
template <class Type>
constexpr int most_rows() {
  return has_scales<Type>() ? Vec::kQuadRows : Vec::kMaxRows;
}

// Few rows leave registers for more columns, which hide the latency of the multiply-add.
template <class Type, int kRows>
constexpr int columns() {
  if (has_scales<Type>())
    return 4 * kRows <= Vec::kQuadSums ? 4 : 2 * kRows <= Vec::kQuadSums ? 2 : 1;
  return kRows * 2 <= most_rows<Type>() ? 2 * Vec::kColumns : Vec::kColumns;
}

template <class Type, bool kAhead, int kRows>
static inline void score_tiles(const float* queries, int64_t head_size, const Tiles<Type>& tiles,
                               int first, int last, float* scores) {
  KeyVectors<Type> vectors;
  for (int i = first; i < last; i++)
    for (int v = 0; v < kVecsPerTile; v++) {
      vectors.key[i * kVecsPerTile + v] =
          tiles.key[i] + v * Vec::kWidth * neighbours<Type>();
      if (has_scales<Type>())
        vectors.scale[i * kVecsPerTile + v] = tiles.key_scale[i] + v * Vec::kWidth;
      if (kAhead) vectors.ahead[i * kVecsPerTile + v] = tiles.ahead[i];
    }
  constexpr int kCols = columns<Type, kRows>();
  int c = first * kVecsPerTile;
  const int end = last * kVecsPerTile;
  for (; c + kCols <= end; c += kCols)
    score_columns<Type, kAhead, kRows, kCols>(queries, head_size, vectors, c, scores);
  if constexpr (kCols > 2) {
    for (; c + 2 <= end; c += 2)
      score_columns<Type, kAhead, kRows, 2>(queries, head_size, vectors, c, scores);
  }
  for (; c < end; c++)
    score_columns<Type, kAhead, kRows, 1>(queries, head_size, vectors, c, scores);
}

// sums[r][0 .. kCols * width) = factor[r] * sums + weights[r] x values over tokens [first, last).
template <class Type, bool kAhead, int kRows, int kCols>
static inline void value_block(const float* weights, const Tiles<Type>& tiles, int64_t channel,
                               int first, int last, const float* factor, int64_t row,
                               float* sums) {
  Vec::T sum[kRows][kCols];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    const Vec::T f = Vec::set1(factor[r]);
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++)
      sum[r][c] = Vec::mul(f, Vec::load(sums + r * row + channel + c * Vec::kWidth));
  }
  for (int t = first; t < last;) {
    const int tile = t / kTile;
    const int end = (tile + 1) * kTile < last ? (tile + 1) * kTile : last;
    const int64_t stride = tiles.value_stride[tile];
    const typename Type::Element* value = tiles.value[tile] + (t % kTile) * stride + channel;
    for (; t < end; t++, value += stride) {
      const auto channels = [&](int c) {
        if (kAhead) prefetch_ahead(value + c * Vec::kWidth, tiles.ahead[tile]);
        return Type::load(value + c * Vec::kWidth);
      };
      add_products(weights + t, kChunk, channels, sum);
    }
  }
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCols; c++)
      Vec::store(sums + r * row + channel + c * Vec::kWidth, sum[r][c]);
  }
}

// Weights are multiplied with scale where Type has scales; else it is not read.
template <class Type, bool kAhead, int kRows, int kCols>
static inline void value_columns(const float* weights, const float* scale, const Tiles<Type>& tiles,
                                 int64_t channel, int first, int last, const float* factor,
                                 int64_t row, float* sums) {
  if constexpr (has_scales<Type>())
    value_quads<kAhead, kRows, kCols>(weights, scale, tiles, channel, first, last, factor, row,
                                      sums);
  else if constexpr (is_paired<Type>())
    value_pairs<kAhead, kRows, kCols>(weights, tiles, channel, first, last, factor, row, sums);
  else
    value_block<Type, kAhead, kRows, kCols>(weights, tiles, channel, first, last, factor, row, sums);
}

template <class Type, bool kAhead, int kRows>
static inline void add_values(const float* weights, const float* scale, const Tiles<Type>& tiles,
                              int64_t head_size, int first, int last, const float* factor,
                              int64_t row, float* sums) {
  constexpr int kCols = columns<Type, kRows>();
  constexpr int W = Vec::kWidth;
  int64_t d = 0;
  for (; d + kCols * W <= head_size; d += kCols * W)
    value_columns<Type, kAhead, kRows, kCols>(weights, scale, tiles, d, first, last, factor, row,
                                             sums);
  if constexpr (kCols > 2) {
    for (; d + 2 * W <= head_size; d += 2 * W)
      value_columns<Type, kAhead, kRows, 2>(weights, scale, tiles, d, first, last, factor, row, sums);
  }
  for (; d < head_size; d += W)
    value_columns<Type, kAhead, kRows, 1>(weights, scale, tiles, d, first, last, factor, row, sums);
}

// tanh to a few units in the last place: the exponential form cancels near zero, where the series
// takes over.
static inline Vec::T tanh_of(Vec::T x) {
  const Vec::T one = Vec::set1(1.f), zero = Vec::set1(0.f);
  const Vec::T magnitude = Vec::max(Vec::sub(zero, x), x);
  const Vec::T bounded = Vec::less(magnitude, Vec::set1(12.f), magnitude, Vec::set1(12.f));
  const Vec::T e = Vec::exp2(Vec::mul(bounded, Vec::set1(2.f * 1.44269504f)));
  const Vec::T far = Vec::sub(one, Vec::div(Vec::set1(2.f), Vec::add(e, one)));
  const Vec::T s = Vec::mul(x, x);
  Vec::T p = Vec::set1(21844.f / 6081075.f);
  p = Vec::fma(p, s, Vec::set1(-1382.f / 155925.f));
  p = Vec::fma(p, s, Vec::set1(62.f / 2835.f));
  p = Vec::fma(p, s, Vec::set1(-17.f / 315.f));
  p = Vec::fma(p, s, Vec::set1(2.f / 15.f));
  p = Vec::fma(p, s, Vec::set1(-1.f / 3.f));
  const Vec::T near = Vec::fma(Vec::mul(p, s), x, x);
  const Vec::T signed_far = Vec::less(x, zero, Vec::sub(zero, far), far);
  return Vec::less(Vec::set1(0.5f), magnitude, signed_far, near);  // of no number: no number
}

// Of a chunk, the tokens [first, last) that a row sees, of those [begin, end) that its logits are
// there of: whole tiles, or none.
struct Sight {
  int first, last, begin, end;

  bool is_whole() const { return first <= 0 && last >= kChunk && begin == 0 && end == kChunk; }
};

// The largest of a row's logits, which are capped and, where the row does not see a token, hidden.
template <bool kIsWhole>
static inline float largest(const Sight& sight, float softcap, float* logits) {
  const int begin = kIsWhole ? 0 : sight.begin, end = kIsWhole ? kChunk : sight.end;
  Vec::T top = Vec::set1(kHidden);
  for (int t = begin; t < end; t += Vec::kWidth) {
    Vec::T x = Vec::load(logits + t);
    if (softcap > 0) x = Vec::mul(tanh_of(x), Vec::set1(softcap * 1.44269504f));
    if (!kIsWhole) x = Vec::keep(x, sight.first - t, sight.last - t, kHidden);
    if (softcap > 0 || !kIsWhole) Vec::store(logits + t, x);
    top = Vec::max(top, x);
  }
  return Vec::reduce_max(top);
}

// Turns a row's logits into weights, in place; in pairs, rounded to bfloat16. Returns total and
// their sum.
template <class Type, bool kIsWhole>
static inline Vec::T weigh(const Sight& sight, Vec::T shift, Vec::T total, float* logits) {
  const int begin = kIsWhole ? 0 : sight.begin, end = kIsWhole ? kChunk : sight.end;
  for (int t = begin; t < end; t += Vec::kWidth) {
    const Vec::T e = Vec::exp2(Vec::sub(Vec::load(logits + t), shift));
    total = Vec::add(total, e);
    if constexpr (is_paired<Type>())
      Vec::store_bfloat16(logits + t / 2, e);  // ahead of what is still to be read
    else
      Vec::store(logits + t, e);
  }
  return total;
}

// Likewise for an int8 cache: weights are multiplied with the scales of the values, sixteen a tile,
// after they were summed, and rounded to bytes, of which scale becomes the scale.
template <bool kIsWhole>
static inline Vec::T weigh_quads(const Sight& sight, Vec::T shift, const float* const* value_scale,
                                 Vec::T total, float* logits, float* scale) {
  const int begin = kIsWhole ? 0 : sight.begin, end = kIsWhole ? kChunk : sight.end;
  Vec::T largest = Vec::set1(0.f);
  for (int t = begin; t < end; t += Vec::kWidth) {
    const Vec::T e = Vec::exp2(Vec::sub(Vec::load(logits + t), shift));
    total = Vec::add(total, e);
    Vec::T weight = Vec::mul(e, Vec::load(value_scale[t / kTile] + t % kTile));
    // the scale of a token that the row does not see may be anything
    if (!kIsWhole) weight = Vec::keep(weight, sight.first - t, sight.last - t, 0.f);
    Vec::store(logits + t, weight);
    largest = Vec::max_bits(largest, Vec::add(weight, Vec::swap_neighbours(weight)));
  }
  *scale = round_weights(largest, begin, end, logits);
  return total;
}

// Turns the logits of up to kScoreRows rows into weights and updates maximum and sum. factor[r] is
// what the earlier sums have to be multiplied with, and for an int8 cache scale[r] the weights.
// Arrays have room for whole vectors of rows. Without sights, every row sees the whole chunk.
template <class Type>
static inline void softmax(const Sight* sights, int rows, float softcap,
                           const float* const* value_scale, float* scores, float* maximum,
                           float* sum, float* factor, float* scale) {
  constexpr int W = Vec::kWidth;
  const auto is_whole = [=](int r) { return !sights || sights[r].is_whole(); };
  float now[kScoreRows] = {}, shift[kScoreRows];
  for (int r = 0; r < rows; r++)
    now[r] = is_whole(r) ? largest<true>({}, softcap, scores + r * kChunk)
                         : largest<false>(sights[r], softcap, scores + r * kChunk);
  const Vec::T hidden = Vec::set1(kHidden);
  for (int r = 0; r < rows; r += W) {
    const Vec::T before = Vec::load(maximum + r), chunk = Vec::load(now + r);
    const Vec::T top = Vec::less(before, chunk, chunk, before);
    Vec::store(maximum + r, top);
    Vec::store(factor + r, Vec::exp2(Vec::sub(before, top)));
    // A row that has seen nothing yet has no maximum to subtract.
    Vec::store(shift + r, Vec::less(hidden, top, top, Vec::set1(0.f)));
  }
  for (int r = 0; r < rows; r++) {
    float* s = scores + r * kChunk;
    const Vec::T by = Vec::set1(shift[r]);
    const Vec::T total = Vec::mul(Vec::load(sum + r * 16), Vec::set1(factor[r]));
    if constexpr (has_scales<Type>())
      Vec::store(sum + r * 16,
                 is_whole(r)
                     ? weigh_quads<true>({}, by, value_scale, total, s, scale + r)
                     : weigh_quads<false>(sights[r], by, value_scale, total, s, scale + r));
    else
      Vec::store(sum + r * 16, is_whole(r) ? weigh<Type, true>({}, by, total, s)
                                           : weigh<Type, false>(sights[r], by, total, s));
  }
}

}  // namespace
