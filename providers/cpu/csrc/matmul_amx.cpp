// Products for AMX, whose tile registers multiply 16 rows by 16 outputs at once; few rows go by
// AVX-512 VNNI. Compiled with those sets' flags: nothing here may run before the processor and the
// operating system have been asked, and nothing here may be shared with other objects.
#include "matmul.h"

#if defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include "amx.h"
#include "matmul_vec_avx512.h"

#include "matmul_impl.h"

namespace onnxport {
namespace {

constexpr int64_t kFewRows = 8;        // up to so many, VNNI is faster
constexpr int64_t kMostInputs = 128;   // of a block, for which there are tile registers
constexpr int64_t kAmxChunkRows = 256;  // whose totals stay in the L1 cache
constexpr int kLanes = 16;

// The tile registers: two sums, two parts of a row tile, two columns of two parts of weights.
// inputs: those that one instruction multiplies, 64 or fewer.
TileConfiguration configuration_for(int64_t inputs) {
  TileConfiguration configuration;
  for (int t = 2; t < 4; t++) configuration.row_bytes[t] = static_cast<uint16_t>(inputs);
  for (int t = 4; t < 8; t++) configuration.rows[t] = static_cast<uint8_t>(inputs / 4);
  return configuration;
}

// Sums of a row tile that are not yet part of the totals. They are added while the tile registers
// work on the next ones.
struct Pending {
  const int32_t* sums;      // [2][16 rows][16]
  const float* row_scales;  // [16]
  const uint8_t* scales;    // [kPanel], packed
  const MatMul* product;
  float* totals;            // [16][kPanel]
};

ONNXPORT_INLINE void add(const Pending& p) {
  alignas(64) float converted[kPanel];
  const float* scales = read_scales(*p.product, p.scales, 0, kPanel, converted);
  for (int c = 0; c < 2; c++) {
    const __m512 scale = _mm512_loadu_ps(scales + c * kLanes);
    for (int r = 0; r < kLanes; r++) {
      float* total = p.totals + r * kPanel + c * kLanes;
      const __m512i sum = _mm512_load_si512(p.sums + (c * kLanes + r) * kLanes);
      _mm512_store_ps(total, accumulate(_mm512_load_ps(total), sum,
                                        _mm512_set1_ps(p.row_scales[r]), scale));
    }
  }
}

ONNXPORT_INLINE void prefetch(const uint8_t* weights, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(weights + i), _MM_HINT_T0);
}

// Nibbles to signed bytes, in the order of the 8-bit format.
ONNXPORT_INLINE void unpack(const uint8_t* weights, int64_t bytes, uint8_t* out) {
  const __m512i zero_point = _mm512_set1_epi8(8);
  for (int64_t i = 0; i < bytes; i += 128, out += 256) {
    for (int c = 0; c < 128; c += 64) {
      Vec::prefetch(weights + i + c + 2048);
      const __m512i packed = Vec::load_bytes(weights + i + c);
      const __m512i low = Vec::low_nibbles(packed), high = Vec::high_nibbles(packed);
      _mm512_store_si512(out + c, _mm512_sub_epi8(low, zero_point));
      _mm512_store_si512(out + 128 + c, _mm512_sub_epi8(high, zero_point));
    }
  }
}

// kParts: instructions for a block, 1 or 2.
template <int kParts>
void multiply_tiles(const MatMul& m, const Part& part, int64_t panel) {
  alignas(64) float totals[kAmxChunkRows * kPanel];
  alignas(64) int32_t sums[2][2 * kLanes * kLanes];
  alignas(64) uint8_t unpacked[kPanel * kMostInputs];
  const int64_t blocks = num_blocks(m), tiles = ceil_div(part.row_end - part.row_begin, kRowTile);
  const uint8_t* weights = m.weights + panel * panel_bytes(m);
  for (int64_t i = 0; i < tiles * kRowTile * kPanel; i += kLanes)
    _mm512_store_ps(totals + i, _mm512_setzero_ps());

  Pending pending{};
  int half = 0;
  for (int64_t block = 0; block < blocks; block++, weights += block_bytes(m)) {
    const uint8_t* columns = weights;
    if (m.bits == 4) {
      unpack(weights, quant_bytes(m), unpacked);
      columns = unpacked;
    } else {
      prefetch(weights + block_bytes(m), quant_bytes(m));
    }
    _tile_loadd(4, columns, 128);
    _tile_loadd(5, columns + 64, 128);
    if (kParts == 2) {
      _tile_loadd(6, columns + 2048, 128);
      _tile_loadd(7, columns + 2112, 128);
    }
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t at = row_block(m, part.row_begin + tile * kRowTile, block);
      const int8_t* quants = m.quants + at * m.block_size;
      const auto stride = static_cast<size_t>(m.block_size);
      _tile_loadd(0, kZeroRegister, 64);
      _tile_loadd(1, kZeroRegister, 64);
      _tile_loadd(2, quants, stride);
      _tile_dpbssd(0, 2, 4);
      _tile_dpbssd(1, 2, 5);
      if (kParts == 2) {
        _tile_loadd(3, quants + 64, stride);
        _tile_dpbssd(0, 3, 6);
        _tile_dpbssd(1, 3, 7);
      }
      _tile_stored(0, sums[half], 64);
      _tile_stored(1, sums[half] + 256, 64);
      if (pending.sums) add(pending);
      pending = {sums[half], m.scales + at, weights + quant_bytes(m), &m,
                 totals + tile * kRowTile * kPanel};
      half ^= 1;
    }
  }
  add(pending);
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
  if (m.rows <= kFewRows || m.block_size > kMostInputs) return multiply_dots<Dot>(m, part);
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
    multiply, kCoarseRows};
static_assert(kCoarseRows <= kFewRows, "tiles know no corrections");

}  // namespace

const MatMulKernels* matmul_amx() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_amx() { return nullptr; }
}  // namespace onnxport

#endif
