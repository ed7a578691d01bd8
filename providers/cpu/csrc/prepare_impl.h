// The first pass over the new tokens: RMSNorm, rotary embedding, scaling of the queries, and
// storing of keys and values. Compiled once per instruction set.
#pragma once

#include <math.h>

#include "cache_impl.h"

namespace {

constexpr float kLog2E = 1.44269504f;

struct TokenPlace {
  int64_t sequence;
  int64_t position;  // in its sequence
  int64_t slot;      // block * block_size + offset, or -1
};

static inline TokenPlace place_of(const Problem& p, int64_t sequence, int64_t token) {
  const int64_t position = p.past_lengths[sequence] + token - p.cumulative_lengths[sequence];
  if (p.slot_mapping) return {sequence, position, p.slot_mapping[token]};
  const int64_t block = p.block_table[sequence * p.table_width + position / p.block_size];
  return {sequence, position, block * p.block_size + position % p.block_size};
}

static inline void rms_norm(const Problem& p, const float* weight, float* x) {
  float sum = 0;
  for (int64_t i = 0; i < p.head_size; i++) sum += x[i] * x[i];
  const float scale = 1.f / sqrtf(sum / static_cast<float>(p.head_size) + p.norm_epsilon);
  for (int64_t i = 0; i < p.head_size; i++) x[i] = x[i] * scale * weight[i];
}

static inline void rotate(const Problem& p, int64_t position, float* x) {
  const int64_t half = p.rotary_dim / 2;
  const float* cosine = p.cosine + position * half;
  const float* sine = p.sine + position * half;
  float* lo = x + p.rotary_offset;
  if (p.interleaved) {
    for (int64_t i = 0; i < half; i++) {
      const float a = lo[2 * i], b = lo[2 * i + 1];
      lo[2 * i] = a * cosine[i] - b * sine[i];
      lo[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
    return;
  }
  float* hi = lo + half;
  for (int64_t i = 0; i < half; i++) {
    const float a = lo[i], b = hi[i];
    lo[i] = a * cosine[i] - b * sine[i];
    hi[i] = b * cosine[i] + a * sine[i];
  }
}

// x = norm and rotation of one head's vector.
static inline void project(const Problem& p, const float* source, const float* norm_weight,
                           int64_t position, float* x) {
  memcpy(x, source, static_cast<size_t>(p.head_size) * sizeof(float));
  if (norm_weight) rms_norm(p, norm_weight, x);
  if (p.rotary_dim) rotate(p, position, x);
}

// What the logit of a query and a stored key is to be multiplied with, ahead of the softcap's tanh
// or, without one, in units of log2.
static inline float query_scale(const Problem& p) {
  return p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E;
}

static inline void prepare_query(const Problem& p, const TokenPlace& place, int64_t token,
                                 float* queries) {
  const int64_t group = p.num_heads / p.kv_heads;
  const float scale = query_scale(p);
  for (int64_t head = 0; head < p.num_heads; head++) {
    const int64_t kv_head = head / group;
    float* x = queries + ((kv_head * p.num_tokens + token) * group + head % group) * p.head_size;
    project(p, p.query + token * p.query_stride + head * p.head_size, p.q_norm_weight,
            place.position, x);
    if (p.cache_type != kInt8) {
      for (int64_t i = 0; i < p.head_size; i++) x[i] *= scale;
    } else if (p.k_per_channel) {
      const float* k_scale = p.k_scale + kv_head * p.head_size;
      for (int64_t i = 0; i < p.head_size; i++) x[i] *= scale * k_scale[i];
    } else {
      for (int64_t i = 0; i < p.head_size; i++) x[i] *= scale * p.k_scale[0];
    }
  }
}

static inline float reciprocal(float x) { return x == 0.f ? 0.f : 1.f / x; }

static inline void reciprocals(const float* scale, bool per_channel, int64_t head, int64_t n,
                               float* out) {
  for (int64_t i = 0; i < n; i++) out[i] = reciprocal(per_channel ? scale[head * n + i] : *scale);
}

template <class Type, bool kIsTiled>
static void store_token(const Problem& p, const TokenPlace& place, int64_t token) {
  using Element = typename Type::Element;
  using At = Address<kIsTiled>;
  if (place.slot < 0) return;
  const int64_t block = place.slot / p.block_size, offset = place.slot % p.block_size;
  const bool quantized = p.cache_type == kInt8;
  float x[kMaxHeadSize], inverse[kMaxHeadSize];
  Element encoded[kMaxHeadSize];
  for (int64_t head = 0; head < p.kv_heads; head++) {
    project(p, p.key + token * p.key_stride + head * p.head_size, p.k_norm_weight, place.position,
            x);
    if (quantized) reciprocals(p.k_scale, p.k_per_channel != 0, head, p.head_size, inverse);
    Element* key = static_cast<Element*>(p.key_cache) + At::key(p, block, offset, head);
    if (kIsTiled) {
      encode(Type{}, x, p.head_size, inverse, encoded);
      for (int64_t i = 0; i < p.head_size; i++) key[i * At::key_step] = encoded[i];
    } else {
      encode(Type{}, x, p.head_size, inverse, key);
    }
    if (quantized) reciprocals(p.v_scale, p.v_per_channel != 0, head, p.head_size, inverse);
    Element* value = static_cast<Element*>(p.value_cache) + At::value(p, block, offset, head);
    encode(Type{}, p.value + token * p.value_stride + head * p.head_size, p.head_size, inverse,
           value);
  }
}

template <class Type, bool kIsTiled>
static void prepare_tokens(const Problem& p, float* queries, int64_t begin, int64_t end) {
  int64_t sequence = 0;
  for (int64_t token = begin; token < end; token++) {
    while (p.cumulative_lengths[sequence + 1] <= token) sequence++;
    const TokenPlace place = place_of(p, sequence, token);
    prepare_query(p, place, token, queries);
    store_token<Type, kIsTiled>(p, place, token);
  }
}

}  // namespace
