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

constexpr int64_t kFewRows = 8;        // up to so many, VNNI is faster
constexpr int64_t kMostInputs = 128;   // of a block, for which there are tile registers
constexpr int64_t kAmxChunkRows = 256;  // whose totals stay in the L2 cache
constexpr int64_t kStretchBytes = 1 << 14;  // of weights as bytes, which stay in the L1 cache
constexpr int kLanes = 16;

// A load has to wait for stores before it whose addresses end in the same twelve bits, and those of
// sums wait for the products. So their rows do not lie side by side, where they would share them with
// whole tiles of activations and weights. In a loop of products alone that took twice the time.
constexpr int64_t kSumStride = 2048 + 64;  // bytes

// The tile registers: four sums, two parts of a row tile, two columns of weights.
// inputs: those that one instruction multiplies, 64 or fewer.
TileConfiguration configuration_for(int64_t inputs) {
  TileConfiguration configuration;
  for (int t = 4; t < 6; t++) configuration.row_bytes[t] = static_cast<uint16_t>(inputs);
  for (int t = 6; t < 8; t++) configuration.rows[t] = static_cast<uint8_t>(inputs / 4);
  return configuration;
}

// A row tile's products with a block of a panel, whose sums are in a pair of tile registers.
struct Unit {
  const int8_t* quants;     // [16 rows][block_size]
  const uint8_t* columns;   // [block_size / 4][2][16][4]
  const float* row_scales;  // [16]
  const float* scales;      // [kPanel]
  float* totals;            // [16][kPanel]
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
template <int kPair>
ONNXPORT_INLINE void finish(const Unit& unit, char* sums) {
  if constexpr (kPair == 0) {
    _tile_stored(0, sums, kSumStride);
    _tile_stored(1, sums + 64, kSumStride);
  } else {
    _tile_stored(2, sums, kSumStride);
    _tile_stored(3, sums + 64, kSumStride);
  }
  const __m512 scales[2] = {_mm512_load_ps(unit.scales), _mm512_load_ps(unit.scales + kLanes)};
  ONNXPORT_UNROLL
  for (int r = 0; r < kRowTile; r++) {
    const __m512 row_scale = _mm512_set1_ps(unit.row_scales[r]);
    ONNXPORT_UNROLL
    for (int c = 0; c < 2; c++) {
      float* total = unit.totals + r * kPanel + c * kLanes;
      const __m512i sum = _mm512_load_si512(sums + r * kSumStride + c * 64);
      _mm512_store_ps(total, accumulate(_mm512_load_ps(total), sum, row_scale, scales[c]));
    }
  }
}

// Nibbles to signed bytes, in the order of the 8-bit format.
ONNXPORT_INLINE void unpack(const uint8_t* weights, int64_t bytes, uint8_t* out) {
  const __m512i zero_point = _mm512_set1_epi8(8);
  for (int64_t i = 0; i < bytes; i += 128, out += 256) {
    for (int c = 0; c < 128; c += 64) {
      const __m512i packed = Vec::load_bytes(weights + i + c);
      const __m512i low = Vec::low_nibbles(packed), high = Vec::high_nibbles(packed);
      _mm512_store_si512(out + c, _mm512_sub_epi8(low, zero_point));
      _mm512_store_si512(out + 128 + c, _mm512_sub_epi8(high, zero_point));
    }
  }
}

ONNXPORT_INLINE void prefetch(const uint8_t* weights, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) Vec::prefetch(weights + i);
}

// Some blocks of a panel, one after the other, as the tile registers read them.
struct Stretch {
  int64_t first, count;  // blocks
  const uint8_t* columns;
  int64_t stride;  // bytes from one block's columns to the next one's
  alignas(64) float scales[kStretchBytes / 512][kPanel];
  alignas(64) uint8_t unpacked[kStretchBytes];

  void read(const MatMul& m, const uint8_t* weights) {
    const int64_t quants = quant_bytes(m), bytes = block_bytes(m);
    columns = m.bits == 4 ? unpacked : weights;
    stride = m.bits == 4 ? kPanel * m.block_size : bytes;
    for (int64_t i = 0; i < count; i++, weights += bytes) {
      if (m.bits == 4) unpack(weights, quants, unpacked + i * stride);
      const float* from = read_scales(m, weights + quants, 0, kPanel, scales[i]);
      if (from != scales[i]) memcpy(scales[i], from, sizeof scales[i]);
    }
  }
};

template <int kParts>
void multiply_tiles(const MatMul& m, const Part& part, int64_t panel) {
  alignas(64) float totals[kAmxChunkRows * kPanel];
  alignas(64) char sums[(kLanes - 1) * kSumStride + 128];
  Stretch stretch;
  const int64_t blocks = num_blocks(m), tiles = ceil_div(part.row_end - part.row_begin, kRowTile);
  const int64_t most = kStretchBytes / (kPanel * m.block_size);
  const auto block_size = static_cast<size_t>(m.block_size);
  for (int64_t i = 0; i < tiles * kRowTile * kPanel; i += kLanes)
    _mm512_store_ps(totals + i, _mm512_setzero_ps());
  Unit units[2];
  for (stretch.first = 0; stretch.first < blocks; stretch.first += most) {
    stretch.count = blocks - stretch.first < most ? blocks - stretch.first : most;
    const uint8_t* weights = m.weights + panel * panel_bytes(m) + stretch.first * block_bytes(m);
    stretch.read(m, weights);
    // The next stretch is asked for meanwhile, a share of it with each unit.
    const int64_t share = ceil_div(block_bytes(m), tiles * 64) * 64;
    const uint8_t* ahead = weights + stretch.count * block_bytes(m);
    int64_t number = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
      for (int64_t i = 0; i < stretch.count; i++, number++) {
        const int64_t at = row_block(m, part.row_begin + tile * kRowTile, stretch.first + i);
        prefetch(ahead, share);
        ahead += share;
        Unit& unit = units[number % 2];
        unit = {m.quants + at * m.block_size, stretch.columns + i * stretch.stride, m.scales + at,
                stretch.scales[i], totals + tile * kRowTile * kPanel};
        if (number % 2 == 0) {
          start<0, kParts>(unit, block_size);
          if (number > 0) finish<1>(units[1], sums);
        } else {
          start<1, kParts>(unit, block_size);
          finish<0>(units[0], sums);
        }
      }
    }
    if (number % 2 == 0)
      finish<1>(units[1], sums);
    else
      finish<0>(units[0], sums);
  }
  float* const first = part.output + (panel - part.panel_begin) * kPanel;
  float* output = first;
  const float* total = totals;
  for (int64_t row = part.row_begin; row < part.row_end; row++) {
    const __m512 values[2] = {_mm512_load_ps(total), _mm512_load_ps(total + kLanes)};
    store_outputs<2>(output, m.n - panel * kPanel, values);
    output += part.stride;
    total += kPanel;
  }
  if (m.bias) add_bias(m, panel, first, part.stride, part.row_end - part.row_begin);
}

void multiply(const MatMul& m, const Part& part) {
  if (m.rows <= kFewRows || m.block_size > kMostInputs) return multiply_dots_or_one<Dot>(m, part);
  const TileConfiguration configuration = configuration_for(m.block_size < 64 ? m.block_size : 64);
  _tile_loadconfig(&configuration);
  for (int64_t panel = part.panel_begin; panel < part.panel_end; panel++) {
    if (m.block_size == 128)
      multiply_tiles<2>(m, part, panel);
    else
      multiply_tiles<1>(m, part, panel);
  }
  _tile_release();
}

constexpr MatMulKernels kKernels = {
    "amx", kAmxChunkRows, [](int64_t rows) { return rows <= kFewRows ? rows : kRowTile; }, quantize,
    multiply, kCoarseRows, Vec::kStreams};
static_assert(kCoarseRows <= kFewRows, "tiles know no corrections");

}  // namespace

const MatMulKernels* matmul_amx() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_amx() { return nullptr; }
}  // namespace onnxport

#endif
