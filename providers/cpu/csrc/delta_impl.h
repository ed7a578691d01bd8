// What gated delta nets do with a token, and with a head's state. Compiled once per instruction
// set.
#pragma once

#include <math.h>
#include <string.h>

#include "kernels.h"
#include "micro_impl.h"

namespace {

using onnxport::DeltaNet;
using onnxport::DeltaRows;
using onnxport::DeltaTokens;
using onnxport::kMostKeySize;

constexpr int64_t kTileTokens = 16;  // whose keys and queries stay in the nearest cache
// Rows of a state that go through registers at once: with two sums each, and what they change by.
constexpr int kStateRows = Vec::kWidth == 16 ? 8 : 4;
// Few tokens wait for their state, which comes fastest row after row, as it lies: several rows at
// once are as many streams, and take more than twice the time. More tokens than these would take
// longer to compute so.
constexpr int64_t kStreamedTokens = 8;
constexpr float kLengthEpsilon = 1e-6f;

// How a state changes: by what a token adds, by the delta rule, or by that with a decay of each
// channel of a key.
enum class Rule { kGated, kDelta, kChannels };

// A vector with zeros behind it, up to the padded size.
static void copy_padded(const float* from, int64_t size, float* to) {
  memcpy(to, from, static_cast<size_t>(size) * sizeof(float));
  for (int64_t i = size; i < padded(size); i++) to[i] = 0.f;
}

static void scale(float* x, int64_t padded_size, float factor) {
  for (int64_t i = 0; i < padded_size; i += Vec::kWidth)
    Vec::store(x + i, Vec::mul(Vec::load(x + i), Vec::set1(factor)));
}

// a * b + c, in one step wherever the processor has it: of two products that are added compilers
// choose one to fuse, and another one for other numbers of rows.
static inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

static float product_of(const float* a, const float* b, int64_t padded_size) {
  Vec::T sum = Vec::set1(0.f);
  for (int64_t i = 0; i < padded_size; i += Vec::kWidth)
    sum = Vec::fma(Vec::load(a + i), Vec::load(b + i), sum);
  return Vec::reduce_add(sum);
}

static void prepare_delta(const DeltaNet& net, const DeltaTokens& tokens, int64_t begin,
                          int64_t end) {
  const int64_t size = padded(net.key_size);
  for (int64_t token = begin; token < end; token++) {
    for (int64_t head = 0; head < net.key_heads; head++) {
      const int64_t at = head * tokens.count + token, from = tokens.first + token;
      float* key = tokens.keys + at * 2 * size;
      float* query = key + size;
      copy_padded(net.key + from * net.key_stride + head * net.key_size, net.key_size, key);
      copy_padded(net.query + from * net.query_stride + head * net.key_size, net.key_size, query);
      float key_factor = 1.f, query_factor = net.scale;
      if (net.is_normalized) {
        key_factor = 1.f / sqrtf(product_of(key, key, size) + kLengthEpsilon);
        query_factor = net.scale / sqrtf(product_of(query, query, size) + kLengthEpsilon);
      }
      scale(key, size, key_factor);
      scale(query, size, query_factor);
      if (net.has_delta_rule) tokens.products[at] = product_of(key, query, size);
    }
  }
}

// One way through some rows of a state: changes them by one token, and multiplies what they are
// then with the next one's key and query, so that they come from memory once and go there once.
// Either may be left out. What is done to a number, and the order of sums, is the same all the
// same. Where channels have decays, the next token's are in what is multiplied: its key finds what
// they leave of a state.
template <int kRows, bool kChannels, bool kUpdates, bool kSums>
static inline void pass(const float* from, float* to, int64_t stride, int64_t size,
                        const float* decay, const float* key, const float* deltas,
                        const float* next_decay, const float* next_key, const float* next_query,
                        float* sums) {
  Vec::T change[kRows], of_key[kRows], of_query[kRows];
  const Vec::T whole = Vec::set1(kUpdates && !kChannels ? *decay : 0.f);
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    change[r] = Vec::set1(kUpdates ? deltas[r] : 0.f);
    of_key[r] = of_query[r] = Vec::set1(0.f);
  }
  for (int64_t i = 0; i < size; i += Vec::kWidth) {
    const Vec::T keep = kUpdates && kChannels ? Vec::load(decay + i) : whole;
    const Vec::T k = kUpdates ? Vec::load(key + i) : keep;
    Vec::T next_k = kSums ? Vec::load(next_key + i) : keep;
    Vec::T next_q = kSums ? Vec::load(next_query + i) : keep;
    if (kSums && kChannels) {
      const Vec::T next_keep = Vec::load(next_decay + i);
      next_k = Vec::mul(next_keep, next_k);
      next_q = Vec::mul(next_keep, next_q);
    }
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      Vec::T state = Vec::load(from + r * stride + i);
      if (kUpdates) {
        state = Vec::fma(change[r], k, Vec::mul(keep, state));
        Vec::store(to + r * stride + i, state);
      }
      if (kSums) {
        of_key[r] = Vec::fma(state, next_k, of_key[r]);
        of_query[r] = Vec::fma(state, next_q, of_query[r]);
      }
    }
  }
  if (!kSums) return;
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    sums[r] = Vec::reduce_add(of_key[r]);
    sums[kRows + r] = Vec::reduce_add(of_query[r]);
  }
}

// Without the delta rule a token asks nothing of a state before it changes it: one way through the
// rows does both.
template <int kRows>
static inline void gated_pass(const float* from, float* to, int64_t stride, int64_t size,
                              float decay, const float* key, const float* query, float step,
                              const float* values, float* outputs) {
  Vec::T change[kRows], sums[kRows];
  const Vec::T keep = Vec::set1(decay);
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    change[r] = Vec::set1(step * values[r]);
    sums[r] = Vec::set1(0.f);
  }
  for (int64_t i = 0; i < size; i += Vec::kWidth) {
    const Vec::T k = Vec::load(key + i), q = Vec::load(query + i);
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Vec::T state = Vec::fma(change[r], k, Vec::mul(keep, Vec::load(from + r * stride + i)));
      Vec::store(to + r * stride + i, state);
      sums[r] = Vec::fma(state, q, sums[r]);
    }
  }
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) outputs[r] = Vec::reduce_add(sums[r]);
}

// What rows of a state have to do with, whatever the token.
struct DeltaHead {
  const DeltaNet& net;
  const DeltaTokens& tokens;
  int64_t head, key_head;

  const float* key(int64_t token) const {
    return tokens.keys + (key_head * tokens.count + token) * 2 * padded(net.key_size);
  }
  const float* query(int64_t token) const { return key(token) + padded(net.key_size); }
  // One number, or one of each channel.
  const float* decay(int64_t token) const {
    const int64_t at = token * net.value_heads + head;
    return tokens.decays + (net.has_channels ? at * padded(net.key_size) : at);
  }
  float beta(int64_t token) const { return tokens.betas[token * net.value_heads + head]; }
  int64_t at(int64_t token, int64_t row) const {
    return ((tokens.first + token) * net.value_heads + head) * net.value_size + row;
  }

  const float* value(int64_t token, int64_t row) const {
    return net.value + (tokens.first + token) * net.value_stride + head * net.value_size + row;
  }

  // What a token adds to rows, times its key; and their outputs. With S not yet changed:
  //   delta = beta * (v - exp(g) * S k);  S q = exp(g) * S q + delta * (k q)
  // Decays of channels are in the sums.
  void solve(int64_t token, int64_t row, int rows, const float* sums, float* deltas) const {
    const float own = beta(token), keep = net.has_channels ? 1.f : *decay(token);
    const float product = tokens.products[key_head * tokens.count + token];
    const float* values = value(token, row);
    for (int r = 0; r < rows; r++) {
      deltas[r] = own * fused(-keep, sums[r], values[r]);
      net.output[at(token, row + r)] = fused(keep, sums[rows + r], deltas[r] * product);
    }
  }
};

// Tokens [begin, end), at least one, for kRows rows whose numbers are whole vectors.
template <int kRows, Rule kRule>
static void update_rows(const DeltaHead& of, int64_t row, int64_t begin, int64_t end,
                        const float* from, float* to, int64_t stride, int64_t size) {
  if (kRule == Rule::kGated) {
    for (int64_t token = begin; token < end; token++, from = to)
      gated_pass<kRows>(from, to, stride, size, *of.decay(token), of.key(token), of.query(token),
                        of.beta(token), of.value(token, row), of.net.output + of.at(token, row));
    return;
  }
  constexpr bool kChannels = kRule == Rule::kChannels;
  float sums[2 * kRows], deltas[kRows];
  pass<kRows, kChannels, false, true>(from, to, stride, size, nullptr, nullptr, nullptr,
                                      of.decay(begin), of.key(begin), of.query(begin), sums);
  for (int64_t token = begin; token < end; token++, from = to) {
    of.solve(token, row, kRows, sums, deltas);
    const float* keep = of.decay(token);
    const int64_t next = token + 1;
    if (next < end)
      pass<kRows, kChannels, true, true>(from, to, stride, size, keep, of.key(token), deltas,
                                         of.decay(next), of.key(next), of.query(next), sums);
    else
      pass<kRows, kChannels, true, false>(from, to, stride, size, keep, of.key(token), deltas,
                                          nullptr, nullptr, nullptr, nullptr);
  }
}

// The same for rows of any length, which are padded where they are no whole vectors.
template <int kRows, Rule kRule>
static void update_any_rows(const DeltaHead& of, int64_t row, int64_t begin, int64_t end,
                            const float* from, float* to) {
  const int64_t size = of.net.key_size;
  if (size % Vec::kWidth == 0)
    return update_rows<kRows, kRule>(of, row, begin, end, from, to, size, size);
  float rows[kRows * kMostKeySize];
  const int64_t stride = padded(size);
  const size_t bytes = static_cast<size_t>(size) * sizeof(float);
  memset(rows, 0, sizeof rows);
  for (int r = 0; r < kRows; r++) memcpy(rows + r * stride, from + r * size, bytes);
  update_rows<kRows, kRule>(of, row, begin, end, rows, rows, stride, stride);
  for (int r = 0; r < kRows; r++) memcpy(to + r * size, rows + r * stride, bytes);
}

template <Rule kRule>
static void update_head(const DeltaNet& net, const DeltaTokens& tokens, const DeltaRows& rows) {
  const DeltaHead of{net, tokens, rows.head, rows.head / (net.value_heads / net.key_heads)};
  const int64_t size = net.key_size;
  if (rows.token_begin == rows.token_end && rows.from != rows.to)
    memcpy(rows.to, rows.from,
           static_cast<size_t>((rows.row_end - rows.row_begin) * size) * sizeof(float));
  const float* from = rows.from;
  for (int64_t begin = rows.token_begin; begin < rows.token_end; begin += kTileTokens) {
    const int64_t end = min_of(begin + kTileTokens, rows.token_end);
    const bool streams = end - begin <= kStreamedTokens;
    int64_t row = rows.row_begin;
    for (; !streams && row + kStateRows <= rows.row_end; row += kStateRows) {
      const int64_t at = (row - rows.row_begin) * size;
      update_any_rows<kStateRows, kRule>(of, row, begin, end, from + at, rows.to + at);
    }
    for (; row < rows.row_end; row++) {
      const int64_t at = (row - rows.row_begin) * size;
      update_any_rows<1, kRule>(of, row, begin, end, from + at, rows.to + at);
    }
    from = rows.to;
  }
}

static void update_delta(const DeltaNet& net, const DeltaTokens& tokens, const DeltaRows& rows) {
  if (net.has_channels)
    update_head<Rule::kChannels>(net, tokens, rows);
  else if (net.has_delta_rule)
    update_head<Rule::kDelta>(net, tokens, rows);
  else
    update_head<Rule::kGated>(net, tokens, rows);
}

}  // namespace
