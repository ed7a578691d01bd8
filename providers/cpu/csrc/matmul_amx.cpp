// Products for AMX, whose tile registers multiply 16 rows by 16 outputs at once; few rows go by
// AVX-512 VNNI. Compiled with those sets' flags: nothing here may run before the processor and the
// operating system have been asked, and nothing here may be shared with other objects.
#include "matmul.h"

#if defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include "amx.h"
#include "matmul_vec_avx512.h"

#include "matmul_one_impl.h"
#include "unpack_amx.h"

namespace onnxport {
namespace {

constexpr int64_t kRowTile = 16;        // rows that are multiplied at once
constexpr int64_t kFewRows = 8;         // up to so many, VNNI is faster
constexpr int64_t kMostInputs = 128;    // of a block, for which there are tile registers
constexpr int64_t kAmxChunkRows = 256;  // whose totals stay in the L2 cache
constexpr int64_t kStretchBytes = 1 << 14;  // of weights as bytes, which stay in the L1 cache
constexpr int64_t kFewTiles = 2;            // of rows, which wait for weights above all
constexpr int64_t kFurtherAhead = 8192;     // bytes that they ask beyond the next block
constexpr int kLanes = 16;

// A load has to wait for stores before it whose addresses end in the same twelve bits, and those
// of sums wait for the products. So their rows do not lie side by side, where they would share
// them with whole tiles of activations and weights. In a loop of products alone that took twice the
// time.
constexpr int64_t kSumStride = 2048 + 64;  // bytes

// For the same reason the places of what is stored are chosen within a page, of what was tried the
// best: up to a sixth faster than others.
struct alignas(4096) Memory {
  char before[1024];
  float totals[kAmxChunkRows * kPanel];
  char between[1024];
  char sums[(kLanes - 1) * kSumStride + 128];
  alignas(4096) char behind[2048];
  uint8_t unpacked[kStretchBytes];
  float scales[2][kStretchBytes / 512][kPanel];
  float zeros[kPanel];
};

// What is told of the outputs of 16 rows as they are made, for a chunk of each row: its least value,
// the largest ones of its groups, and of the first half of the next group. Rows side by side.
struct alignas(64) Tally {
  float least[kRowTile];
  float high[kRowTile];
  float groups[rows::kGroups][kRowTile];
};

struct Tallies {
  Tally tiles[kAmxChunkRows / kRowTile];
  bool has_nan = false;
};

// The tile registers: four sums, two parts of a row tile, two columns of weights.
// inputs: those that one instruction multiplies, 64 or fewer.
TileConfiguration configuration_for(int64_t inputs) {
  TileConfiguration configuration;
  for (int t = 4; t < 6; t++) configuration.row_bytes[t] = static_cast<uint16_t>(inputs);
  for (int t = 6; t < 8; t++) configuration.rows[t] = static_cast<uint8_t>(inputs / 4);
  return configuration;
}

// Lines of packed weights that are asked for, some at a time.
struct Ahead {
  const uint8_t* next;
  const uint8_t* end;
  int64_t step;

  void ask() {
    const uint8_t* until = next + step < end ? next + step : end;
    for (; next < until; next += 64) Vec::prefetch(next);
  }
};

// A row tile's products with a block of a panel, whose sums are in a pair of tile registers.
struct Unit {
  const int8_t* quants;     // [16 rows][block_size]
  const uint8_t* columns;   // [block_size / 4][2][16][4]
  const float* row_scales;  // [16]
  const float* scales;      // [kPanel]
  const float* from;        // totals before it, [16][kPanel], rows so many floats apart
  int64_t from_stride;
  float* to;  // likewise with it
  int64_t to_stride;
  float* output;  // where to deliver them, or add more to them; null if nothing is to be done
  int64_t panel, row, rows;
  Tally* tally;  // of a panel's last block, if they are to be told of
  bool is_inner;  // neither a panel's first block nor its last: its totals stay where they are
};

// kPair: of the registers of sums, 0 or 1. kParts: instructions for a block, 1 or 2. A name of a
// register has to be a literal.
template <int kPair, int kParts>
ONNXPORT_INLINE void start(const Unit& unit, size_t block_size) {
  if constexpr (kPair == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, unit.quants, block_size);
    _tile_loadd(6, unit.columns, 128);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, unit.columns + 64, 128);
    _tile_dpbssd(1, 4, 7);
  } else {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, unit.quants, block_size);
    _tile_loadd(6, unit.columns, 128);
    _tile_dpbssd(2, 4, 6);
    _tile_loadd(7, unit.columns + 64, 128);
    _tile_dpbssd(3, 4, 7);
  }
  if constexpr (kParts == 2) {
    _tile_loadd(5, unit.quants + 64, block_size);
    _tile_loadd(6, unit.columns + 2048, 128);
    if constexpr (kPair == 0)
      _tile_dpbssd(0, 5, 6);
    else
      _tile_dpbssd(2, 5, 6);
    _tile_loadd(7, unit.columns + 2112, 128);
    if constexpr (kPair == 0)
      _tile_dpbssd(1, 5, 7);
    else
      _tile_dpbssd(3, 5, 7);
  }
}

// What a unit's totals are: such as stay where they are, any, or outputs that are told of.
enum class Totals { kInner, kAny, kTold };

// The totals of a unit's rows, to which its sums are added. Copies: for all the compiler knows, storing
// a vector changes whatever has an address.
template <Totals kTotals, bool kFew>
struct Rows {
  static constexpr bool kInner = kTotals == Totals::kInner;
  const char* sums;
  const __m512 scales[2];
  const float* row_scales;
  float* to;
  const float* from;
  const int64_t from_stride, to_stride;
  const bool streams;  // past the caches

  Rows(const Unit& unit, const char* stored)
      : sums(stored),
        scales{_mm512_load_ps(unit.scales), _mm512_load_ps(unit.scales + kLanes)},
        row_scales(unit.row_scales),
        to(unit.to),
        from(kInner ? to : unit.from),
        from_stride(kInner ? kPanel : unit.from_stride),
        to_stride(kInner ? kPanel : unit.to_stride),
        streams(kTotals == Totals::kTold && kFew && !unit.output) {}
};

// Returns the new totals of 16 outputs of a row.
template <class Rows>
ONNXPORT_INLINE __m512 add_row(const Rows& of, int r, int c) {
  const __m512i sum = _mm512_load_si512(of.sums + r * kSumStride + c * 64);
  const __m512 total = _mm512_loadu_ps(of.from + r * of.from_stride + c * kLanes);
  const __m512 with = accumulate(total, sum, _mm512_set1_ps(of.row_scales[r]), of.scales[c]);
  if (of.streams)
    _mm512_stream_ps(of.to + r * of.to_stride + c * kLanes, with);
  else
    _mm512_storeu_ps(of.to + r * of.to_stride + c * kLanes, with);
  return with;
}

// The largest and the least lanes of some rows, which share those of a vector.
struct Extremes {
  __m512 high, low;
};

ONNXPORT_INLINE Extremes merge(const Extremes& a, const Extremes& b) {
  const __m512i even =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_max_ps(_mm512_permutex2var_ps(a.high, even, b.high),
                        _mm512_permutex2var_ps(a.high, odd, b.high)),
          _mm512_min_ps(_mm512_permutex2var_ps(a.low, even, b.low),
                        _mm512_permutex2var_ps(a.low, odd, b.low))};
}

// Adds the sums of rows [first, first + kCount) to outputs; of all rows, lane r is what row r has.
template <int kCount, bool kFew>
ONNXPORT_INLINE Extremes add_told(const Rows<Totals::kTold, kFew>& to, int first, Ahead& ahead,
                                  __mmask16& nan) {
  if constexpr (kCount == 1) {
    if constexpr (kFew) ahead.ask();
    const __m512 a = add_row(to, first, 0), b = add_row(to, first, 1);
    nan |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
    return {_mm512_max_ps(a, b), _mm512_min_ps(a, b)};
  } else {
    const Extremes one = add_told<kCount / 2, kFew>(to, first, ahead, nan);
    return merge(one, add_told<kCount / 2, kFew>(to, first + kCount / 2, ahead, nan));
  }
}

// Adds a unit's sums to the totals, while the tile registers work on the next one. Outputs that are
// told of are not read again soon: those of few rows go to memory past the caches, which otherwise
// would have to read their lines first.
template <int kPair, bool kFew, Totals kTotals>
ONNXPORT_INLINE void add_sums(const Unit& unit, char* sums, Ahead& ahead, Tallies* tallies) {
  if constexpr (kPair == 0) {
    _tile_stored(0, sums, kSumStride);
    _tile_stored(1, sums + 64, kSumStride);
  } else {
    _tile_stored(2, sums, kSumStride);
    _tile_stored(3, sums + 64, kSumStride);
  }
  const Rows<kTotals, kFew> to(unit, sums);
  if constexpr (kTotals == Totals::kTold) {
    __mmask16 nan = 0;
    const Extremes of = add_told<kRowTile, kFew>(to, 0, ahead, nan);
    tallies->has_nan |= nan != 0;
    Tally& tally = *unit.tally;
    _mm512_store_ps(tally.least, _mm512_min_ps(of.low, _mm512_load_ps(tally.least)));
    constexpr int64_t kHalves = rows::kGroup / kPanel;
    static_assert(kHalves == 2, "a group is two panels");
    if (unit.panel % kHalves == 0)
      _mm512_store_ps(tally.high, of.high);
    else  // Either zero is written as 0, as summary_impl.h does.
      _mm512_store_ps(tally.groups[unit.panel / kHalves % rows::kGroups],
                      _mm512_add_ps(_mm512_max_ps(of.high, _mm512_load_ps(tally.high)),
                                    _mm512_setzero_ps()));
  } else {
    ONNXPORT_UNROLL
    for (int r = 0; r < kRowTile; r++) {
      if constexpr (kFew) ahead.ask();
      add_row(to, r, 0);
      add_row(to, r, 1);
    }
  }
}

// Some blocks of a panel, one after the other, as the tile registers read them. Their scales are
// needed for one unit longer, so they stay while the next stretch is read.
struct Stretch {
  int64_t first, count;  // blocks
  const uint8_t* columns;
  int64_t stride;  // bytes from one block's columns to the next one's
  float (*scales)[kPanel];

  void read(const MatMul& m, const uint8_t* weights, Memory& memory) {
    const int64_t quants = quant_bytes(m), bytes = block_bytes(m);
    columns = m.bits == 4 ? memory.unpacked : weights;
    stride = m.bits == 4 ? kPanel * m.block_size : bytes;
    scales = memory.scales[scales == memory.scales[0] ? 1 : 0];
    for (int64_t i = 0; i < count; i++, weights += bytes) {
      if (m.is_fp4)
        unpack_fp4(weights, quants, memory.unpacked + i * stride);
      else if (m.bits == 4)
        unpack(weights, quants, memory.unpacked + i * stride);
      const float* from = read_scales(m, weights + quants, 0, kPanel, scales[i]);
      if (from != scales[i]) memcpy(scales[i], from, sizeof scales[i]);
    }
  }
};

// Where a unit's totals are read and written. With the last block they go to the output at once,
// unless some of them are no outputs. Lines of the output are asked for a block earlier: stores that
// wait for theirs hold up all the later ones. Not where outputs are told of, as most of these go past
// the caches.
template <bool kFew, bool kTell>
ONNXPORT_INLINE void place(const MatMul& m, const Part& part, int64_t tile, int64_t panel,
                           int64_t block, Memory& memory, Unit& unit) {
  const int64_t last = num_blocks(m) - 1;
  unit.to = memory.totals + tile * kRowTile * kPanel;
  unit.to_stride = kPanel;
  unit.from = block == 0 ? memory.zeros : unit.to;
  unit.from_stride = block == 0 ? 0 : kPanel;
  unit.output = nullptr;
  unit.tally = nullptr;
  unit.is_inner = block > 0 && block < last;
  if (block < last - (kTell && kFew ? 0 : 1)) return;
  const int64_t first = tile * kRowTile, left = part.row_end - part.row_begin - first;
  const int64_t rows = left < kRowTile ? left : kRowTile;
  unit.rows = rows;
  unit.row = part.row_begin + first;
  unit.panel = panel;
  float* output = part.output + (panel - part.panel_begin) * kPanel + first * part.stride;
  if (block < last) {
    ONNXPORT_UNROLL
    for (int r = 0; r < kRowTile; r++, output += part.stride) {
      _mm_prefetch(reinterpret_cast<const char*>(output), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(output + kLanes), _MM_HINT_T0);
    }
    return;
  }
  const bool is_whole = rows == kRowTile && (panel + 1) * kPanel <= m.n;
  if (is_whole) {
    unit.to = output;
    unit.to_stride = part.stride;
  }
  if (!is_whole || is_unfinished(m)) unit.output = output;
}

ONNXPORT_ALONE void deliver(const MatMul& m, const Part& part, const Unit& unit) {
  for (int64_t r = 0; unit.to != unit.output && r < unit.rows; r++) {
    const float* total = unit.to + r * kPanel;
    const __m512 values[2] = {_mm512_load_ps(total), _mm512_load_ps(total + kLanes)};
    store_outputs<2>(unit.output + r * part.stride, m.n - unit.panel * kPanel, values);
  }
  finish_outputs(m, unit.panel, unit.row, unit.output, part.stride, unit.rows);
}

void begin_chunk(Tally& tally) {
  _mm512_store_ps(tally.least, _mm512_set1_ps(INFINITY));
  for (float* group : tally.groups) _mm512_store_ps(group, _mm512_set1_ps(-INFINITY));
}

// Tells of a row tile's chunk, all of which was made.
ONNXPORT_ALONE void end_chunk(const MatMul& m, const Unit& unit) {
  Tally& tally = *unit.tally;
  const int64_t chunk = unit.panel * kPanel / rows::kChunk;
  for (int64_t r = 0; r < unit.rows; r++) {
    if (!(told_scale(m, unit.row + r) >= rows::kNoSums)) continue;
    const rows::Summary to = summary_of(m, unit.row + r);
    float* const groups = to.groups + chunk * rows::kGroups;
    for (int64_t i = 0; i < rows::kGroups; i++) groups[i] = tally.groups[i][r];
    to.largest[chunk] = _mm512_reduce_max_ps(_mm512_loadu_ps(groups));
    to.least[chunk] = tally.least[r] + 0.f;
  }
  begin_chunk(tally);
}

template <int kPair, bool kFew, bool kTell>
ONNXPORT_INLINE void finish(const MatMul& m, const Part& part, const Unit& unit, char* sums,
                            Ahead& ahead, Tallies* tallies) {
  if (unit.is_inner) return add_sums<kPair, kFew, Totals::kInner>(unit, sums, ahead, tallies);
  if (kTell && unit.tally) {
    add_sums<kPair, kFew, Totals::kTold>(unit, sums, ahead, tallies);
    if ((unit.panel + 1) * kPanel % rows::kChunk == 0 || unit.panel + 1 == part.panel_end)
      end_chunk(m, unit);
  } else {
    add_sums<kPair, kFew, Totals::kAny>(unit, sums, ahead, tallies);
  }
  if (unit.output) deliver(m, part, unit);
}

// The part, one unit after the other: while the tile registers work on one, the sums of the one
// before are added to its totals.
template <int kParts, bool kFew, bool kTell>
void multiply_tiles(const MatMul& m, const Part& part, Tallies* tallies) {
  Memory memory;
  memset(memory.zeros, 0, sizeof memory.zeros);
  const int64_t blocks = num_blocks(m), bytes = block_bytes(m);
  const auto block_size = static_cast<size_t>(m.block_size);
  const int64_t tiles = ceil_div(part.row_end - part.row_begin, kRowTile);
  const int64_t most = kFew ? 1 : kStretchBytes / (kPanel * m.block_size);
  const int64_t share = ceil_div(bytes, tiles * 64) * 64;  // of a block, asked for with a unit
  Ahead ahead = {};
  ahead.step = kFew ? ceil_div(share, kRowTile * 64) * 64 : share;
  Stretch stretch = {};
  Unit units[2];
  int64_t number = 0;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; panel++) {
    for (stretch.first = 0; stretch.first < blocks; stretch.first += most) {
      stretch.count = blocks - stretch.first < most ? blocks - stretch.first : most;
      const uint8_t* weights = m.weights + panel * panel_bytes(m) + stretch.first * bytes;
      stretch.read(m, weights, memory);
      finish_writes();
      // What is read later is asked for meanwhile, a share of it with each unit.
      ahead.next = weights + stretch.count * bytes + (kFew ? kFurtherAhead : 0);
      for (int64_t tile = 0; tile < tiles; tile++) {
        for (int64_t i = 0; i < stretch.count; i++, number++) {
          const int64_t block = stretch.first + i;
          const int64_t at = row_block(m, part.row_begin + tile * kRowTile, block);
          ahead.end = ahead.next + share;
          if (!kFew) ahead.ask();
          Unit& unit = units[number % 2];
          unit.quants = m.quants + at * m.block_size;
          unit.columns = stretch.columns + i * stretch.stride;
          unit.row_scales = m.scales + at;
          unit.scales = stretch.scales[i];
          place<kFew, kTell>(m, part, tile, panel, block, memory, unit);
          if (kTell && block == blocks - 1) unit.tally = tallies->tiles + tile;
          if (number % 2 == 0) {
            start<0, kParts>(unit, block_size);
            if (number > 0) finish<1, kFew, kTell>(m, part, units[1], memory.sums, ahead, tallies);
          } else {
            start<1, kParts>(unit, block_size);
            finish<0, kFew, kTell>(m, part, units[0], memory.sums, ahead, tallies);
          }
        }
      }
    }
  }
  if (number % 2 == 0)
    finish<1, kFew, kTell>(m, part, units[1], memory.sums, ahead, tallies);
  else
    finish<0, kFew, kTell>(m, part, units[0], memory.sums, ahead, tallies);
}

template <bool kTell>
void multiply_part(const MatMul& m, const Part& part, Tallies* tallies) {
  const TileConfiguration configuration = configuration_for(m.block_size < 64 ? m.block_size : 64);
  finish_writes();
  _tile_loadconfig(&configuration);
  const bool few = part.row_end - part.row_begin <= kFewTiles * kRowTile;
  if (m.block_size == 128)
    few ? multiply_tiles<2, true, kTell>(m, part, tallies)
        : multiply_tiles<2, false, kTell>(m, part, tallies);
  else
    few ? multiply_tiles<1, true, kTell>(m, part, tallies)
        : multiply_tiles<1, false, kTell>(m, part, tallies);
  _tile_release();
}

bool has_tiles(const MatMul& m) { return m.rows > kFewRows && m.block_size <= kMostInputs; }

void multiply(const MatMul& m, const Part& part) {
  if (has_tiles(m))
    multiply_part<false>(m, part, nullptr);
  else
    multiply_dots_or_one<Dot>(m, part);
}

// Whether all that is asked for of the rows can be told before they are in memory, and something is.
bool can_tell(const MatMul& m, const Part& part) {
  bool asks = false;
  for (int64_t row = part.row_begin; row < part.row_end; row++) {
    if (told_scale(m, row) > rows::kNoSums) return false;
    asks |= told_scale(m, row) == rows::kNoSums;
  }
  return asks;
}

bool multiply_and_summarize(const MatMul& m, const Part& part) {
  const bool is_whole = m.n % rows::kGroup == 0 && part.panel_begin * kPanel % rows::kChunk == 0;
  const bool has_lines = reinterpret_cast<uintptr_t>(part.output) % 64 == 0 && part.stride % 16 == 0;
  if (!has_tiles(m) || is_unfinished(m) || !is_whole || !has_lines || !can_tell(m, part)) return false;
  Tallies tallies;
  const int64_t tiles = ceil_div(part.row_end - part.row_begin, kRowTile);
  for (int64_t tile = 0; tile < tiles; tile++) begin_chunk(tallies.tiles[tile]);
  multiply_part<true>(m, part, &tallies);
  _mm_sfence();
  if (!tallies.has_nan) return true;
  const int64_t begin = part.panel_begin * kPanel, end = part.panel_end * kPanel;
  for (int64_t row = part.row_begin; row < part.row_end; row++)
    if (told_scale(m, row) == rows::kNoSums)
      summarize_avx512(part.output + (row - part.row_begin) * part.stride - begin, begin,
                       end < m.n ? end : m.n, rows::kNoSums, nullptr, summary_of(m, row));
  return true;
}

int64_t rows_of_tiles(int64_t rows) {
  return rows <= kFewRows ? rows : ceil_div(rows, kRowTile) * kRowTile;
}

int64_t row_unit(int64_t rows) { return rows <= kFewRows ? 1 : kRowTile; }

constexpr MatMulKernels kKernels = {
    "amx",
    kAmxChunkRows,
    rows_of_tiles,
    quantize,
    multiply,
    multiply_half<Dot>,  // too few outputs for tiles of their own
    kCoarseRows,
    scale_outputs,
    summarize_avx512,
    Vec::kStreams,
    multiply_and_summarize,
    row_unit};
static_assert(kCoarseRows <= kFewRows, "tiles know no corrections");

}  // namespace

const MatMulKernels* matmul_amx() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_amx() { return nullptr; }
}  // namespace onnxport

#endif
