// Sixteen floats of AVX-512 F/BW/DQ/VL. The contract is in vec_portable.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "half.h"

namespace {

struct Vec {
  static constexpr int kWidth = 16;
  static constexpr int kMaxRows = 8;  // 8 x 2 accumulators, 2 operands, 1 broadcast of 32
  static constexpr int kColumns = 2;
  using T = __m512;

  static inline T load(const float* p) { return _mm512_loadu_ps(p); }
  static inline void store(float* p, T a) { _mm512_storeu_ps(p, a); }
  static inline T set1(float x) { return _mm512_set1_ps(x); }
  static inline T add(T a, T b) { return _mm512_add_ps(a, b); }
  static inline T sub(T a, T b) { return _mm512_sub_ps(a, b); }
  static inline T mul(T a, T b) { return _mm512_mul_ps(a, b); }
  static inline T div(T a, T b) { return _mm512_div_ps(a, b); }
  static inline T fma(T a, T b, T c) { return _mm512_fmadd_ps(a, b, c); }
  static inline T max(T a, T b) { return _mm512_max_ps(a, b); }
  static inline T less(T a, T b, T yes, T no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  static inline float reduce_max(T a) { return _mm512_reduce_max_ps(a); }
  static inline float reduce_add(T a) { return _mm512_reduce_add_ps(a); }

  static inline T exp2(T x) {
    // Masked, as a hidden key's logit is far below: scaling down to a denormal, or past all of
    // them, costs the processor some hundred cycles. The comparison lets a NaN through.
    const __mmask16 normal = _mm512_cmp_ps_mask(x, set1(-126.f), _CMP_NLT_UQ);
    const T n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const T f = sub(x, n);
    T p = set1(1.326472707e-3f);  // minimax of degree 5 on [-0.5, 0.5], exact at 0
    p = fma(p, f, set1(9.671512649e-3f));
    p = fma(p, f, set1(5.550733744e-2f));
    p = fma(p, f, set1(2.402224209e-1f));
    p = fma(p, f, set1(6.931469776e-1f));
    p = fma(p, f, set1(1.f));
    return _mm512_maskz_scalef_ps(normal, p, n);
  }
  static inline T keep(T x, int64_t first, int64_t last, float other) {
    const uint32_t from = first <= 0 ? 0xffffu : first >= 16 ? 0u : 0xffffu << first;
    const uint32_t to = last <= 0 ? 0u : last >= 16 ? 0xffffu : (1u << last) - 1;
    return _mm512_mask_blend_ps(static_cast<__mmask16>(from & to), set1(other), x);
  }

  static inline T load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline T load_bfloat16(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static inline T load_int8(const int8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
  }
  static inline void store_half8(uint16_t* p, const float* x) {
    const __m128i y = _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), y);
  }

  static constexpr bool kConvertsHalf = true;
  static constexpr bool kAsksFar = true;
#if defined(__AMX_INT8__)
  static constexpr int kMostTurns = 1;  // to set up the tile registers for a chunk is dear
#else
  static constexpr int kMostTurns = 8;
#endif

  // Pairs of bfloat16.
#if defined(__AVX512BF16__)
  static constexpr bool kPrefersPairs = true;
#else
  static constexpr bool kPrefersPairs = false;
#endif
  using Pairs = __m512i;
  static inline Pairs load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static inline Pairs set1_pair(const float* p) { return _mm512_castps_si512(set1(*p)); }
  static inline T add_pairs(Pairs a, Pairs b, T c) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#else
    c = fma(second(a), second(b), c);
    return fma(first(a), first(b), c);
#endif
  }
  static inline Pairs one_of_pairs(Pairs a, bool is_second) {
    return _mm512_and_si512(a, _mm512_set1_epi32(is_second ? ~0xffff : 0xffff));
  }
  static inline void round_to_bfloat16(const float* x, int64_t n, float* out) {
#if defined(__AVX512BF16__)
    for (; n >= 16; n -= 16, x += 16, out += 8)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(load(x)));
    if (n > 0)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                       (__m128i)_mm256_cvtneps_pbh(_mm256_loadu_ps(x)));
#else
    onnxport::pack_bfloat16(x, n, out);
#endif
  }
  static inline void store_bfloat16(float* p, T a) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
#else
    float lanes[kWidth];
    store(lanes, a);
    onnxport::pack_bfloat16(lanes, kWidth, p);
#endif
  }
  static inline T first(Pairs a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
  static inline T second(Pairs a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(~0xffff)));
  }

  static constexpr int kQuadRows = 8;
  static constexpr int kQuadSums = 16;  // and operands, a broadcast, products and ones of 32
  using Ints = __m512i;
  using Quads = __m512i;
  static inline Quads load_quads(const int8_t* p) { return _mm512_loadu_si512(p); }
  static inline Quads set1_quad(const float* p) { return _mm512_castps_si512(set1(*p)); }
  static inline Ints set1_int(const float* p) { return _mm512_castps_si512(set1(*p)); }
  static inline Quads add_128(Quads a) {
    return _mm512_xor_si512(a, _mm512_set1_epi8(static_cast<char>(0x80)));
  }
  static inline Ints add_quads(Quads a, Quads b, Ints c) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(c, a, b);
#else
    const __m512i twos = _mm512_maddubs_epi16(a, b);
    return _mm512_add_epi32(c, _mm512_madd_epi16(twos, _mm512_set1_epi16(1)));
#endif
  }
  static inline Quads low_halves(Quads a) {
    return _mm512_and_si512(a, _mm512_set1_epi8(0x0f));
  }
  static inline Quads high_halves(Quads a) { return low_halves(_mm512_srli_epi16(a, 4)); }
  static inline Quads even_bytes(Quads a) { return _mm512_and_si512(a, _mm512_set1_epi16(0xff)); }
  static inline Quads odd_bytes(Quads a) { return _mm512_and_si512(a, _mm512_set1_epi16(~0xff)); }
  static inline Quads high_bytes(Quads a) { return _mm512_srli_epi16(a, 8); }
  static inline Quads mul_words(Quads a, Quads b) { return _mm512_mullo_epi16(a, b); }
  static inline Quads add_bytes(Quads a, Quads b) { return _mm512_add_epi8(a, b); }
  // Each of sixteen bytes four times, but for those that `without` has at 0x80, which become zero.
  static inline Quads spread(const uint8_t* p, __m512i without) {
    const __m512i all =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i order = _mm512_setr_epi32(
        0, 0x01010101, 0x02020202, 0x03030303, 0x04040404, 0x05050505, 0x06060606, 0x07070707,
        0x08080808, 0x09090909, 0x0a0a0a0a, 0x0b0b0b0b, 0x0c0c0c0c, 0x0d0d0d0d, 0x0e0e0e0e,
        0x0f0f0f0f);
    return _mm512_shuffle_epi8(all, _mm512_or_si512(order, without));
  }
  static inline Quads words_of(const uint8_t* p) {
    return spread(p, _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  }
  static inline Quads quads_of(const uint8_t* p) { return spread(p, _mm512_setzero_si512()); }
  static inline void store_quads(int8_t* p, Quads a) {
    _mm512_storeu_si512(p, a);
  }
  static inline T to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
  static inline void store_bytes(uint8_t* p, T a) {
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  static inline T swap_neighbours(T a) { return _mm512_permute_ps(a, 0xb1); }
  static inline T max_bits(T a, T b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  static inline uint32_t reduce_max_bits(T a) {
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_castps_si512(a)));
  }

  static inline void transpose(const float* const* src, int64_t offset, float* dst) {
    // Quarters of four rows land in one register, so that two rounds of shuffles finish it.
    for (int quarter = 0; quarter < 4; quarter++) {
      T row[4];
      for (int i = 0; i < 4; i++) {
        const int64_t at = offset + 4 * quarter;
        T x = _mm512_castps128_ps512(_mm_loadu_ps(src[i] + at));
        x = _mm512_insertf32x4(x, _mm_loadu_ps(src[4 + i] + at), 1);
        x = _mm512_insertf32x4(x, _mm_loadu_ps(src[8 + i] + at), 2);
        row[i] = _mm512_insertf32x4(x, _mm_loadu_ps(src[12 + i] + at), 3);
      }
      const T a = _mm512_unpacklo_ps(row[0], row[1]), b = _mm512_unpackhi_ps(row[0], row[1]);
      const T c = _mm512_unpacklo_ps(row[2], row[3]), d = _mm512_unpackhi_ps(row[2], row[3]);
      float* out = dst + 64 * quarter;
      store(out, _mm512_shuffle_ps(a, c, _MM_SHUFFLE(1, 0, 1, 0)));
      store(out + 16, _mm512_shuffle_ps(a, c, _MM_SHUFFLE(3, 2, 3, 2)));
      store(out + 32, _mm512_shuffle_ps(b, d, _MM_SHUFFLE(1, 0, 1, 0)));
      store(out + 48, _mm512_shuffle_ps(b, d, _MM_SHUFFLE(3, 2, 3, 2)));
    }
  }
};

}  // namespace
