// Products of many rows and four-bit weights for AVX2, which has no dot product of bytes.
//
// A block of a panel's weights is unpacked into the first cache once for all rows. What is left for
// each row is to multiply and to add: weights are operands in memory, and the registers hold the
// sums of three rows and four vectors of outputs.
//
// AVX2 multiplies unsigned by signed bytes and adds two products in 16 bits, with saturation. Here
// inputs are the unsigned ones:
//
//   sum of w q = sum of w (q + 128) - 128 sum of w
//
// with weights from -8 to 7 and q + 128 from 1 to 255, so that 32 inputs put at most 16 * 8 * 255 =
// 32640 into each half of a lane. Twice an E2M1 is from -12 to 12: 16 inputs put at most 8 * 12 * 255 =
// 24480 there, and 32 could put 48960. Sums are exact; the bits of outputs are those of matmul_impl.h.
#pragma once

#include "matmul_one_impl.h"

namespace onnxport {
namespace {

constexpr int64_t kManyRows = 8;      // with fewer, unpacking costs more than it saves
constexpr int64_t kSharingRows = 64;  // whose inputs and totals stay in the first cache meanwhile

// A panel's weights of one block, which were those of nibbles.
template <Numbers kNumbers, int64_t kPanelOutputs>
struct Unpacked {
  static constexpr int64_t kOutputs = kPanelOutputs;
  static constexpr int64_t kGroup = kNumbers == Numbers::kFp4 ? 16 : 32;  // inputs in 16 bits
  static constexpr int kCount = kOutputs / Vec::kLanes;  // vectors
  static constexpr int64_t kFourInputs = kOutputs * 4;  // bytes

  alignas(64) uint8_t quants[kLargestBlock * kOutputs];  // [inputs / 4][kOutputs][4], signed
  alignas(64) uint8_t start[kOutputs * 4];               // what an output's sum, of 32 bits, begins with
  alignas(64) float converted[kOutputs];
  const float* scales;  // [kOutputs]
};

// sums += x's unsigned times w's signed bytes, each two together in 16 bits. Around intrinsics GCC
// 12 loads weights ahead, into registers that there are not, and keeps sums in memory instead.
ONNXPORT_INLINE void add_bytes(Vec::Ints& sums, Vec::Ints x, const uint8_t* w) {
#if defined(__GNUC__) && !defined(__clang__)
  Vec::Ints product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
      : "+x"(sums), "=&x"(product)
      : "x"(x), "m"(*reinterpret_cast<const Vec::Ints*>(w)));
#else
  sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(x, Vec::load_bytes(w)));
#endif
}

ONNXPORT_INLINE Vec::Ints four_inputs(const int8_t* quants) {
  int32_t word;
  memcpy(&word, quants, 4);
  return _mm256_set1_epi32(word);
}

ONNXPORT_INLINE void store_bytes(uint8_t* p, Vec::Ints a) {
  _mm256_store_si256(reinterpret_cast<Vec::Ints*>(p), a);
}

template <Numbers kNumbers>
ONNXPORT_INLINE Vec::Ints signed_weights(Vec::Ints nibbles) {
  if constexpr (kNumbers == Numbers::kFp4) return Vec::look_up(kFp4, nibbles);
  return _mm256_sub_epi8(nibbles, _mm256_set1_epi8(8));
}

// Unpacks one block, and asks for the next one meanwhile.
template <Numbers kNumbers, int64_t kOutputs>
ONNXPORT_ALONE void unpack(const MatMul& m, const uint8_t* weights,
                           Unpacked<kNumbers, kOutputs>& out) {
  constexpr int kCount = Unpacked<kNumbers, kOutputs>::kCount;
  constexpr int64_t kFourInputs = Unpacked<kNumbers, kOutputs>::kFourInputs;
  const int64_t ahead = block_bytes(m, kOutputs);
  const uint8_t* packed = weights + quant_bytes(m, kOutputs);
  out.scales = read_scales(m, packed, 0, kOutputs, out.converted);
  prefetch_scales(m, packed + ahead, kOutputs);
  const Vec::Ints ones = _mm256_set1_epi8(1);
  Vec::Ints sums[kCount];
  ONNXPORT_UNROLL
  for (int c = 0; c < kCount; c++) sums[c] = _mm256_setzero_si256();
  uint8_t* to = out.quants;
  for (int64_t i = 0; i < m.block_size; i += 8, weights += kFourInputs, to += 2 * kFourInputs) {
    ONNXPORT_UNROLL
    for (int c = 0; c < kCount; c++) {
      const int64_t at = c * Vec::kLanes * 4;
      if (at % 64 == 0) Vec::prefetch(weights + at + ahead);
      const Vec::Ints both = Vec::load_bytes(weights + at);
      const Vec::Ints low = signed_weights<kNumbers>(Vec::low_nibbles(both));
      const Vec::Ints high = signed_weights<kNumbers>(Vec::high_nibbles(both));
      store_bytes(to + at, low);
      store_bytes(to + kFourInputs + at, high);
      // Of at most 256 inputs, 128 in each half of a lane: no less than -1024, or -1536 of E2M1.
      sums[c] = _mm256_add_epi16(sums[c], _mm256_maddubs_epi16(ones, _mm256_add_epi8(low, high)));
    }
  }
  ONNXPORT_UNROLL
  for (int c = 0; c < kCount; c++)
    store_bytes(out.start + c * Vec::kLanes * 4,
                _mm256_madd_epi16(sums[c], _mm256_set1_epi16(-128)));
}

// The products of four inputs of kRows rows. The first ones of a group begin its sums.
template <bool kIsFirst, int kRows, int kCount>
ONNXPORT_INLINE void add_four(const int8_t* quants, int64_t block_size, const uint8_t* weights,
                              Vec::Ints (&parts)[kRows][kCount]) {
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    const Vec::Ints x = four_inputs(quants + r * block_size);
    ONNXPORT_UNROLL
    for (int c = 0; c < kCount; c++) {
      const uint8_t* w = weights + c * Vec::kLanes * 4;
      if constexpr (kIsFirst)
        parts[r][c] = _mm256_maddubs_epi16(x, Vec::load_bytes(w));
      else
        add_bytes(parts[r][c], x, w);
    }
  }
}

// Adds the products of a block of kRows rows, the first of which is at `at`, to their totals.
template <int kRows, class Unpacked>
ONNXPORT_ALONE void multiply_rows(const MatMul& m, const Unpacked& unpacked, int64_t at,
                                  float* totals) {
  constexpr int kCount = Unpacked::kCount;
  constexpr int64_t kFourInputs = Unpacked::kFourInputs, kOutputs = Unpacked::kOutputs;
  constexpr int64_t kGroup = Unpacked::kGroup;
  const int64_t block_size = m.block_size, group = block_size < kGroup ? block_size : kGroup;
  const int8_t* quants = m.quants + at * block_size;
  const uint8_t* weights = unpacked.quants;
  Vec::Ints sums[kRows][kCount];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    const Vec::Ints correction = _mm256_set1_epi32(m.corrections[at + r]);
    ONNXPORT_UNROLL
    for (int c = 0; c < kCount; c++)
      sums[r][c] =
          _mm256_add_epi32(correction, Vec::load_bytes(unpacked.start + c * Vec::kLanes * 4));
  }
  for (int64_t begin = 0; begin < block_size; begin += group, quants += group) {
    Vec::Ints parts[kRows][kCount];
    add_four<true>(quants, block_size, weights, parts);
    add_four<false>(quants + 4, block_size, weights + kFourInputs, parts);
    weights += 2 * kFourInputs;
    int64_t i = 8;
    do {
      add_four<false>(quants + i, block_size, weights, parts);
      add_four<false>(quants + i + 4, block_size, weights + kFourInputs, parts);
      weights += 2 * kFourInputs;
      i += 8;
    } while (i < group);
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      ONNXPORT_UNROLL
      for (int c = 0; c < kCount; c++) {
        const Vec::Ints two = _mm256_madd_epi16(parts[r][c], _mm256_set1_epi16(1));
        sums[r][c] = _mm256_add_epi32(sums[r][c], two);
      }
    }
  }
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    const Vec::Floats scale = Vec::set1(m.scales[at + r]);
    ONNXPORT_UNROLL
    for (int c = 0; c < kCount; c++) {
      float* total = totals + r * kOutputs + c * Vec::kLanes;
      Vec::store(total, accumulate(Vec::load(total), sums[r][c], scale,
                                   Vec::load(unpacked.scales + c * Vec::kLanes)));
    }
  }
}

// A panel's outputs of `count` rows, at most kSharingRows.
template <Numbers kNumbers, int64_t kOutputs>
ONNXPORT_ALONE void multiply_panel(const MatMul& m, int64_t panel, int64_t row, int64_t count,
                                   float* totals) {
  Unpacked<kNumbers, kOutputs> unpacked;
  memset(totals, 0, static_cast<size_t>(count * kOutputs) * sizeof(float));
  const uint8_t* weights = m.weights + panel * panel_bytes(m, kOutputs);
  const int64_t bytes = block_bytes(m, kOutputs);
  for (int64_t block = 0; block < num_blocks(m); block++, weights += bytes) {
    unpack(m, weights, unpacked);
    const int64_t at = row_block(m, row, block);
    int64_t r = 0;
    // Four are two and two, rather than three and one.
    for (; count - r >= 3 && count - r != 4; r += 3)
      multiply_rows<3>(m, unpacked, at + r, totals + r * kOutputs);
    for (; count - r >= 2; r += 2) multiply_rows<2>(m, unpacked, at + r, totals + r * kOutputs);
    if (r < count) multiply_rows<1>(m, unpacked, at + r, totals + r * kOutputs);
  }
}

template <Numbers kNumbers, int64_t kOutputs>
void multiply_many(const MatMul& m, const Part& part) {
  constexpr int kCount = Unpacked<kNumbers, kOutputs>::kCount;
  alignas(64) float totals[kSharingRows * kOutputs];
  for (int64_t panel = part.panel_begin; panel < part.panel_end; panel++) {
    float* to = part.output + (panel - part.panel_begin) * kOutputs;
    for (int64_t row = part.row_begin; row < part.row_end; row += kSharingRows) {
      const int64_t left = part.row_end - row, count = left < kSharingRows ? left : kSharingRows;
      multiply_panel<kNumbers, kOutputs>(m, panel, row, count, totals);
      for (int64_t r = 0; r < count; r++) {
        Vec::Floats outputs[kCount];
        for (int c = 0; c < kCount; c++)
          outputs[c] = Vec::load(totals + r * kOutputs + c * Vec::kLanes);
        store_outputs<kCount>(to + r * part.stride, m.n - panel * kOutputs, outputs);
      }
      finish_outputs(m, panel, row, to, part.stride, count);
      to += count * part.stride;
    }
  }
}

static inline bool is_for_many(const MatMul& m) { return m.bits == 4 && m.rows >= kManyRows; }

// As quantize() does it, but for inputs that are to be unsigned.
void quantize_for_avx2(const MatMul& m, const float* x, int64_t row, int64_t begin, int64_t end) {
  quantize(m, x, row, begin, end);
  if (!is_for_many(m)) return;
  for (int64_t block = begin; block < end; block++) {
    const int64_t at = row_block(m, row, block);
    m.corrections[at] = 0;  // unpacking knows what takes the 128 out of a sum
    int8_t* quants = m.quants + at * m.block_size;
    for (int64_t i = 0; i < m.block_size; i += 16) {
      __m128i* sixteen = reinterpret_cast<__m128i*>(quants + i);
      _mm_store_si128(sixteen, _mm_xor_si128(_mm_load_si128(sixteen), _mm_set1_epi8(-128)));
    }
  }
}

}  // namespace
}  // namespace onnxport
