// Attention of a block of rows over the cache, built from the micro-kernels. Included last by each
// instruction set's source file, which defines ONNXPORT_KERNELS_NAME. Compiled once per set.
#pragma once

#include "conv_impl.h"
#include "delta_impl.h"
#include "gate_impl.h"
#include "lora_impl.h"
#include "micro_impl.h"
#include "prepare_impl.h"
#include "row_product_impl.h"

namespace {

struct Rows {
  const Problem& p;
  const RowBlock block;
  const float* queries;  // of the first row
  int64_t count;
  int64_t group;
  int64_t head_size;
  int64_t value_size;
  int64_t padded_size;  // of values
  const Reading reading;
  KeyRange keys[kRowBlock];  // that each row sees

  Rows(const Problem& problem, const float* all_queries, const RowBlock& row_block,
       const Reading& around)
      : p(problem),
        block(row_block),
        queries(nullptr),
        count(row_block.row_end - row_block.row_begin),
        group(p.num_heads / p.kv_heads),
        head_size(p.head_size),
        value_size(p.value_size),
        padded_size(padded(p.value_size)),
        reading(around) {
    const int64_t first = block.kv_head * p.num_tokens + p.cumulative_lengths[block.sequence];
    if (all_queries) queries = all_queries + (first * group + block.row_begin) * query_floats(p);
    for (int64_t row = 0; row < count; row++)
      keys[row] = block.shared_keys
                      ? KeyRange{0, block.shared_keys}
                      : visible_keys(p, block.sequence, (block.row_begin + row) / group);
  }

  // The keys that any row of the block sees.
  KeyRange all_keys() const { return {keys[0].first, keys[count - 1].last}; }
};

static inline void clear(const State& state, int64_t count, int64_t padded_size) {
  for (int64_t i = 0; i < count; i++) state.maximum[i] = kHidden;
  memset(state.sum, 0, static_cast<size_t>(count * 16) * sizeof(float));
  memset(state.value, 0, static_cast<size_t>(count * padded_size) * sizeof(float));
}

// Whether each of rows [row, row + count) sees all keys of the chunk from `base` on, of which those
// before `end` are there. What a row sees begins and ends no earlier than what the row before sees.
static inline bool see_all(const Rows& rows, int64_t base, int64_t end, int64_t row,
                           int64_t count) {
  return rows.keys[row].last >= base + kChunk && rows.keys[row + count - 1].first <= base &&
         end == base + kChunk;
}

// Finds what each of these rows sees of the chunk. Returns the tokens that any of them sees, and what
// logits they are to have: of whole steps of so many tokens, or none.
static inline Sight look(const Rows& rows, int64_t base, int64_t end, int64_t row, int64_t count,
                         int step, Sight* sights) {
  for (int64_t r = 0; r < count; r++) {
    const KeyRange& keys = rows.keys[row + r];
    sights[r].first = static_cast<int>(max_of(keys.first - base, 0));
    sights[r].last = static_cast<int>(min_of(keys.last, end) - base);
  }
  Sight all{sights[0].first, sights[count - 1].last, 0, 0};
  if (all.first < all.last) {
    all.begin = all.first / step * step;
    all.end = (all.last + step - 1) / step * step;
  }
  for (int64_t r = 0; r < count; r++) {
    sights[r].begin = all.begin;
    sights[r].end = all.end;
  }
  return all;
}

// One chunk of keys, from key `base` on, and rows over it.
template <class Type, bool kAhead>
struct Chunk {
  static constexpr int kMostRows = most_rows<Type>();

  const Rows& rows;
  int64_t base, end;  // end: of the keys that there are
  const Tiles<Type>& tiles;
  const State& state;
  float* scores;  // [kMostScoreRows][kChunk]

  // Up to kMostRows rows, whose products go together, and the tokens that any of them sees.
  struct Group {
    int64_t row, count;
    int first, last;
    float* scores;
    const float *factors, *scales;
  };

  // Rows [row, row + count) at most kScoreRows.
  void attend(int64_t row, int64_t count) const {
    Group groups[kScoreRows / kMostRows];
    Sight sights[kScoreRows];
    float factors[kScoreRows], scales[kScoreRows];
    const bool whole = see_all(rows, base, end, row, count);
    // Groups of even size: seven rows are 4 + 3 where six fit, rather than 6 + 1.
    const int64_t number = (count + kMostRows - 1) / kMostRows;
    for (int64_t g = 0; g < number; g++) {
      const int64_t first = count * g / number;
      Group& group = groups[g];
      group.row = row + first;
      group.count = count * (g + 1) / number - first;
      group.first = 0;
      group.last = kChunk;
      group.scores = scores + first * kChunk;
      group.factors = factors + first;
      group.scales = scales + first;
      if (!whole) {
        const Sight seen = look(rows, base, end, group.row, group.count, kTile, sights + first);
        group.first = seen.first;
        group.last = seen.last;
      }
      if (group.first >= group.last) continue;
      // Only the first group asks for the next chunk: one of them is enough.
      if (kAhead && g == 0)
        score<kAhead, kMostRows>(group);
      else
        score<false, kMostRows>(group);
    }
    softmax<Type>(whole ? nullptr : sights, static_cast<int>(count), rows.p.softcap,
                  tiles.value_scale, scores, state.maximum + row, state.sum + row * 16, factors,
                  scales);
    for (int64_t g = 0; g < number; g++) {
      if (groups[g].first >= groups[g].last) continue;
      if (kAhead && g == 0)
        add<kAhead, kMostRows>(groups[g]);
      else
        add<false, kMostRows>(groups[g]);
    }
  }

  // Calls the instance for a run-time number of rows.
  template <bool kAsks, int kRows>
  void score(const Group& group) const {
    if constexpr (kRows > 1)
      if (group.count < kRows) return score<kAsks, kRows - 1>(group);
    score_tiles<Type, kAsks, kRows>(
        rows.queries + group.row * query_floats(rows.p), rows.head_size, tiles,
        group.first / kTile, (group.last + kTile - 1) / kTile, group.scores);
  }

  template <bool kAsks, int kRows>
  void add(const Group& group) const {
    if constexpr (kRows > 1)
      if (group.count < kRows) return add<kAsks, kRows - 1>(group);
    add_values<Type, kAsks, kRows>(group.scores, group.scales, tiles, rows.value_size, group.first,
                                   group.last, group.factors, rows.padded_size,
                                   state.value + group.row * rows.padded_size);
  }
};

// Loads the tiles of tokens [begin, end) of the chunk that begins with token `base`.
template <class Type, bool kIsTiled, class Out>
static inline void load_tiles(const Problem& p, const int32_t* table, int64_t head, int64_t base,
                              int64_t begin, int64_t end, const TileScratch& scratch,
                              Tiles<Out>& tiles) {
  for (int64_t token = begin; token < end;) {
    const int64_t next = min_of(token / kTile * kTile + kTile, end);
    TileSource<Type, kIsTiled>::load(p, table, head, token, next,
                                     static_cast<int>((token - base) / kTile), scratch, tiles);
    token = next;
  }
}

// Tiles of a head's keys [begin, end) in the cache, and of their values.
template <class Type>
struct CachedTiles {
  const Problem& p;
  const int32_t* table;
  int64_t head, begin, end;  // of a cache whose blocks are no whole tiles, as latent ones, nothing

  CachedTiles(const Problem& problem, int64_t sequence, int64_t kv_head, const KeyRange& keys)
      : p(problem),
        table(p.block_table + sequence * p.table_width),
        head(kv_head),
        begin(keys.first / kTile * kTile),
        end(problem.block_size % kTile == 0 ? keys.last : 0) {}

  bool has(int64_t token) const { return begin <= token && token < end; }

  // Bytes from the beginning of either cache to a tile there is.
  int64_t at(int64_t token) const {
    return tile_at<Type>(p, table[token / p.block_size], token % p.block_size, head) *
           static_cast<int64_t>(sizeof(typename Type::Element));
  }

  void ask_for(int64_t token) const {
    const int64_t bytes = kTile * row_elements<Type>(p.head_size) *
                          static_cast<int64_t>(sizeof(typename Type::Element));
    prefetch_bytes(static_cast<const char*>(p.key_cache) + at(token), bytes);
    if (!p.latent) prefetch_bytes(static_cast<const char*>(p.value_cache) + at(token), bytes);
  }
};

// Finds what is read behind the chunk from `base` to `end`, for each of its tiles to ask for one of
// those: the next chunk, also of the next segment, or behind the last one the first chunk of what this
// thread likely does next. There may be more tiles of it; these are asked for at once.
template <class Type>
static inline void look_ahead(const Rows& rows, int64_t base, int64_t end, int64_t* ahead) {
  const RowBlock& block = rows.block;
  const Reading& reading = rows.reading;
  const CachedTiles<Type> own(rows.p, block.sequence, block.kv_head, reading.own);
  const bool is_last = base + kChunk >= reading.own.last;
  const CachedTiles<Type> next = is_last ? CachedTiles<Type>(rows.p, reading.sequence,
                                                             reading.kv_head, reading.next)
                                         : own;
  const int64_t first = is_last ? reading.next.first / kChunk * kChunk : base + kChunk;
  for (int i = 0; i < kTilesPerChunk; i++) {
    const int64_t here = base + i * kTile, there = first + i * kTile;
    ahead[i] = 0;
    if (!next.has(there)) continue;
    if (own.has(here) && here < end)
      ahead[i] = next.at(there) - own.at(here);
    else
      next.ask_for(there);
  }
}

// Asks for the first chunk of a block's keys, from key `first` on, where nothing before it did.
template <class Type>
static inline void ask_for_first(const Rows& rows, int64_t first) {
  const Reading& reading = rows.reading;
  if (reading.is_asked_for || first > reading.own.first) return;
  const CachedTiles<Type> own(rows.p, rows.block.sequence, rows.block.kv_head, reading.own);
  for (int64_t token = own.begin; token < own.end && token < first / kChunk * kChunk + kChunk;
       token += kTile)
    own.ask_for(token);
}

// Adds keys [first, last), inside one segment, to the state. Out is what the micro-kernels read:
// the cache's type or, of floats converted, Float32, and Int8 of Int4; all give the same bits. kAhead: where few rows share
// what is read in the cache, the next chunk is asked for meanwhile.
template <class Type, bool kIsTiled, class Out = Float32, bool kAhead = false>
static void attend_keys(const Rows& rows, int64_t first, int64_t last, const State& state,
                        const TileScratch& scratch, float* scores) {
  const Problem& p = rows.p;
  const int32_t* table = p.block_table + rows.block.sequence * p.table_width;
  constexpr bool kAsksLater = kAhead && !MadeTiles<Type>::kAre;  // else load_tiles() does
  if constexpr (kAhead) ask_for_first<Type>(rows, first);
  for (int64_t base = first / kChunk * kChunk; base < last; base += kChunk) {
    const int64_t begin = max_of(first, base), end = min_of(last, base + kChunk);
    Tiles<Out> tiles;
    if constexpr (MadeTiles<Type>::kAre) clear_ahead(tiles);
    if constexpr (kAhead) look_ahead<Type>(rows, base, end, tiles.ahead);
    load_tiles<Type, kIsTiled>(p, table, rows.block.kv_head, base, begin, end, scratch, tiles);
    const Chunk<Out, kAsksLater> chunk{rows, base, end, tiles, state, scores};
    for (int64_t row = 0; row < rows.count; row += kScoreRows)
      chunk.attend(row, min_of(rows.count - row, kScoreRows));
  }
}

using AttendKeys = void (*)(const Rows&, int64_t, int64_t, const State&, const TileScratch&,
                            float*);

}  // namespace

#if defined(ONNXPORT_KERNELS_AMX)
#include "attention_amx.h"
#endif

namespace {

// All query heads share what a chunk's tiles are made of, so that few rows are many enough.
static inline AttendKeys attend_latent_for(const Problem& p) {
  if (p.cache_layout == kPaired)
    return attend_keys<Latent<PairedBFloat16>, true, PairedBFloat16, true>;
  switch (p.cache_type) {
    case kFloat16: return attend_keys<Latent<Float16>, true, Float32, true>;
    case kBFloat16: return attend_keys<Latent<BFloat16>, true, Float32, true>;
    case kInt8: return attend_keys<Latent<Int8>, true, Int8, true>;
    default: return attend_keys<Latent<Float32>, true, Float32, true>;
  }
}

static inline AttendKeys attend_keys_for(const Problem& p, int64_t rows) {
#if defined(ONNXPORT_KERNELS_AMX)
  if (const AttendKeys attend = attend_keys_amx_for(p, rows)) return attend;
#endif
  if (p.latent) return attend_latent_for(p);
  const bool tiled = p.cache_layout == kTiled, few = rows <= kScoreRows && whole_vectors(p);
  if (p.cache_layout == kPaired)
    return few ? attend_keys<PairedBFloat16, true, PairedBFloat16, true>
               : attend_keys<PairedBFloat16, true, PairedBFloat16>;
  // Converting ahead pays where many groups of rows share what was converted: what it writes does
  // not fit into the first cache.
  const bool direct = tiled && few;
  switch (p.cache_type) {
    case kFloat16:
      if (direct) return attend_keys<Float16, true, Float16, true>;
      return tiled ? attend_keys<Float16, true> : attend_keys<Float16, false>;
    case kBFloat16:
      if (direct) return attend_keys<BFloat16, true, BFloat16, true>;
      return tiled ? attend_keys<BFloat16, true> : attend_keys<BFloat16, false>;
    case kInt8: return few ? attend_keys<Int8, true, Int8, true> : attend_keys<Int8, true, Int8>;
    case kInt4: return few ? attend_keys<Int4, true, Int8, true> : attend_keys<Int4, true, Int8>;
    default:
      if (direct) return attend_keys<Float32, true, Float32, true>;
      return tiled ? attend_keys<Float32, true> : attend_keys<Float32, false>;
  }
}

static inline float lane_sum(const float* lanes) {
  Vec::T sum = Vec::load(lanes);
  for (int i = Vec::kWidth; i < 16; i += Vec::kWidth) sum = Vec::add(sum, Vec::load(lanes + i));
  return Vec::reduce_add(sum);
}

// Whether a row saw no key. One that saw what is no number may have no maximum either, but its sum is
// none.
static inline bool saw_nothing(const State& state, int64_t row) {
  return state.maximum[row] == kHidden && lane_sum(state.sum + row * 16) == 0;
}

// total += part, row by row. Rows that saw nothing in either are left as the other has them, so
// that merging yields the same bits wherever a part was computed.
static void merge(const State& total, const State& part, int64_t count, int64_t padded_size) {
  for (int64_t row = 0; row < count; row++) {
    if (saw_nothing(part, row)) continue;
    float* sum = total.sum + row * 16;
    float* value = total.value + row * padded_size;
    const float* part_sum = part.sum + row * 16;
    const float* part_value = part.value + row * padded_size;
    if (saw_nothing(total, row)) {
      total.maximum[row] = part.maximum[row];
      memcpy(sum, part_sum, 16 * sizeof(float));
      memcpy(value, part_value, static_cast<size_t>(padded_size) * sizeof(float));
      continue;
    }
    const float a = total.maximum[row], b = part.maximum[row], top = a > b ? a : b;
    const Vec::T keep = Vec::exp2(Vec::set1(a - top)), add = Vec::exp2(Vec::set1(b - top));
    total.maximum[row] = top;
    for (int i = 0; i < 16; i += Vec::kWidth)
      Vec::store(sum + i,
                 Vec::fma(add, Vec::load(part_sum + i), Vec::mul(keep, Vec::load(sum + i))));
    for (int64_t i = 0; i < padded_size; i += Vec::kWidth)
      Vec::store(value + i,
                 Vec::fma(add, Vec::load(part_value + i), Vec::mul(keep, Vec::load(value + i))));
  }
}

static inline float exp2_of(float x) {
  float lanes[16];
  Vec::store(lanes, Vec::exp2(Vec::set1(x)));
  return lanes[0];
}

// What a row's values are to be multiplied with: one over the sum, or less with a sink, which joins
// the denominator alone, as one more logit.
static inline float normalizer(const Problem& p, const State& state, int64_t row, int64_t head) {
  const float sum = lane_sum(state.sum + row * 16);
  if (!p.head_sink) return 1.f / sum;
  const float sink = p.head_sink[head] * kLog2E, own = state.maximum[row];
  const float top = sink > own ? sink : own;
  const float keep = exp2_of(own - top);
  return keep / (sum * keep + exp2_of(sink - top));
}

static void write_output(const Rows& rows, const State& state) {
  const Problem& p = rows.p;
  int64_t token = p.cumulative_lengths[rows.block.sequence] + rows.block.row_begin / rows.group;
  int64_t in_group = rows.block.row_begin % rows.group;
  for (int64_t row = 0; row < rows.count; row++) {
    const int64_t head = rows.block.kv_head * rows.group + in_group;
    const float factor = normalizer(p, state, row, head);
    const Vec::T factors = Vec::set1(factor);
    const float* value = state.value + row * rows.padded_size;
    float* out = p.output + (token * p.num_heads + head) * p.value_size;
    int64_t i = 0;
    for (; i + Vec::kWidth <= p.value_size; i += Vec::kWidth)
      Vec::store(out + i, Vec::mul(factors, Vec::load(value + i)));
    for (; i < p.value_size; i++) out[i] = value[i] * factor;
    if (++in_group == rows.group) {
      in_group = 0;
      token++;
    }
  }
}

struct Scratch {
  State total, part;
  TileScratch tiles;
  float* scores;
};

static inline Scratch scratch_of(const Problem& p, float* memory) {
  const int64_t state = state_floats(kRowBlock, p.value_size), row = padded(p.head_size);
  float* key = memory + 2 * state;
  float* value = key + kChunk * row;
  float* one_tile = value + kChunk * row;
  return {state_at(memory, kRowBlock),
          state_at(memory + state, kRowBlock),
          {key, value, one_tile},
          one_tile + kTile * row};
}

static void attend_rows_of_segment(const Rows& rows, int64_t segment, const State& state,
                                   const Scratch& scratch) {
  const KeyRange keys = rows.all_keys();
  clear(state, rows.count, rows.padded_size);
  attend_keys_for(rows.p, rows.count)(rows, max_of(keys.first, segment * kSegment),
                                      min_of(keys.last, (segment + 1) * kSegment), state,
                                      scratch.tiles, scratch.scores);
}

static void attend_segment(const Problem& p, const float* queries, const RowBlock& block,
                           const Reading& reading, int64_t segment, const State& state,
                           float* memory) {
  attend_rows_of_segment(Rows(p, queries, block, reading), segment, state,
                         scratch_of(p, memory));
}

// A head's state among those that take turns: apart, for maxima are written by whole vectors.
static inline State turn_state(const State& state, int32_t head, int64_t padded_size) {
  const int64_t row = head * kTurnRows;
  return {state.maximum + row, state.sum + row * 16, state.value + row * padded_size};
}

// The block's rows with a head behind its own one.
static Rows rows_of_head(const Problem& p, const float* queries, RowBlock block, Reading reading,
                         int32_t head) {
  block.kv_head += head;
  reading.kv_head += head;
  if (head >= reading.heads) reading.next = {0, 0};
  return Rows(p, queries, block, reading);
}

// As attend(), for several heads: a chunk of keys of each, then the next chunk.
static void attend_in_turns(const Problem& p, const float* queries, const RowBlock& block,
                            int32_t heads, const Reading& reading, float* memory) {
  static_assert(Vec::kMostTurns * kTurnRows <= kRowBlock, "there is one state for all of them");
  const Scratch scratch = scratch_of(p, memory);
  const int64_t count = block.row_end - block.row_begin, size = padded(p.value_size);
  const KeyRange keys = reading.own;
  const AttendKeys attend_keys = attend_keys_for(p, count);
  for (int64_t begin = keys.first, next; begin < keys.last; begin = next) {
    next = min_of(begin / kChunk * kChunk + kChunk, keys.last);
    const bool is_total = begin < keys.first / kSegment * kSegment + kSegment;
    const bool starts = begin == keys.first || begin % kSegment == 0;
    const bool ends = next == keys.last || next % kSegment == 0;
    for (int32_t head = 0; head < heads; head++) {
      const Rows rows = rows_of_head(p, queries, block, reading, head);
      const State total = turn_state(scratch.total, head, size);
      const State state = is_total ? total : turn_state(scratch.part, head, size);
      if (starts) clear(state, count, size);
      attend_keys(rows, begin, next, state, scratch.tiles, scratch.scores);
      if (ends && !is_total) merge(total, state, count, size);
      if (next == keys.last) write_output(rows, total);
    }
  }
}

static void attend(const Problem& p, const float* queries, const RowBlock& block, int32_t heads,
                   const Reading& reading, float* memory) {
  if (heads > 1) return attend_in_turns(p, queries, block, heads, reading, memory);
  const Rows rows(p, queries, block, reading);
  const Scratch scratch = scratch_of(p, memory);
  const KeyRange keys = rows.all_keys();
  const int64_t first = keys.first / kSegment, last = (keys.last + kSegment - 1) / kSegment;
  attend_rows_of_segment(rows, first, scratch.total, scratch);
  for (int64_t segment = first + 1; segment < last; segment++) {
    attend_rows_of_segment(rows, segment, scratch.part, scratch);
    merge(scratch.total, scratch.part, rows.count, rows.padded_size);
  }
  write_output(rows, scratch.total);
}

static void finish(const Problem& p, const RowBlock& block, const State* states,
                   int64_t num_states) {
  const Rows rows(p, nullptr, block, Reading{});
  for (int64_t i = 1; i < num_states; i++)
    merge(states[0], states[i], rows.count, rows.padded_size);
  write_output(rows, states[0]);
}

static void prepare_latent(const Problem& p, float* queries, int64_t begin, int64_t end) {
  auto run = prepare_tokens<Float32, false, true>;
  switch (p.cache_type) {
    case kFloat16: run = prepare_tokens<Float16, false, true>; break;
    case kBFloat16: run = prepare_tokens<BFloat16, false, true>; break;
    case kInt8: run = prepare_tokens<Int8, false, true>; break;
    default: break;
  }
  run(p, queries, begin, end);
}

static void prepare(const Problem& p, float* queries, int64_t begin, int64_t end) {
  if (p.latent) return prepare_latent(p, queries, begin, end);
  const bool tiled = p.cache_layout == kTiled;
  auto run = prepare_tokens<Float32, false>;
  switch (p.cache_type) {
    case kFloat16:
      run = tiled ? prepare_tokens<Float16, true> : prepare_tokens<Float16, false>;
      break;
    case kBFloat16:
      run = tiled ? prepare_tokens<BFloat16, true> : prepare_tokens<BFloat16, false>;
      if (p.cache_layout == kPaired) run = prepare_tokens<PairedBFloat16, true>;
      break;
    case kInt8: run = prepare_tokens<Int8, true>; break;
    case kInt4: run = prepare_tokens<Int4, true>; break;
    default: run = tiled ? prepare_tokens<Float32, true> : prepare_tokens<Float32, false>;
  }
  run(p, queries, begin, end);
}

const Kernels kKernels = {ONNXPORT_KERNELS_NAME,
                          Vec::kPrefersPairs,
                          Vec::kConvertsHalf,
                          Vec::kMostTurns,
                          prepare,
                          attend,
                          attend_segment,
                          finish,
                          gate,
                          lora_shrink,
                          lora_expand,
                          multiply_rows,
                          convolve,
                          prepare_delta,
                          update_delta};

}  // namespace
