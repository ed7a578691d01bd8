// Turns a stretch of cached keys and values into what the micro-kernels read: per tile of sixteen
// tokens, keys [head_size][16] and values [16][stride], or pairs or quads of them. Tiles that lie so
// in the cache are used there, in the cache's type, where few rows share them, pairs and quads
// always; everything else is converted to float into scratch. Compiled once per instruction set.
#pragma once

#include "cache_impl.h"

namespace {

// Not plain inline: GCC takes a function that only prefetches for one without effect, and drops it.
#if defined(_MSC_VER)
#define ONNXPORT_PREFETCHES static inline
ONNXPORT_PREFETCHES void prefetch(const char*) {}
#else
#define ONNXPORT_PREFETCHES static inline __attribute__((always_inline))
ONNXPORT_PREFETCHES void prefetch(const char* p) {
  __builtin_prefetch(p, 0, Vec::kAsksFar ? 2 : 3);
}
#endif

ONNXPORT_PREFETCHES void prefetch_bytes(const char* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(begin + i);
}

constexpr int kTilesPerChunk = kChunk / kTile;

// The scales of an int8 cache are not applied: they are null for other types. From one value to the
// next, or in pairs and quads from one of tokens to the next, it is value_stride elements.
template <class Type>
struct Tiles {
  using Element = typename Type::Element;
  const Element* key[kTilesPerChunk];
  const Element* value[kTilesPerChunk];
  int64_t value_stride[kTilesPerChunk];
  const float* key_scale[kTilesPerChunk];  // [16] each
  const float* value_scale[kTilesPerChunk];
  // Bytes from a tile, of keys as of values, to the one in its place in the chunk that is read next,
  // which is asked for meanwhile: a block table leads anywhere, so the processor's own prefetching ends
  // here. Zero: none is, and what is there already is asked for.
  int64_t ahead[kTilesPerChunk];
};

template <class Type>
static inline void clear_ahead(Tiles<Type>& tiles) {
  for (int64_t& bytes : tiles.ahead) bytes = 0;
}

struct TileScratch {
  float* key;    // [kChunk / 16][padded head size][16]
  float* value;  // [kChunk][padded head size], of latent rows, too
  float* row;    // [16][padded head size]
};

// Vectors of a value may be read whole, without running into what follows.
static inline bool whole_vectors(const Problem& p) { return p.head_size % Vec::kWidth == 0; }

template <class Type>
constexpr bool is_float32() {
  return sizeof(typename Type::Element) == sizeof(float);
}

static inline void transpose_tile(const float* const* rows, int64_t head_size, float* key) {
  for (int64_t d = 0; d < head_size; d += Vec::kWidth)
    for (int t = 0; t < kTile; t += Vec::kWidth) Vec::transpose(rows + t, d, key + d * kTile + t);
}

// Loads one tile, whose tokens [first, last) are wanted; no block outside of these is looked up.
// Lanes outside hold anything. Out is the cache's type, or Float32 for a converted tile.
template <class Type, bool kIsTiled>
struct TileSource;

template <class Type>
struct TileSource<Type, true> {
  template <class Out>
  static inline void load(const Problem& p, const int32_t* table, int64_t head, int64_t first,
                          int64_t last, int i, const TileScratch& scratch, Tiles<Out>& out) {
    using Element = typename Type::Element;
    constexpr bool kDirect = sizeof(Element) == sizeof(typename Out::Element);
    const int64_t base = first / kTile * kTile;
    const int64_t at = tile_at<Type>(p, table[base / p.block_size], base % p.block_size, head);
    const Element* key = static_cast<const Element*>(p.key_cache) + at;
    const Element* value = static_cast<const Element*>(p.value_cache) + at;
    const int64_t row = padded(p.head_size);
    if constexpr (has_scales<Type>()) {
      out.key_scale[i] = scales_of(p, key);
      out.value_scale[i] = scales_of(p, value);
    }
    constexpr int64_t kSide = neighbours<Type>();
    if constexpr (kSide > 1) {
      out.key[i] = key;
      out.value[i] = value;
      out.value_stride[i] = kSide * p.head_size;
      if (whole_vectors(p)) return;
      Element* values = reinterpret_cast<Element*>(scratch.value + i * kTile * row);
      for (int64_t t = 0; t < kTile / kSide; t++)
        memcpy(values + t * kSide * row, value + t * kSide * p.head_size,
               static_cast<size_t>(kSide * p.head_size) * sizeof(Element));
      out.value[i] = values;
      out.value_stride[i] = kSide * row;
    } else {
      if constexpr (kDirect) {
        out.key[i] = key;
        if (whole_vectors(p)) {
          out.value[i] = value;
          out.value_stride[i] = p.head_size;
          return;
        }
      } else {
        float* keys = scratch.key + i * kTile * row;
        decode(Type{}, key, p.head_size * kTile, keys);
        out.key[i] = keys;
      }
      // Without whole vectors, Out is Float32: see attend_keys_for.
      if constexpr (is_float32<Out>()) {
        float* values = scratch.value + i * kTile * row;
        for (int64_t t = first - base; t < last - base; t++)
          decode(Type{}, value + t * p.head_size, p.head_size, values + t * row);
        out.value[i] = values;
        out.value_stride[i] = row;
      }
    }
  }
};

template <class Type>
struct TileSource<Type, false> {
  static inline void load(const Problem& p, const int32_t* table, int64_t head, int64_t first,
                          int64_t last, int i, const TileScratch& scratch, Tiles<Float32>& out) {
    using Element = typename Type::Element;
    const Element* keys = static_cast<const Element*>(p.key_cache);
    const Element* values = static_cast<const Element*>(p.value_cache);
    const int64_t base = first / kTile * kTile, row = padded(p.head_size);
    const bool direct = is_float32<Type>() && whole_vectors(p);
    const bool one_block = first / p.block_size == (last - 1) / p.block_size;

    const float* rows[kTile];
    float* value = scratch.value + i * kTile * row;
    out.value[i] = value;
    out.value_stride[i] = row;
    for (int t = 0; t < kTile; t++) rows[t] = scratch.row;
    for (int64_t token = first; token < last; token++) {
      const int64_t t = token - base;
      const int64_t at =
          canonical_at(p, table[token / p.block_size], token % p.block_size, head);
      if constexpr (is_float32<Type>()) {
        rows[t] = keys + at;
        if (direct && one_block) {
          // Only the wanted rows are ever read, so the tile may begin before its block does.
          out.value_stride[i] = p.kv_heads * p.head_size;
          if (token == first) out.value[i] = values + at - t * out.value_stride[i];
          continue;
        }
      }
      if (!direct) {
        rows[t] = scratch.row + t * row;
        decode(Type{}, keys + at, p.head_size, scratch.row + t * row);
      }
      decode(Type{}, values + at, p.head_size, value + t * row);
    }
    float* key = scratch.key + i * kTile * row;
    transpose_tile(rows, p.head_size, key);
    out.key[i] = key;
  }
};

}  // namespace
