// Where a key or a value lies in the cache, and how an element becomes a float. Compiled once per
// instruction set, after its vec_*.h.
#pragma once

#include <string.h>

#include "kernels.h"

namespace {

using namespace onnxport;

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// The 16-bit types share an integer representation, so each element type is a class of its own.
struct Float32 {
  using Element = float;
  static inline Vec::T load(const float* p) { return Vec::load(p); }
  static inline float to_float(float x) { return x; }
};

struct Float16 {
  using Element = uint16_t;
  static inline Vec::T load(const uint16_t* p) { return Vec::load_half(p); }
  static inline float to_float(uint16_t x) { return float_from_half(x); }
};

struct BFloat16 {
  using Element = uint16_t;
  static inline Vec::T load(const uint16_t* p) { return Vec::load_bfloat16(p); }
  static inline float to_float(uint16_t x) { return float_from_bfloat16(x); }
};

// Scales are not applied here: the key's go into the query, the value's into the output.
struct Int8 {
  using Element = int8_t;
  static inline Vec::T load(const int8_t* p) { return Vec::load_int8(p); }
  static inline float to_float(int8_t x) { return static_cast<float>(x); }
};

static inline void encode(Float32, const float* x, int64_t n, const float*, float* out) {
  memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
}

static inline void encode(Float16, const float* x, int64_t n, const float*, uint16_t* out) {
  for (int64_t i = 0; i < n; i += 8) Vec::store_half8(out + i, x + i);
}

static inline void encode(BFloat16, const float* x, int64_t n, const float*, uint16_t* out) {
  for (int64_t i = 0; i < n; i++) out[i] = bfloat16_from_float(x[i]);
}

// As ONNX Runtime's CUDA kernel: multiply by the reciprocal, round to nearest even, saturate at
// [-128, 127]; a scale of zero stores zeros.
static inline void encode(Int8, const float* x, int64_t n, const float* inverse_scale,
                          int8_t* out) {
  for (int64_t i = 0; i < n; i++) {
    float y = x[i] * inverse_scale[i];
    y = y > -128.f ? y : -128.f;
    y = y < 127.f ? y : 127.f;
    out[i] = static_cast<int8_t>(nearbyintf(y));
  }
}

// Element offsets of a head's vector at a slot: value channels are always contiguous, key channels
// are key_step apart.
template <bool kIsTiled>
struct Address {
  static constexpr int64_t key_step = kIsTiled ? kTile : 1;

  static inline int64_t key(const Problem& p, int64_t block, int64_t offset, int64_t head) {
    if (!kIsTiled) return value(p, block, offset, head);
    const int64_t row = (block * p.kv_heads + head) * p.block_size + offset / kTile * kTile;
    return row * p.head_size + offset % kTile;
  }
  static inline int64_t value(const Problem& p, int64_t block, int64_t offset, int64_t head) {
    if (kIsTiled) return ((block * p.kv_heads + head) * p.block_size + offset) * p.head_size;
    return ((block * p.block_size + offset) * p.kv_heads + head) * p.head_size;
  }
};

// Converts n elements, n a multiple of 8. Never reads past them: the last vector of a row may be
// the last bytes of the cache.
template <class Type>
static inline void decode(Type, const typename Type::Element* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) Vec::store(out + i, Type::load(x + i));
  for (; i < n; i++) out[i] = Type::to_float(x[i]);
}

}  // namespace
