// Activations to int8, and products of few rows, with AVX-512 VNNI. Compiled once for each set of
// kernels that is made of it.
#pragma once

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "matmul.h"

#if defined(_MSC_VER)
#define ONNXPORT_INLINE static __forceinline
#else
#define ONNXPORT_INLINE static inline __attribute__((always_inline))
#endif

namespace onnxport {
namespace {

// Below it a block counts as zero: 127 over the largest magnitude must not overflow.
constexpr float kSmallest = 1e-36f;

ONNXPORT_INLINE __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// One block of one row; count inputs are there, the others are zero.
template <int kBlock>
ONNXPORT_INLINE void quantize_block(const MatMul& m, const float* x, int64_t count, int64_t at) {
  __m512 values[kBlock / 16];
  for (int i = 0; i < kBlock / 16; i++)
    values[i] = _mm512_maskz_loadu_ps(first_lanes(count - 16 * i), x + 16 * i);
  // Magnitudes compare like integers, and a NaN is then the largest of all.
  __m512i magnitude = _mm512_setzero_si512();
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  for (const __m512 value : values)
    magnitude =
        _mm512_max_epu32(magnitude, _mm512_and_si512(_mm512_castps_si512(value), no_sign));
  const __m128 largest =
      _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(_mm512_reduce_max_epu32(magnitude))));
  const float maximum = _mm_cvtss_f32(largest);
  const bool usable = maximum >= kSmallest && maximum <= FLT_MAX;
  const __mmask16 kept = usable ? 0xffff : 0;
  const __m512 inverse = _mm512_set1_ps(usable ? 127.f / maximum : 0.f);
  const __m128i order = m.bits == 4 ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11,
                                                    13, 15)
                                    : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
                                                    14, 15);
  __m512i sum = _mm512_setzero_si512();
  int8_t* quants = m.quants + at * kBlock;
  for (int i = 0; i < kBlock / 16; i++) {
    const __m512i quant = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(kept, values[i], inverse));
    sum = _mm512_add_epi32(sum, quant);
    _mm_store_si128(reinterpret_cast<__m128i*>(quants + 16 * i),
                    _mm_shuffle_epi8(_mm512_cvtepi32_epi8(quant), order));
  }
  m.scales[at] = usable ? maximum / 127.f : maximum < kSmallest ? 0.f : NAN;
  m.corrections[at] = _mm512_reduce_add_epi32(sum) * (m.bits == 4 ? -8 : -128);
}

// A row that fills up the last tile.
ONNXPORT_INLINE void clear_block(const MatMul& m, int64_t at) {
  memset(m.quants + at * m.block_size, 0, static_cast<size_t>(m.block_size));
  m.scales[at] = 0;
  m.corrections[at] = 0;
}

template <int kBlock>
void quantize_rows(const MatMul& m, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    for (int64_t block = 0; block < num_blocks(m); block++) {
      const int64_t first = block * kBlock, left = m.k - first, at = row_block(m, row, block);
      if (row < m.rows)
        quantize_block<kBlock>(m, m.input + row * m.k + first, left < kBlock ? left : kBlock, at);
      else
        clear_block(m, at);
    }
  }
}

void quantize(const MatMul& m, int64_t begin, int64_t end) {
  switch (m.block_size) {
    case 32: return quantize_rows<32>(m, begin, end);
    case 64: return quantize_rows<64>(m, begin, end);
    default: return quantize_rows<128>(m, begin, end);
  }
}

// Sums of integer products become their share of the output.
ONNXPORT_INLINE __m512 accumulate(__m512 total, __m512i sum, __m512 row_scale, __m512 scales) {
  return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), row_scale), scales, total);
}

// 64 bytes of packed weights. Asks for those half a block or more ahead: the processor's own
// prefetching stops at the end of each page, and at the end of what it finds room to run ahead.
ONNXPORT_INLINE __m512i load_weights(const uint8_t* weights) {
  _mm_prefetch(reinterpret_cast<const char*>(weights) + 2048, _MM_HINT_T0);
  return _mm512_load_si512(weights);
}

ONNXPORT_INLINE __m512i four_inputs(const int8_t* quants) {
  int32_t word;
  memcpy(&word, quants, 4);
  return _mm512_set1_epi32(word);
}

// Adds a block's products of kRows rows with a panel.
template <int kBits, int kBlock, int kRows>
ONNXPORT_INLINE void add_products(const uint8_t* weights, const int8_t* quants,
                                  __m512i (&sums)[kRows][2]) {
  const __m512i nibble = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-128);
  for (int i = 0; i < kBlock; i += 32 / kBits, weights += 4 * kPanel) {
    __m512i low[2], high[2];
    for (int c = 0; c < 2; c++) {
      const __m512i packed = load_weights(weights + 64 * c);
      if (kBits == 4) {
        low[c] = _mm512_and_si512(packed, nibble);
        high[c] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
      } else {
        low[c] = _mm512_xor_si512(packed, flip);
      }
    }
    for (int r = 0; r < kRows; r++) {
      const __m512i x = four_inputs(quants + r * kBlock + i);
      for (int c = 0; c < 2; c++) sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], low[c], x);
    }
    if (kBits == 8) continue;
    for (int r = 0; r < kRows; r++) {
      const __m512i x = four_inputs(quants + r * kBlock + i + 4);
      for (int c = 0; c < 2; c++) sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], high[c], x);
    }
  }
}

ONNXPORT_INLINE void store_panel(const MatMul& m, int64_t panel, float* output, __m512 low,
                                 __m512 high) {
  const int64_t left = m.n - panel * kPanel;
  _mm512_mask_storeu_ps(output, first_lanes(left), low);
  _mm512_mask_storeu_ps(output + 16, first_lanes(left - 16), high);
}

// One panel's outputs of kRows rows of one tile.
template <int kBits, int kBlock, int kRows>
void multiply_rows(const MatMul& m, int64_t panel, int64_t row) {
  const int64_t blocks = num_blocks(m);
  const uint8_t* weights = m.weights + panel * panel_bytes(m);
  __m512 totals[kRows][2];
  for (int r = 0; r < kRows; r++) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
  for (int64_t block = 0; block < blocks; block++, weights += block_bytes(m)) {
    const int64_t at = row_block(m, row, block);
    __m512i sums[kRows][2];
    for (int r = 0; r < kRows; r++)
      sums[r][0] = sums[r][1] = _mm512_set1_epi32(m.corrections[at + r]);
    add_products<kBits, kBlock, kRows>(weights, m.quants + at * kBlock, sums);
    const uint8_t* scales = weights + quant_bytes(m);
    const __m512 low = _mm512_load_ps(scales), high = _mm512_load_ps(scales + 64);
    for (int r = 0; r < kRows; r++) {
      const __m512 row_scale = _mm512_set1_ps(m.scales[at + r]);
      totals[r][0] = accumulate(totals[r][0], sums[r][0], row_scale, low);
      totals[r][1] = accumulate(totals[r][1], sums[r][1], row_scale, high);
    }
  }
  for (int r = 0; r < kRows; r++)
    store_panel(m, panel, m.output + (row + r) * m.n + panel * kPanel, totals[r][0], totals[r][1]);
}

// As many rows at once as the registers can hold sums of.
constexpr int64_t kMostRows = 8;

template <int kBits, int kBlock>
void multiply_group(const MatMul& m, int64_t panel, int64_t row, int64_t rows) {
  switch (rows) {
    case 1: return multiply_rows<kBits, kBlock, 1>(m, panel, row);
    case 2: return multiply_rows<kBits, kBlock, 2>(m, panel, row);
    case 3: return multiply_rows<kBits, kBlock, 3>(m, panel, row);
    case 4: return multiply_rows<kBits, kBlock, 4>(m, panel, row);
    case 5: return multiply_rows<kBits, kBlock, 5>(m, panel, row);
    case 6: return multiply_rows<kBits, kBlock, 6>(m, panel, row);
    case 7: return multiply_rows<kBits, kBlock, 7>(m, panel, row);
    default: return multiply_rows<kBits, kBlock, kMostRows>(m, panel, row);
  }
}

template <int kBits, int kBlock>
void multiply_panels(const MatMul& m, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                     int64_t row_end) {
  for (int64_t panel = panel_begin; panel < panel_end; panel++)
    for (int64_t row = row_begin; row < row_end; row += kMostRows)
      multiply_group<kBits, kBlock>(m, panel, row,
                                    row_end - row < kMostRows ? row_end - row : kMostRows);
}

template <int kBits>
void multiply_bits(const MatMul& m, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                   int64_t row_end) {
  switch (m.block_size) {
    case 32: return multiply_panels<kBits, 32>(m, panel_begin, panel_end, row_begin, row_end);
    case 64: return multiply_panels<kBits, 64>(m, panel_begin, panel_end, row_begin, row_end);
    default: return multiply_panels<kBits, 128>(m, panel_begin, panel_end, row_begin, row_end);
  }
}

void multiply_vnni(const MatMul& m, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                   int64_t row_end) {
  if (m.bits == 4)
    multiply_bits<4>(m, panel_begin, panel_end, row_begin, row_end);
  else
    multiply_bits<8>(m, panel_begin, panel_end, row_begin, row_end);
}

}  // namespace
}  // namespace onnxport
