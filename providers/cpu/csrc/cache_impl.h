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
// kScaleElements is how many elements a token's scale takes up.
struct Float32 {
  using Element = float;
  static constexpr int kScaleElements = 0;
  static inline Vec::T load(const float* p) { return Vec::load(p); }
  static inline float to_float(float x) { return x; }
};

struct Float16 {
  using Element = uint16_t;
  static constexpr int kScaleElements = 0;
  static inline Vec::T load(const uint16_t* p) { return Vec::load_half(p); }
  static inline float to_float(uint16_t x) { return float_from_half(x); }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kScaleElements = 0;
  static inline Vec::T load(const uint16_t* p) { return Vec::load_bfloat16(p); }
  static inline float to_float(uint16_t x) { return float_from_bfloat16(x); }
};

// bfloat16 in the paired layout: a vector holds Vec::kWidth pairs.
struct PairedBFloat16 {
  using Element = uint16_t;
  static constexpr int kScaleElements = 0;
};

// A vector holds Vec::kWidth quads. The key's scales go into the logits, the value's into the weights.
struct Int8 {
  using Element = int8_t;
  static constexpr int kScaleElements = kScaleBytes;
};

// Becomes Int8 where it is read: see int4_impl.h.
struct Int4 {
  using Element = uint8_t;
  static constexpr int kScaleElements = kScaleBytes;
};

// Rows of the canonical layout whose first channels are the value, too: see latent_impl.h. Type is what
// products are of.
template <class Type>
struct Latent {
  using Element = typename Type::Element;
  static constexpr int kScaleElements = Type::kScaleElements;
};

template <class Type>
constexpr bool has_scales() {
  return Type::kScaleElements != 0;
}

// Elements of a token's key or value in one head.
template <class Type>
static inline int64_t row_elements(int64_t head_size) {
  return head_size + Type::kScaleElements;
}
template <>
inline int64_t row_elements<Int4>(int64_t head_size) {
  return int4_row_bytes(head_size);
}

template <class Type>
constexpr bool is_paired() {
  return false;
}
template <>
constexpr bool is_paired<PairedBFloat16>() {
  return true;
}

template <class Type>
constexpr bool is_packed() {
  return false;
}
template <>
constexpr bool is_packed<Int4>() {
  return true;
}

// Whether tiles are made of what is read, each time: what is read next is asked for meanwhile.
template <class Type>
struct MadeTiles {
  static constexpr bool kAre = is_packed<Type>();
};
template <class Type>
struct MadeTiles<Latent<Type>> {
  static constexpr bool kAre = true;
};

// How many neighbours in a product lie side by side.
template <class Type>
constexpr int neighbours() {
  return has_scales<Type>() ? 4 : is_paired<Type>() ? 2 : 1;
}

static inline void encode(Float32, const float* x, int64_t n, float* out) {
  memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
}

// What is finite stays finite: past float16's range it becomes the largest number there, for an
// infinite key would make every result that sees it a NaN.
static inline void encode(Float16, const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += 8) Vec::store_half8(out + i, x + i);
  for (int64_t i = 0; i < n; i++) {
    const bool overflowed =
        (out[i] & 0x7fffu) == 0x7c00u && (float_bits(x[i]) & 0x7fffffffu) < 0x7f800000u;
    out[i] = static_cast<uint16_t>(out[i] - (overflowed ? 1 : 0));
  }
}

static inline void encode(BFloat16, const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i++) out[i] = bfloat16_from_float(x[i]);
}

// The scale of numbers whose largest magnitude has these bits: a 127th of it, rounded up to 16
// significant bits. Then int8 * scale is exact in float32, and encoding what was decoded gives the
// same bytes. Zero where a 127th is no normal number, NaN where there is an infinity or a NaN.
static inline float int8_scale(uint32_t magnitude) {
  constexpr uint32_t kInfinity = 0x7f800000u, kSmallestNormal = 0x00800000u, kNaN = 0x7fc00000u;
  constexpr uint32_t kLargest = 0x7c010200u;  // 127 times that is still finite
  if (magnitude >= kInfinity) return bits_float(kNaN);
  const uint32_t exact = float_bits(bits_float(magnitude) / 127.f);
  if (exact < kSmallestNormal) return 0.f;
  const uint32_t rounded = (exact + 0xffu) & ~0xffu;
  return bits_float(rounded < kLargest ? rounded : kLargest);
}

// Rounds to nearest even and returns the scale. What is not finite makes the scale NaN, and with it
// whatever attends to the token.
static inline float encode(Int8, const float* x, int64_t n, int8_t* out) {
  uint32_t magnitude = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  const float scale = int8_scale(magnitude);
  if (!(scale > 0.f)) {
    for (int64_t i = 0; i < n; i++) out[i] = 0;
    return scale;
  }
  const float inverse = 1.f / scale;
  for (int64_t i = 0; i < n; i++) out[i] = static_cast<int8_t>(nearbyintf(x[i] * inverse));
  return scale;
}

// Element offsets in the canonical layout, where keys and values lie alike.
static inline int64_t canonical_at(const Problem& p, int64_t block, int64_t offset, int64_t head) {
  return ((block * p.block_size + offset) * p.kv_heads + head) * p.head_size;
}

// Element offset of a latent row.
template <class Type>
static inline int64_t latent_at(const Problem& p, int64_t block, int64_t offset) {
  return (block * p.block_size + offset) * row_elements<Type>(p.head_size);
}

// Element offset of the tile that holds a slot. In it, but for pairs and quads, a token's key begins
// at `slot % kTile`, its channels kTile apart, and its value at `slot % kTile * head_size`.
template <class Type>
static inline int64_t tile_at(const Problem& p, int64_t block, int64_t offset, int64_t head) {
  const int64_t row = (block * p.kv_heads + head) * p.block_size + offset / kTile * kTile;
  return row * row_elements<Type>(p.head_size);
}

// Where the scales of an int8 tile lie.
static inline const float* scales_of(const Problem& p, const int8_t* tile) {
  return reinterpret_cast<const float*>(tile + kTile * p.head_size);
}

// Converts n elements, n a multiple of 8. Never reads past them: the last vector of a row may be
// the last bytes of the cache.
template <class Type>
static inline void decode(Type, const typename Type::Element* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) Vec::store(out + i, Type::load(x + i));
  for (; i < n; i++) out[i] = Type::to_float(x[i]);
}

}  // namespace
