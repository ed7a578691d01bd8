// The first pass over the new tokens: RMSNorm, rotary embedding, scaling of the queries, and
// storing of keys and values. Compiled once per instruction set.
#pragma once

#include <math.h>

#include "int4_impl.h"
#include "latent_impl.h"
#include "quads_impl.h"
#include "tiles_impl.h"

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

// out = scale * rotation(x), in one pass over memory that is rarely in the first cache.
static inline void rotate(const Problem& p, int64_t position, float scale,
                          const float* __restrict x, float* __restrict out) {
  const int64_t half = p.rotary_dim / 2, begin = p.rotary_offset, end = begin + p.rotary_dim;
  const float* __restrict cosine = p.cosine + position * half;
  const float* __restrict sine = p.sine + position * half;
  for (int64_t i = 0; i < begin; i++) out[i] = x[i] * scale;
  if (p.interleaved) {
    for (int64_t i = 0; i < half; i++) {
      const float a = x[begin + 2 * i] * scale, b = x[begin + 2 * i + 1] * scale;
      out[begin + 2 * i] = a * cosine[i] - b * sine[i];
      out[begin + 2 * i + 1] = b * cosine[i] + a * sine[i];
    }
  } else {
    for (int64_t i = 0; i < half; i++) {
      const float a = x[begin + i] * scale, b = x[begin + half + i] * scale;
      out[begin + i] = a * cosine[i] - b * sine[i];
      out[begin + half + i] = b * cosine[i] + a * sine[i];
    }
  }
  for (int64_t i = end; i < p.head_size; i++) out[i] = x[i] * scale;
}

// out = scale * rotation(norm(source)) of one head's vector; without norm_weight, no norm.
static inline void project(const Problem& p, const float* source, const float* norm_weight,
                           int64_t position, float scale, float* out) {
  float normed[kMaxLatentSize];
  if (norm_weight) {
    memcpy(normed, source, static_cast<size_t>(p.head_size) * sizeof(float));
    rms_norm(p, norm_weight, normed);
    source = normed;
  }
  if (p.rotary_dim) {
    rotate(p, position, scale, source, out);
  } else {
    for (int64_t i = 0; i < p.head_size; i++) out[i] = source[i] * scale;
  }
}

// What the logit of a query and a stored key is to be multiplied with, ahead of the softcap's tanh
// or, without one, in units of log2.
static inline float query_scale(const Problem& p) {
  return p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E;
}

// Asks for the vector that is so many floats further on, a later token's, which is rarely in the
// first caches: tokens lie too far apart for the processor to see that it will be read. There may
// be none, which is no matter to a prefetch.
ONNXPORT_PREFETCHES void prefetch_next(const float* x, int64_t stride, int64_t head_size) {
  const uintptr_t next = reinterpret_cast<uintptr_t>(x) + static_cast<uintptr_t>(stride) * 4;
  for (int64_t i = 0; i < head_size; i += 16)
    prefetch(reinterpret_cast<const char*>(next + static_cast<uintptr_t>(i) * 4));
}

static inline void prepare_query(const Problem& p, const TokenPlace& place, int64_t token,
                                 float* queries) {
  const int64_t group = p.num_heads / p.kv_heads;
  const float scale = query_scale(p);
  const float* source = p.query + token * p.query_stride;
  const int64_t row = query_floats(p);
  for (int64_t kv_head = 0; kv_head < p.kv_heads; kv_head++) {
    float* x = queries + (kv_head * p.num_tokens + token) * group * row;
    for (int64_t i = 0; i < group; i++, x += row, source += p.head_size) {
      prefetch_next(source, p.query_stride, p.head_size);
      if (p.cache_layout != kPaired && !has_integers(p)) {
        project(p, source, p.q_norm_weight, place.position, scale, x);
        continue;
      }
      float projected[kMaxLatentSize];
      project(p, source, p.q_norm_weight, place.position, scale, projected);
      if (has_integers(p))
        round_query(projected, p.head_size, x);
      else
        Vec::round_to_bfloat16(projected, p.head_size, x);
    }
  }
}

// Writes one vector to its slot: n numbers, `step` elements apart.
template <class Type>
static inline void store_vector(const float* x, int64_t n, int64_t step,
                                typename Type::Element* out) {
  if (step == 1) {
    encode(Type{}, x, n, out);
    return;
  }
  typename Type::Element encoded[kMaxHeadSize];
  encode(Type{}, x, n, encoded);
  for (int64_t i = 0; i < n; i++) out[i * step] = encoded[i];
}

// Likewise as a token of an int8 tile, with its scale.
static inline void store_key_quads(const Problem& p, const float* x, int64_t token, int8_t* tile) {
  int8_t encoded[kMaxHeadSize];
  const float scale = encode(Int8{}, x, p.head_size, encoded);
  for (int64_t i = 0; i < p.head_size; i += 4)
    memcpy(tile + i * kTile + token * 4, encoded + i, 4);
  memcpy(tile + kTile * p.head_size + token * kScaleBytes, &scale, sizeof scale);
}

static inline void store_value_quads(const Problem& p, const float* x, int64_t token,
                                     int8_t* tile) {
  int8_t encoded[kMaxHeadSize];
  const float scale = encode(Int8{}, x, p.head_size, encoded);
  int8_t* out = tile + token / 4 * 4 * p.head_size + token % 4;
  for (int64_t i = 0; i < p.head_size; i++) out[4 * i] = encoded[i];
  memcpy(tile + kTile * p.head_size + token * kScaleBytes, &scale, sizeof scale);
}

// Likewise in a paired tile.
static inline void store_paired(const Problem& p, const float* key, const float* value,
                                int64_t token, uint16_t* keys, uint16_t* values) {
  float rounded[kMaxHeadSize / 2];
  Vec::round_to_bfloat16(key, p.head_size, rounded);
  for (int64_t i = 0; i < p.head_size / 2; i++)
    memcpy(keys + (i * kTile + token) * 2, rounded + i, sizeof rounded[i]);
  Vec::round_to_bfloat16(value, p.head_size, rounded);
  uint16_t numbers[kMaxHeadSize];
  memcpy(numbers, rounded, static_cast<size_t>(p.head_size) * sizeof numbers[0]);
  uint16_t* pairs = values + token / 2 * 2 * p.head_size + token % 2;
  for (int64_t i = 0; i < p.head_size; i++) pairs[2 * i] = numbers[i];
}

// Writes a latent row, which is the value, too.
template <class Type>
static inline void store_latent(const Problem& p, const TokenPlace& place, int64_t token) {
  const int64_t at = latent_at<Type>(p, place.slot / p.block_size, place.slot % p.block_size);
  auto* out = static_cast<typename Type::Element*>(p.key_cache) + at;
  float x[kMaxLatentSize];
  project(p, p.key + token * p.key_stride, p.k_norm_weight, place.position, 1.f, x);
  if constexpr (has_scales<Type>()) {
    const float scale = encode(Type{}, x, p.head_size, out);
    memcpy(out + p.head_size, &scale, sizeof scale);
  } else {
    encode(Type{}, x, p.head_size, out);
  }
}

template <class Type, bool kIsTiled>
static void store_token(const Problem& p, const TokenPlace& place, int64_t token) {
  using Element = typename Type::Element;
  if (place.slot < 0) return;
  const int64_t block = place.slot / p.block_size, offset = place.slot % p.block_size;
  for (int64_t head = 0; head < p.kv_heads; head++) {
    float x[kMaxHeadSize];
    project(p, p.key + token * p.key_stride + head * p.head_size, p.k_norm_weight, place.position,
            1.f, x);
    const float* value = p.value + token * p.value_stride + head * p.head_size;
    const int64_t at = kIsTiled ? tile_at<Type>(p, block, offset, head)
                                : canonical_at(p, block, offset, head);
    Element* keys = static_cast<Element*>(p.key_cache) + at;
    Element* values = static_cast<Element*>(p.value_cache) + at;
    const int64_t i = kIsTiled ? offset % kTile : 0;  // in its tile
    if constexpr (is_paired<Type>()) {
      store_paired(p, x, value, i, keys, values);
    } else if constexpr (is_packed<Type>()) {
      store_key_levels(p, x, i, keys);
      store_value_levels(p, value, i, values);
    } else if constexpr (has_scales<Type>()) {
      store_key_quads(p, x, i, keys);
      store_value_quads(p, value, i, values);
    } else {
      store_vector<Type>(x, p.head_size, kIsTiled ? kTile : 1, keys + i);
      store_vector<Type>(value, p.head_size, 1, values + i * p.head_size);
    }
  }
}

// Rounds n numbers, a multiple of 8, to bfloat16.
static inline void round_numbers(const float* x, int64_t n, uint16_t* out) {
  float pairs[kMaxHeadSize / 2];
  Vec::round_to_bfloat16(x, n, pairs);
  memcpy(out, pairs, static_cast<size_t>(n) * sizeof *out);
}

// Writes sixteen tokens from this one on, which fill a paired tile of each head: what
// store_paired() writes number by number, turned over in registers.
static inline void store_paired_tile(const Problem& p, const TokenPlace& place, int64_t token) {
  const int64_t block = place.slot / p.block_size, offset = place.slot % p.block_size;
  const size_t tile_bytes = static_cast<size_t>(kTile * p.head_size) * sizeof(uint16_t);
  for (int64_t head = 0; head < p.kv_heads; head++) {
    const int64_t at = tile_at<PairedBFloat16>(p, block, offset, head);
    float keys[kTile][kMaxHeadSize / 2], turned[kTile * kMaxHeadSize / 2];
    const float* rows[kTile];
    for (int64_t t = 0; t < kTile; t++) {
      float x[kMaxHeadSize];
      const float* key = p.key + (token + t) * p.key_stride + head * p.head_size;
      prefetch_next(key, kTile * p.key_stride, p.head_size);
      project(p, key, p.k_norm_weight, place.position + t, 1.f, x);
      Vec::round_to_bfloat16(x, p.head_size, keys[t]);
      rows[t] = keys[t];
    }
    transpose_tile(rows, p.head_size / 2, turned);
    memcpy(static_cast<uint16_t*>(p.key_cache) + at, turned, tile_bytes);
    uint16_t* out = static_cast<uint16_t*>(p.value_cache) + at;
    for (int64_t t = 0; t < kTile; t += 2, out += 2 * p.head_size) {
      uint16_t first[kMaxHeadSize], second[kMaxHeadSize];
      const float* value = p.value + (token + t) * p.value_stride + head * p.head_size;
      prefetch_next(value, kTile * p.value_stride, p.head_size);
      prefetch_next(value, (kTile + 1) * p.value_stride, p.head_size);
      round_numbers(value, p.head_size, first);
      round_numbers(value + p.value_stride, p.head_size, second);
      for (int64_t i = 0; i < p.head_size; i++) {
        out[2 * i] = first[i];
        out[2 * i + 1] = second[i];
      }
    }
  }
}

// Whether a token begins a paired tile that tokens before `end` fill.
static inline bool begins_tile(const Problem& p, const TokenPlace& place, int64_t token,
                               int64_t end) {
  const int64_t after = min_of(end, p.cumulative_lengths[place.sequence + 1]);
  return p.head_size % (2 * Vec::kWidth) == 0 && !p.slot_mapping &&
         place.position % kTile == 0 && token + kTile <= after;
}

template <class Type, bool kIsTiled, bool kIsLatent = false>
static void prepare_tokens(const Problem& p, float* queries, int64_t begin, int64_t end) {
  int64_t sequence = 0, stored = begin;  // tokens before `stored` are in the cache
  for (int64_t token = begin; token < end; token++) {
    while (p.cumulative_lengths[sequence + 1] <= token) sequence++;
    const TokenPlace place = place_of(p, sequence, token);
    prepare_query(p, place, token, queries);
    if (token < stored) continue;
    if (is_paired<Type>() && begins_tile(p, place, token, end)) {
      store_paired_tile(p, place, token);
      stored = token + kTile;
    } else if constexpr (kIsLatent) {
      if (place.slot >= 0) store_latent<Type>(p, place, token);
      stored = token + 1;
    } else {
      store_token<Type, kIsTiled>(p, place, token);
      stored = token + 1;
    }
  }
}

}  // namespace
