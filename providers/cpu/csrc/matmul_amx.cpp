// Products for AMX, whose tile registers multiply 16 rows by 16 outputs at once; few rows go by
// AVX-512 VNNI. Compiled with those sets' flags: nothing here may run before the processor and the
// operating system have been asked, and nothing here may be shared with other objects.
#include "matmul.h"

#if defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include "amx.h"
#include "matmul_vec_avx512.h"

#include "matmul_one_impl.h"

namespace onnxport {
namespace {

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
  float* output;  // where to deliver them, null if that is not to be done
  int64_t panel, rows;
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

// Adds a unit's sums to the totals, while the tile registers work on the next one.
template <int kPair, bool kFew, bool kInner>
ONNXPORT_INLINE void add_sums(const Unit& unit, char* sums, Ahead& ahead) {
  if constexpr (kPair == 0) {
    _tile_stored(0, sums, kSumStride);
    _tile_stored(1, sums + 64, kSumStride);
  } else {
    _tile_stored(2, sums, kSumStride);
    _tile_stored(3, sums + 64, kSumStride);
  }
  const __m512 scales[2] = {_mm512_load_ps(unit.scales), _mm512_load_ps(unit.scales + kLanes)};
  // Copies: for all the compiler knows, storing a vector changes whatever has an address.
  const float* row_scales = unit.row_scales;
  float* to = unit.to;
  const float* from = kInner ? to : unit.from;
  const int64_t from_stride = kInner ? kPanel : unit.from_stride;
  const int64_t to_stride = kInner ? kPanel : unit.to_stride;
  ONNXPORT_UNROLL
  for (int r = 0; r < kRowTile; r++) {
    const __m512 row_scale = _mm512_set1_ps(row_scales[r]);
    if constexpr (kFew) ahead.ask();
    ONNXPORT_UNROLL
    for (int c = 0; c < 2; c++) {
      const __m512i sum = _mm512_load_si512(sums + r * kSumStride + c * 64);
      const __m512 total = _mm512_loadu_ps(from + r * from_stride + c * kLanes);
      _mm512_storeu_ps(to + r * to_stride + c * kLanes,
                       accumulate(total, sum, row_scale, scales[c]));
    }
  }
}

// Nibbles to signed bytes, in the order of the 8-bit format: the nibble's three low bits as they
// are, and its highest one, turned over, as all the others. That is a product of a matrix of bits
// with the packed byte, of which five bits are turned over.
ONNXPORT_INLINE void unpack(const uint8_t* weights, int64_t bytes, uint8_t* out) {
  const __m512i low = _mm512_set1_epi64(0x0102040808080808);
  const __m512i high = _mm512_set1_epi64(0x1020408080808080);
  for (int64_t i = 0; i < bytes; i += 128, out += 256) {
    ONNXPORT_UNROLL
    for (int c = 0; c < 128; c += 64) {
      const __m512i packed = Vec::load_bytes(weights + i + c);
      _mm512_store_si512(out + c, _mm512_gf2p8affine_epi64_epi8(packed, low, 0xf8));
      _mm512_store_si512(out + 128 + c, _mm512_gf2p8affine_epi64_epi8(packed, high, 0xf8));
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
      if (m.bits == 4) unpack(weights, quants, memory.unpacked + i * stride);
      const float* from = read_scales(m, weights + quants, 0, kPanel, scales[i]);
      if (from != scales[i]) memcpy(scales[i], from, sizeof scales[i]);
    }
  }
};

// Where a unit's totals are read and written. With the last block they go to the output at once,
// unless a bias is to be added or some of them are no outputs. Lines of the output are asked for a
// block earlier: stores that wait for theirs hold up all the later ones.
ONNXPORT_INLINE void place(const MatMul& m, const Part& part, int64_t tile, int64_t panel,
                           int64_t block, Memory& memory, Unit& unit) {
  const int64_t last = num_blocks(m) - 1;
  unit.to = memory.totals + tile * kRowTile * kPanel;
  unit.to_stride = kPanel;
  unit.from = block == 0 ? memory.zeros : unit.to;
  unit.from_stride = block == 0 ? 0 : kPanel;
  unit.output = nullptr;
  unit.is_inner = block > 0 && block < last;
  if (block < last - 1) return;
  const int64_t first = tile * kRowTile, left = part.row_end - part.row_begin - first;
  const int64_t rows = left < kRowTile ? left : kRowTile;
  float* output = part.output + (panel - part.panel_begin) * kPanel + first * part.stride;
  if (block < last) {
    ONNXPORT_UNROLL
    for (int r = 0; r < kRowTile; r++, output += part.stride) {
      _mm_prefetch(reinterpret_cast<const char*>(output), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(output + kLanes), _MM_HINT_T0);
    }
  } else if (rows == kRowTile && !m.bias && (panel + 1) * kPanel <= m.n) {
    unit.to = output;
    unit.to_stride = part.stride;
  } else {
    unit.output = output;
    unit.rows = rows;
    unit.panel = panel;
  }
}

ONNXPORT_ALONE void deliver(const MatMul& m, const Part& part, const Unit& unit) {
  for (int64_t r = 0; r < unit.rows; r++) {
    const float* total = unit.to + r * kPanel;
    const __m512 values[2] = {_mm512_load_ps(total), _mm512_load_ps(total + kLanes)};
    store_outputs<2>(unit.output + r * part.stride, m.n - unit.panel * kPanel, values);
  }
  if (m.bias) add_bias(m, unit.panel, unit.output, part.stride, unit.rows);
}

template <int kPair, bool kFew>
ONNXPORT_INLINE void finish(const MatMul& m, const Part& part, const Unit& unit, char* sums,
                            Ahead& ahead) {
  if (unit.is_inner) return add_sums<kPair, kFew, true>(unit, sums, ahead);
  add_sums<kPair, kFew, false>(unit, sums, ahead);
  if (unit.output) deliver(m, part, unit);
}

// The part, one unit after the other: while the tile registers work on one, the sums of the one
// before are added to its totals.
template <int kParts, bool kFew>
void multiply_tiles(const MatMul& m, const Part& part) {
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
          place(m, part, tile, panel, block, memory, unit);
          if (number % 2 == 0) {
            start<0, kParts>(unit, block_size);
            if (number > 0) finish<1, kFew>(m, part, units[1], memory.sums, ahead);
          } else {
            start<1, kParts>(unit, block_size);
            finish<0, kFew>(m, part, units[0], memory.sums, ahead);
          }
        }
      }
    }
  }
  if (number % 2 == 0)
    finish<1, kFew>(m, part, units[1], memory.sums, ahead);
  else
    finish<0, kFew>(m, part, units[0], memory.sums, ahead);
}

void multiply(const MatMul& m, const Part& part) {
  if (m.rows <= kFewRows || m.block_size > kMostInputs) return multiply_dots_or_one<Dot>(m, part);
  const TileConfiguration configuration = configuration_for(m.block_size < 64 ? m.block_size : 64);
  _tile_loadconfig(&configuration);
  const bool few = part.row_end - part.row_begin <= kFewTiles * kRowTile;
  if (m.block_size == 128)
    few ? multiply_tiles<2, true>(m, part) : multiply_tiles<2, false>(m, part);
  else
    few ? multiply_tiles<1, true>(m, part) : multiply_tiles<1, false>(m, part);
  _tile_release();
}

constexpr MatMulKernels kKernels = {
    "amx", kAmxChunkRows, [](int64_t rows) { return rows <= kFewRows ? rows : kRowTile; }, quantize,
    multiply, kCoarseRows, summarize_avx512, Vec::kStreams};
static_assert(kCoarseRows <= kFewRows, "tiles know no corrections");

}  // namespace

const MatMulKernels* matmul_amx() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_amx() { return nullptr; }
}  // namespace onnxport

#endif
