// Attention of a block of rows by AMX: sixteen rows with sixteen keys or channels at once, from pairs
// of bfloat16 and from int8. Softmax is that of the other sets. One row's products go the same way
// as many rows', whose sums of bfloat16 AMX adds in an order of its own.
#pragma once

#include "amx.h"

namespace {

constexpr int kRegisterTiles = 2;  // of sixteen rows, whose products go together
static_assert(kRegisterTiles * kRegisterRows == kScoreRows, "see softmax()");

// Tokens whose weights fill a row of a tile register, so that values of as many are added at once.
template <class Type>
constexpr int tokens_per_step() {
  return kRegisterBytes / static_cast<int>(sizeof(typename Type::Element));
}

// Bytes of a prepared query, and from one to the next.
template <class Type>
static inline int64_t query_bytes(const Problem& p) {
  return p.head_size * static_cast<int64_t>(sizeof(typename Type::Element));
}

static inline int64_t query_stride(const Problem& p) {
  return query_floats(p) * static_cast<int64_t>(sizeof(float));
}

// Whether a query fills rows of tile registers, and a value's channels their columns.
template <class Type>
static inline bool fills_registers(const Problem& p) {
  return query_bytes<Type>(p) % kRegisterBytes == 0;
}

// What stands on the left of a product: rows of bytes, sixteen in each of up to two tiles.
struct Left {
  const char* tile[kRegisterTiles];
  int64_t stride;  // from one row to the next
};

// And on the right: up to two columns of sixteen numbers, next to each other in the result.
struct Right {
  const char* column[2];
  int64_t stride;  // from one row of pairs or quads to the next
  int64_t step;    // from one step's rows to the next one's
};

enum class Product { kPairs, kSigned, kUnsigned };  // the last: uint8 on the left

// A name of a register has to be a literal.
#define ONNXPORT_DOT(sum, left, right)                \
  do {                                                \
    if constexpr (kProduct == Product::kPairs)        \
      _tile_dpbf16ps(sum, left, right);               \
    else if constexpr (kProduct == Product::kSigned)  \
      _tile_dpbssd(sum, left, right);                 \
    else                                              \
      _tile_dpbusd(sum, left, right);                 \
  } while (false)

// out[tile * 16 + row][column * 16 ...] = left x right, summed over the steps, in float or int32.
// out_stride is in bytes.
template <Product kProduct, int kTiles, int kColumns>
static inline void multiply_registers(const Left& left, const Right& right, int64_t steps, char* out,
                                      int64_t out_stride) {
  const auto rows = static_cast<size_t>(left.stride), columns = static_cast<size_t>(right.stride);
  _tile_zero(0);
  if constexpr (kTiles > 1) _tile_zero(1);
  if constexpr (kColumns > 1) _tile_zero(2);
  if constexpr (kTiles > 1 && kColumns > 1) _tile_zero(3);
  for (int64_t s = 0; s < steps; s++) {
    _tile_loadd(6, right.column[0] + s * right.step, columns);
    _tile_loadd(4, left.tile[0] + s * kRegisterBytes, rows);
    ONNXPORT_DOT(0, 4, 6);
    if constexpr (kTiles > 1) {
      _tile_loadd(5, left.tile[1] + s * kRegisterBytes, rows);
      ONNXPORT_DOT(1, 5, 6);
    }
    if constexpr (kColumns > 1) {
      _tile_loadd(7, right.column[1] + s * right.step, columns);
      ONNXPORT_DOT(2, 4, 7);
      if constexpr (kTiles > 1) ONNXPORT_DOT(3, 5, 7);
    }
  }
  const auto apart = static_cast<size_t>(out_stride);
  _tile_stored(0, out, apart);
  if constexpr (kColumns > 1) _tile_stored(2, out + kRegisterBytes, apart);
  if constexpr (kTiles > 1) {
    char* second = out + kRegisterRows * out_stride;
    _tile_stored(1, second, apart);
    if constexpr (kColumns > 1) _tile_stored(3, second + kRegisterBytes, apart);
  }
}

#undef ONNXPORT_DOT

// Likewise for numbers that are known at run time.
template <Product kProduct, int kColumns>
static inline void multiply_registers(const Left& left, int tiles, const Right& right,
                                      int64_t steps, char* out, int64_t out_stride) {
  if (tiles == 1)
    multiply_registers<kProduct, 1, kColumns>(left, right, steps, out, out_stride);
  else
    multiply_registers<kProduct, 2, kColumns>(left, right, steps, out, out_stride);
}

// Of sixteen integers that lie where floats will.
static inline Vec::T converted(const float* integers) {
  return Vec::to_floats(_mm512_loadu_si512(integers));
}

// One chunk of keys, from key `base` on, and rows over it.
template <class Type, bool kAhead>
struct RegisterChunk {
  using Element = typename Type::Element;
  static constexpr int kStep = tokens_per_step<Type>();
  static constexpr bool kFloats = is_paired<Type>();

  const Rows& rows;
  int64_t base, begin, end;  // the tokens that there are
  const Tiles<Type>& tiles;
  const State& state;
  const float* last_queries;  // of rows that do not fill a tile, and others
  float* scores;              // [kScoreRows][kChunk]
  float* products;            // [kScoreRows][value_size]
  Element* copies;            // [kChunk][value_size]
  const Element* values[kChunk / kStep] = {};  // of a step, [kStep / neighbours][value_size][neighbours]

  int64_t value_row() const { return rows.value_size * neighbours<Type>(); }

  // Puts the values of each step together where they are not so in the cache. Of those that are not
  // there, no number may reach a product of floats.
  void collect_values() {
    for (int s = 0; s < kChunk / kStep; s++) {
      const int first = s * kStep / kTile, last = (s + 1) * kStep / kTile;
      const int64_t from = base + s * kStep;
      if (kAhead)
        for (int i = first; i < last; i++)
          if (covers(i))
            prefetch_bytes(reinterpret_cast<const char*>(tiles.value[i]) + tiles.ahead[i],
                           tile_bytes());
      const bool all = begin <= from && from + kStep <= end;
      if (all && kFloats && !rows.p.latent && tiles.value[first] + kTile * rows.value_size == tiles.value[first + 1]) {
        values[s] = tiles.value[first];
        continue;
      }
      Element* out = copies + s * kStep * rows.value_size;
      values[s] = out;
      if (rows.p.latent) {  // they were made there
        for (int i = first; i < last; i++, out += kTile * rows.value_size)
          if (!covers(i)) copy(i, out);
        continue;
      }
      for (int i = first; i < last; i++, out += kTile * rows.value_size) copy(i, out);
    }
  }

  int64_t tile_bytes() const {
    return kTile * (rows.head_size + Type::kScaleElements) * static_cast<int64_t>(sizeof(Element));
  }

  // Whether any token of a tile is there.
  bool covers(int tile) const {
    const int64_t from = base + tile * kTile;
    return from < end && begin < from + kTile;
  }

  void copy(int tile, Element* out) const {
    const auto bytes = static_cast<size_t>(kTile * rows.value_size) * sizeof(Element);
    const int64_t from = base + tile * kTile;
    if (!covers(tile)) {
      if (kFloats) memset(out, 0, bytes);
      return;
    }
    memcpy(out, tiles.value[tile], bytes);
    if constexpr (kFloats)
      for (int64_t t = 0; t < kTile; t++)
        if (from + t < begin || from + t >= end) clear_value(out + t / 2 * value_row() + t % 2);
  }

  void clear_value(Element* pairs) const {
    for (int64_t i = 0; i < rows.value_size; i++) pairs[2 * i] = 0;
  }

  // Rows [row, row + count), at most kScoreRows.
  void attend(int64_t row, int64_t count, bool asks) const {
    Sight sights[kScoreRows];
    float factors[kScoreRows], scales[kScoreRows];
    const bool whole = see_all(rows, base, end, row, count);
    const Sight seen = whole ? Sight{0, kChunk, 0, kChunk}
                             : look(rows, base, end, row, count, kStep, sights);
    if (seen.first >= seen.last) return;
    const int number = count > kRegisterRows ? 2 : 1;
    score(row, count, number, seen, asks);
    softmax<Type>(whole ? nullptr : sights, static_cast<int>(count), rows.p.softcap,
                  tiles.value_scale, scores, state.maximum + row, state.sum + row * 16, factors,
                  scales);
    add(row, count, number, seen, factors, scales);
  }

  // Query rows, those past the block's last one from where they were put together with others.
  Left queries(int64_t row) const {
    Left left{{}, query_stride(rows.p)};
    for (int i = 0; i < kRegisterTiles; i++, row += kRegisterRows) {
      const bool inside = row + kRegisterRows <= rows.count;
      const float* from = inside ? rows.queries + row * query_floats(rows.p) : last_queries;
      left.tile[i] = reinterpret_cast<const char*>(from);
    }
    return left;
  }

  void score(int64_t row, int64_t count, int number, const Sight& seen, bool asks) const {
    constexpr Product kProduct = kFloats ? Product::kPairs : Product::kSigned;
    const Left left = queries(row);
    const int64_t steps = query_bytes<Type>(rows.p) / kRegisterBytes;
    constexpr int64_t kKeyStep = kRegisterRows * kRegisterBytes;
    const int last = (seen.last + kTile - 1) / kTile;
    const auto key = [&](int i) { return reinterpret_cast<const char*>(tiles.key[i]); };
    for (int i = seen.first / kTile; i < last;) {
      char* out = reinterpret_cast<char*>(scores + i * kTile);
      const int columns = i + 2 <= last ? 2 : 1;
      const Right right{{key(i), columns == 2 ? key(i + 1) : nullptr}, kRegisterBytes, kKeyStep};
      if (kAhead && asks)
        for (int c = 0; c < columns; c++)
          prefetch_bytes(right.column[c] + tiles.ahead[i + c], tile_bytes());
      constexpr int64_t kRow = kChunk * sizeof(float);
      if (columns == 2)
        multiply_registers<kProduct, 2>(left, number, right, steps, out, kRow);
      else
        multiply_registers<kProduct, 1>(left, number, right, steps, out, kRow);
      if constexpr (!kFloats)
        for (int c = 0; c < columns; c++) scale_sums(row, count, i + c);
      i += columns;
    }
  }

  // Integers to logits, as score_quads() has them.
  void scale_sums(int64_t row, int64_t count, int tile) const {
    const Vec::T key_scale = Vec::load(tiles.key_scale[tile]);
    const int64_t stride = query_floats(rows.p);
    const float* query = rows.queries + row * stride + rows.head_size / 4;
    float* to = scores + tile * kTile;
    for (int64_t r = 0; r < count; r++, query += stride, to += kChunk)
      Vec::store(to, Vec::mul(converted(to), Vec::mul(key_scale, Vec::set1(*query))));
  }

  void add(int64_t row, int64_t count, int number, const Sight& seen, const float* factors,
           const float* scales) const {
    constexpr Product kProduct = kFloats ? Product::kPairs : Product::kUnsigned;
    constexpr int64_t kRow = kChunk * sizeof(float);
    const int first = seen.first / kStep, steps = (seen.last + kStep - 1) / kStep - first;
    const char* weights = reinterpret_cast<const char*>(scores) + first * kRegisterBytes;
    const Left left{{weights, weights + kRegisterRows * kRow}, kRow};
    const int64_t value_bytes = value_row() * static_cast<int64_t>(sizeof(Element));
    const char* value = reinterpret_cast<const char*>(values[first]);
    const int64_t step =
        steps > 1 ? reinterpret_cast<const char*>(values[first + 1]) - value : 0;
    const int64_t row_bytes = rows.value_size * static_cast<int64_t>(sizeof(float));
    finish_writes();
    for (int64_t c = 0; c < rows.value_size; c += 2 * kTile) {
      const char* column = value + c * 4;
      const Right right{{column, column + kRegisterBytes}, value_bytes, step};
      multiply_registers<kProduct, 2>(left, number, right, steps,
                                      reinterpret_cast<char*>(products + c), row_bytes);
    }
    float* sums = state.value + row * rows.padded_size;
    const float* product = products;
    for (int64_t r = 0; r < count; r++, sums += rows.padded_size, product += rows.value_size) {
      const Vec::T by = Vec::set1(factors[r]);
      for (int64_t c = 0; c < rows.value_size; c += kTile) {
        const Vec::T before = Vec::load(sums + c);
        if constexpr (kFloats)
          Vec::store(sums + c, Vec::fma(by, before, Vec::load(product + c)));
        else
          Vec::store(sums + c, Vec::fma(Vec::set1(scales[r]), converted(product + c),
                                        Vec::mul(by, before)));
      }
    }
  }
};

// The queries of the block's last rows where they do not fill a tile, with zeros behind them.
static inline void pad_queries(const Rows& rows, float* out) {
  const int64_t stride = query_floats(rows.p), whole = rows.count / kRegisterRows * kRegisterRows;
  const auto bytes = static_cast<size_t>((rows.count - whole) * stride) * sizeof(float);
  memset(out, 0, static_cast<size_t>(kRegisterRows * stride) * sizeof(float));
  memcpy(out, rows.queries + whole * stride, bytes);
}

// See attend_keys(). Cached is what the cache holds.
template <class Type, bool kAhead, class Cached = Type>
static void attend_keys_amx(const Rows& rows, int64_t first, int64_t last, const State& state,
                            const TileScratch& scratch, float* scores) {
  const Problem& p = rows.p;
  const int32_t* table = p.block_table + rows.block.sequence * p.table_width;
  const TileConfiguration configuration;
  finish_writes();
  _tile_loadconfig(&configuration);
  pad_queries(rows, scratch.key);
  auto* copies = reinterpret_cast<typename Type::Element*>(scratch.value);
  float* products = scratch.value + kChunk * rows.padded_size / 2;
  alignas(64) constexpr float kNoScales[kTile] = {};
  if (kAhead || p.latent) ask_for_first<Cached>(rows, first);
  for (int64_t base = first / kChunk * kChunk; base < last; base += kChunk) {
    const int64_t begin = max_of(first, base), end = min_of(last, base + kChunk);
    Tiles<Type> tiles;
    if constexpr (has_scales<Type>())
      for (int i = 0; i < kTilesPerChunk; i++) tiles.value_scale[i] = kNoScales;
    if constexpr (MadeTiles<Cached>::kAre) clear_ahead(tiles);
    if (p.latent) look_ahead<Cached>(rows, base, end, tiles.ahead);
    load_tiles<Cached, true>(p, table, rows.block.kv_head, base, begin, end, scratch, tiles);
    if constexpr (kAhead) look_ahead<Type>(rows, base, end, tiles.ahead);
    RegisterChunk<Type, kAhead> chunk{rows,        base,   begin,    end,   tiles, state,
                                      scratch.key, scores, products, copies};
    chunk.collect_values();
    finish_writes();
    for (int64_t row = 0; row < rows.count; row += kScoreRows)
      chunk.attend(row, min_of(rows.count - row, kScoreRows), row == 0);
  }
  _tile_release();
}

static inline AttendKeys attend_latent_amx_for(const Problem& p, int64_t rows) {
  if (p.value_size % (2 * kTile) != 0) return nullptr;
  if (p.cache_layout == kPaired && fills_registers<PairedBFloat16>(p))
    return attend_keys_amx<PairedBFloat16, false, Latent<PairedBFloat16>>;
  if (p.cache_type == kInt8 && fills_registers<Int8>(p) && rows >= kRegisterRows)
    return attend_keys_amx<Int8, false, Latent<Int8>>;
  return nullptr;
}

static inline AttendKeys attend_keys_amx_for(const Problem& p, int64_t rows) {
  if (p.latent) return attend_latent_amx_for(p, rows);
  const bool few = rows <= kScoreRows;
  if (p.cache_layout == kPaired && fills_registers<PairedBFloat16>(p))
    return few ? attend_keys_amx<PairedBFloat16, true> : attend_keys_amx<PairedBFloat16, false>;
  // Sums of integers are exact, so few rows may go the other way, which is faster for them.
  if (p.cache_type == kInt8 && fills_registers<Int8>(p) && !few)
    return attend_keys_amx<Int8, false>;
  if (p.cache_type == kInt4 && fills_registers<Int8>(p) && !few)
    return attend_keys_amx<Int8, false, Int4>;
  return nullptr;
}

}  // namespace
