// Latent rows, which are keys and whose first channels are values: tiles of both are made in scratch of
// what is read once. Rows are the cache's own memory, or decoded, and values stay as they lie there;
// keys are turned over. In pairs and quads, rows are copies of bits: what is turned over are pairs or
// quads of channels, and values are shuffled together. Compiled once per instruction set.
#pragma once

#include "vectors_impl.h"

namespace {

// What stands for rows that are not there.
alignas(64) const float kNoRow[kMaxLatentSize] = {};

// Sixteen rows of the cache, those of tokens [first, last) and otherwise `missing`.
template <class Type>
struct LatentRows {
  using Element = typename Type::Element;
  const Element* row[kTile];
  bool in_one_block;

  LatentRows(const Problem& p, const int32_t* table, int64_t first, int64_t last,
             const Element* missing)
      : in_one_block(first / p.block_size == (last - 1) / p.block_size) {
    const auto* cache = static_cast<const Element*>(p.key_cache);
    const int64_t base = first / kTile * kTile;
    for (const Element*& one : row) one = missing;
    for (int64_t token = first; token < last; token++)
      row[token - base] = cache + latent_at<Type>(p, table[token / p.block_size],
                                                  token % p.block_size);
  }
};

// As transpose_tile(), for any number of units of as many bits as a float, which end with their rows.
// What is so many bytes further on than these is asked for meanwhile; 0: nothing.
static inline void turn_over(const float* const* rows, int64_t units, int64_t ahead, float* out) {
  const int64_t whole = units / Vec::kWidth * Vec::kWidth;
  for (int64_t d = 0; d < whole; d += Vec::kWidth) {
    for (int t = 0; t < kTile; t += Vec::kWidth) Vec::transpose(rows + t, d, out + d * kTile + t);
    if (ahead && d % 16 == 0)
      for (int t = 0; t < kTile; t++) prefetch_ahead(rows[t] + d, ahead);
  }
  for (int64_t d = whole; d < units; d++)
    for (int t = 0; t < kTile; t++) memcpy(out + d * kTile + t, rows[t] + d, sizeof *out);
}

// What is read here are tiles, though none are stored.
template <class Type>
struct TileSource<Latent<Type>, true> {
  using Element = typename Type::Element;

  template <class Out>
  static inline void load(const Problem& p, const int32_t* table, int64_t, int64_t first,
                          int64_t last, int i, const TileScratch& scratch, Tiles<Out>& out) {
    const auto* missing = reinterpret_cast<const Element*>(kNoRow);
    const LatentRows<Type> rows(p, table, first, last, missing);
    if constexpr (neighbours<Type>() == 1)
      load_floats(p, rows, first, last, i, scratch, out);
    else
      load_neighbours(p, rows, i, scratch, out);
  }

  // Only rows of tokens that are there are read as values, which may begin before their block does.
  static inline void load_floats(const Problem& p, const LatentRows<Type>& cached, int64_t first,
                                 int64_t last, int i, const TileScratch& scratch,
                                 Tiles<Float32>& out) {
    const int64_t size = p.head_size, from = first % kTile, to = from + last - first;
    float* values = scratch.value + i * kTile * size;
    const float* rows[kTile];
    for (const float*& row : rows) row = kNoRow;
    out.value[i] = values;
    out.value_stride[i] = size;
    for (int64_t t = from; t < to; t++) {
      if constexpr (is_float32<Type>()) {
        rows[t] = cached.row[t];
        if (cached.in_one_block) continue;
      } else {
        rows[t] = values + t * size;
      }
      if (const int64_t ahead = out.ahead[i])
        prefetch_bytes(reinterpret_cast<const char*>(cached.row[t]) + ahead,
                       size * static_cast<int64_t>(sizeof(Element)));
      decode(Type{}, cached.row[t], size, values + t * size);
    }
    if constexpr (is_float32<Type>())
      if (cached.in_one_block) out.value[i] = cached.row[from] - from * size;
    float* keys = scratch.key + i * kTile * size;
    turn_over(rows, size, is_float32<Type>() ? out.ahead[i] : 0, keys);
    out.key[i] = keys;
  }

  // Where the tiles go: AMX's kernel has room for padded queries at the begin, and wants the values
  // of a chunk one behind the other at the begin, with zeros for what is not there.
  static inline void load_neighbours(const Problem& p, const LatentRows<Type>& cached, int i,
                                     const TileScratch& scratch, Tiles<Type>& out) {
    constexpr int64_t kSide = neighbours<Type>();
    const int64_t units = p.head_size / kSide;  // of as many bits as a float
    float* keys = scratch.key + 2 * kTile * p.head_size + i * kTile * units;
    auto* values = reinterpret_cast<Element*>(scratch.value) + i * kTile * p.value_size;
    const float* rows[kTile];
    for (int t = 0; t < kTile; t++) rows[t] = reinterpret_cast<const float*>(cached.row[t]);
    turn_over(rows, units, out.ahead[i], keys);
    for (int t = 0; t < kTile; t += kSide)
      interleave(cached.row + t, p.value_size, values + t * p.value_size);
    out.key[i] = reinterpret_cast<const Element*>(keys);
    out.value[i] = values;
    out.value_stride[i] = kSide * p.value_size;
    if constexpr (has_scales<Type>()) {
      float* scales = scratch.row + i * kTile;
      for (int t = 0; t < kTile; t++)
        memcpy(scales + t, cached.row[t] + p.head_size, sizeof scales[t]);
      out.key_scale[i] = out.value_scale[i] = scales;
    }
  }

  // Two numbers, or four, of each channel side by side.
  static inline void interleave(const Element* const* rows, int64_t n, Element* __restrict out) {
    const Element *a = rows[0], *b = rows[1];
    if constexpr (neighbours<Type>() == 2) {
      for (int64_t c = 0; c < n; c++) {
        out[2 * c] = a[c];
        out[2 * c + 1] = b[c];
      }
    } else {
      const Element *x = rows[2], *y = rows[3];
      for (int64_t c = 0; c < n; c++) {
        out[4 * c] = a[c];
        out[4 * c + 1] = b[c];
        out[4 * c + 2] = x[c];
        out[4 * c + 3] = y[c];
      }
    }
  }
};

}  // namespace
