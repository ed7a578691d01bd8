// An int4 cache: int8 in coarser steps, which becomes int8 again where it is read, chunk by chunk,
// in scratch. So everything behind that is as with an int8 cache: see quads_impl.h. Compiled once
// per instruction set.
#pragma once

#include "vectors_impl.h"

namespace {

constexpr int32_t kMostLevel = 15;
constexpr int32_t kLargestInt8 = 127;  // that is used

// Channels [begin, begin + width) of a head.
struct Int4Group {
  int64_t begin, width;
};

static inline Int4Group int4_group(const Problem& p, int64_t group) {
  const int64_t begin = group * kInt4Group;
  return {begin, min_of(kInt4Group, p.head_size - begin)};
}

// Where the parts of a tile lie, in bytes from its begin.
static inline int64_t int4_steps_at(const Problem& p, int64_t group) {
  return kTile * (p.head_size / 2 + 2 * group);
}

static inline int64_t int4_scales_at(const Problem& p) {
  return int4_steps_at(p, int4_groups(p.head_size));
}

// A token's levels, and what makes int8 of them. A level is a distance from the first in steps,
// rounded to the nearest. The first is the least number of a group, or less where the last level
// would be more than an int8 is; the largest number may lie up to seven behind the last level.
struct Levels {
  uint8_t pair[kMaxHeadSize / 2];  // of channels that are half a group apart
  uint8_t step[kMaxHeadSize / kInt4Group];
  int8_t first[kMaxHeadSize / kInt4Group];
  float scale;

  Levels(const Problem& p, const float* x) {
    int8_t numbers[kMaxHeadSize];
    scale = encode(Int8{}, x, p.head_size, numbers);
    for (int64_t g = 0; g < int4_groups(p.head_size); g++) {
      const Int4Group group = int4_group(p, g);
      const int8_t* from = numbers + group.begin;
      int32_t least = from[0], largest = from[0];
      for (int64_t i = 1; i < group.width; i++) {
        least = from[i] < least ? from[i] : least;
        largest = from[i] > largest ? from[i] : largest;
      }
      const int32_t nearest = (largest - least + kMostLevel / 2) / kMostLevel;
      const int32_t by = nearest > 1 ? nearest : 1;
      // so far down that the last level is an int8, too, if that can be
      const int32_t below = kLargestInt8 - kMostLevel * by;
      const int32_t lowest = least < below ? least : below;
      const int32_t start = lowest > -kLargestInt8 ? lowest : -kLargestInt8;
      const int32_t room = (kLargestInt8 - start) / by;
      const int32_t most = room < kMostLevel ? room : kMostLevel;
      // exact for what is divided here, below 2^9, by no more than 17
      const uint32_t inverse =
          (0x10000u + static_cast<uint32_t>(by) - 1) / static_cast<uint32_t>(by);
      uint8_t level[kInt4Group];
      for (int64_t i = 0; i < group.width; i++) {
        const auto distance = static_cast<uint32_t>(from[i] - start + by / 2);
        const auto found = static_cast<int32_t>(distance * inverse >> 16);
        level[i] = static_cast<uint8_t>(found < most ? found : most);
      }
      const int64_t half = group.width / 2;
      for (int64_t i = 0; i < half; i++)
        pair[group.begin / 2 + i] = static_cast<uint8_t>(level[i] | level[half + i] << 4);
      step[g] = static_cast<uint8_t>(by);
      first[g] = static_cast<int8_t>(start);
    }
  }

  // What is stored alike of keys and of values.
  void store_scales(const Problem& p, int64_t token, uint8_t* tile) const {
    for (int64_t g = 0; g < int4_groups(p.head_size); g++) {
      uint8_t* steps = tile + int4_steps_at(p, g) + token;
      steps[0] = step[g];
      memcpy(steps + kTile, first + g, 1);
    }
    memcpy(tile + int4_scales_at(p) + token * kScaleBytes, &scale, sizeof scale);
  }
};

// Writes a token's key, or value, into a tile. No byte there is another token's.
static inline void store_key_levels(const Problem& p, const float* x, int64_t token,
                                    uint8_t* tile) {
  const Levels levels(p, x);
  for (int64_t i = 0; i < p.head_size / 2; i += 4)
    memcpy(tile + i * kTile + token * 4, levels.pair + i, 4);
  levels.store_scales(p, token, tile);
}

static inline void store_value_levels(const Problem& p, const float* x, int64_t token,
                                      uint8_t* tile) {
  const Levels levels(p, x);
  uint8_t* out = tile + token / 4 * 2 * p.head_size + token % 4;
  for (int64_t i = 0; i < p.head_size / 2; i++) out[4 * i] = levels.pair[i];
  levels.store_scales(p, token, tile);
}

// The keys of a tile as int8 quads. A step is no more than 17, so that 15 times it fits into a
// byte, and one multiplication of 16 bits is two of bytes. The tile that is `ahead` bytes further on is asked
// for meanwhile, if any.
template <bool kAhead>
static inline void expand_keys(const Problem& p, const uint8_t* tile, int64_t ahead, int8_t* out) {
  for (int64_t g = 0; g < int4_groups(p.head_size); g++) {
    const Int4Group group = int4_group(p, g);
    const uint8_t* steps = tile + int4_steps_at(p, g);
    for (int t = 0; t < kTile; t += Vec::kWidth) {
      const Vec::Quads step = Vec::words_of(steps + t), first = Vec::quads_of(steps + kTile + t);
      if (kAhead) prefetch_ahead(steps + t, ahead);
      const int64_t half = group.width / 2;
      const uint8_t* from = tile + group.begin / 2 * kTile + t * 4;
      int8_t* to = out + group.begin * kTile + t * 4;
      for (int64_t i = 0; i < half; i += 4) {
        const Vec::Quads levels =
            Vec::load_quads(reinterpret_cast<const int8_t*>(from + i * kTile));
        if (kAhead) prefetch_ahead(from + i * kTile, ahead);
        Vec::store_quads(to + i * kTile,
                         Vec::add_bytes(Vec::mul_words(Vec::low_halves(levels), step), first));
        Vec::store_quads(to + (half + i) * kTile,
                         Vec::add_bytes(Vec::mul_words(Vec::high_halves(levels), step), first));
      }
    }
  }
}

// Four bytes in each quad.
static inline Vec::Quads set1_bytes(const uint8_t* p) {
  float bits;
  memcpy(&bits, p, sizeof bits);
  return Vec::set1_quad(&bits);
}

// Of steps, even ones are words that bytes in low places are multiplied with, and odd ones
// likewise.
static inline Vec::Quads values_of(Vec::Quads levels, Vec::Quads even, Vec::Quads odd,
                                   Vec::Quads first) {
  // a slot that nobody has written may hold any step, which is to spoil no other token's value
  const Vec::Quads low = Vec::even_bytes(Vec::mul_words(Vec::even_bytes(levels), even));
  const Vec::Quads products = Vec::add_bytes(low, Vec::mul_words(Vec::odd_bytes(levels), odd));
  return Vec::add_bytes(products, first);
}

// The values of a tile as int8 quads, `stride` bytes from one of tokens to the next.
template <bool kAhead>
static inline void expand_values(const Problem& p, const uint8_t* tile, int64_t ahead,
                                 int64_t stride, int8_t* out) {
  for (int64_t g = 0; g < int4_groups(p.head_size); g++) {
    const Int4Group group = int4_group(p, g);
    const int64_t half = group.width / 2;
    if (kAhead) prefetch_ahead(tile + int4_steps_at(p, g), ahead);
    for (int64_t quad = 0; quad < kTile / 4; quad++) {
      const uint8_t* steps = tile + int4_steps_at(p, g) + quad * 4;
      const uint8_t* from = tile + quad * 2 * p.head_size + group.begin * 2;
      int8_t* to = out + quad * stride + group.begin * 4;
      if (half % Vec::kWidth) {
        for (int64_t i = 0; i < half * 4; i++) {
          const int step = steps[i % 4], first = static_cast<int8_t>(steps[kTile + i % 4]);
          to[i] = static_cast<int8_t>(first + (from[i] & 15) * step);
          to[half * 4 + i] = static_cast<int8_t>(first + (from[i] >> 4) * step);
        }
        continue;
      }
      const Vec::Quads all = set1_bytes(steps), first = set1_bytes(steps + kTile);
      const Vec::Quads even = Vec::even_bytes(all), odd = Vec::high_bytes(all);
      for (int64_t i = 0; i < half; i += Vec::kWidth) {
        const Vec::Quads levels = Vec::load_quads(reinterpret_cast<const int8_t*>(from + i * 4));
        if (kAhead) prefetch_ahead(from + i * 4, ahead);
        Vec::store_quads(to + i * 4, values_of(Vec::low_halves(levels), even, odd, first));
        Vec::store_quads(to + (half + i) * 4,
                         values_of(Vec::high_halves(levels), even, odd, first));
      }
    }
  }
}

// Where the int8 quads of a chunk's tiles go: so that AMX's kernel, which keeps other things at the
// begin and at the end of the scratch, has room for them.
template <>
struct TileSource<Int4, true> {
  static inline void load(const Problem& p, const int32_t* table, int64_t head, int64_t first,
                          int64_t, int i, const TileScratch& scratch, Tiles<Int8>& out) {
    const int64_t base = first / kTile * kTile, row = padded(p.head_size);
    const int64_t at = tile_at<Int4>(p, table[base / p.block_size], base % p.block_size, head);
    const uint8_t* key = static_cast<const uint8_t*>(p.key_cache) + at;
    const uint8_t* value = static_cast<const uint8_t*>(p.value_cache) + at;
    const int64_t tile_floats = kTile / 4 * row;
    auto* keys = reinterpret_cast<int8_t*>(scratch.key + 2 * kTile * row + i * tile_floats);
    auto* values = reinterpret_cast<int8_t*>(scratch.value + kTile * row + i * tile_floats);
    if (const int64_t ahead = out.ahead[i]) {
      prefetch_ahead(key + int4_scales_at(p), ahead);
      prefetch_ahead(value + int4_scales_at(p), ahead);
      expand_keys<true>(p, key, ahead, keys);
      expand_values<true>(p, value, ahead, 4 * row, values);
    } else {
      expand_keys<false>(p, key, 0, keys);
      expand_values<false>(p, value, 0, 4 * row, values);
    }
    out.key[i] = keys;
    out.value[i] = values;
    out.value_stride[i] = 4 * row;
    out.key_scale[i] = reinterpret_cast<const float*>(key + int4_scales_at(p));
    out.value_scale[i] = reinterpret_cast<const float*>(value + int4_scales_at(p));
  }
};

}  // namespace
