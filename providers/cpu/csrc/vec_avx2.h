// Eight floats of AVX2, FMA and F16C. The contract is in vec_portable.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "half.h"

namespace {

struct Vec {
  static constexpr int kWidth = 8;
  static constexpr int kMaxRows = 6;  // 6 x 2 accumulators, 2 operands, 1 broadcast of 16
  static constexpr int kColumns = 2;
  using T = __m256;

  static inline T load(const float* p) { return _mm256_loadu_ps(p); }
  static inline void store(float* p, T a) { _mm256_storeu_ps(p, a); }
  static inline T set1(float x) { return _mm256_set1_ps(x); }
  static inline T add(T a, T b) { return _mm256_add_ps(a, b); }
  static inline T sub(T a, T b) { return _mm256_sub_ps(a, b); }
  static inline T mul(T a, T b) { return _mm256_mul_ps(a, b); }
  static inline T div(T a, T b) { return _mm256_div_ps(a, b); }
  static inline T fma(T a, T b, T c) { return _mm256_fmadd_ps(a, b, c); }
  static inline T max(T a, T b) { return _mm256_max_ps(a, b); }
  static inline T less(T a, T b, T yes, T no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static inline float reduce_max(T a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static inline float reduce_add(T a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }

  static inline T exp2(T x) {
    // At -127 the exponent field is 0, which makes the result 0. The operand order lets a NaN
    // through.
    x = _mm256_max_ps(set1(-127.f), x);
    const T n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const T f = sub(x, n);
    T p = set1(1.326472707e-3f);  // minimax of degree 5 on [-0.5, 0.5], exact at 0
    p = fma(p, f, set1(9.671512649e-3f));
    p = fma(p, f, set1(5.550733744e-2f));
    p = fma(p, f, set1(2.402224209e-1f));
    p = fma(p, f, set1(6.931469776e-1f));
    p = fma(p, f, set1(1.f));
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
  }
  static inline T keep(T x, int64_t first, int64_t last, float other) {
    const int from = static_cast<int>(first < 0 ? 0 : first > 8 ? 8 : first);
    const int to = static_cast<int>(last < 0 ? 0 : last > 8 ? 8 : last);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane);
    const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane);
    const __m256i mask = _mm256_andnot_si256(below, inside);
    return _mm256_blendv_ps(set1(other), x, _mm256_castsi256_ps(mask));
  }

  static inline T load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline T load_bfloat16(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static inline T load_int8(const int8_t* p) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
  }
  static inline void store_half8(uint16_t* p, const float* x) {
    const __m128i y = _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), y);
  }

  static constexpr bool kConvertsHalf = true;
  static constexpr bool kAsksFar = false;
  static constexpr int kMostTurns = 1;  // in turns floats take longer
  static constexpr bool kPrefersPairs = false;
  using Pairs = __m256i;
  static inline Pairs load_pairs(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static inline Pairs set1_pair(const float* p) { return _mm256_castps_si256(set1(*p)); }
  static inline T add_pairs(Pairs a, Pairs b, T c) {
    c = fma(second(a), second(b), c);
    return fma(first(a), first(b), c);
  }
  static inline Pairs one_of_pairs(Pairs a, bool is_second) {
    return _mm256_and_si256(a, _mm256_set1_epi32(is_second ? ~0xffff : 0xffff));
  }
  static inline void round_to_bfloat16(const float* x, int64_t n, float* out) {
    onnxport::pack_bfloat16(x, n, out);
  }
  static inline void store_bfloat16(float* p, T a) {
    float lanes[kWidth];
    store(lanes, a);
    onnxport::pack_bfloat16(lanes, kWidth, p);
  }
  static inline T first(Pairs a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
  static inline T second(Pairs a) {
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(~0xffff)));
  }

  static constexpr int kQuadRows = 8;
  static constexpr int kQuadSums = 8;  // and operands, a broadcast, products and ones of 16
  using Ints = __m256i;
  using Quads = __m256i;
  static inline Quads load_quads(const int8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static inline Quads set1_quad(const float* p) { return _mm256_castps_si256(set1(*p)); }
  static inline Ints set1_int(const float* p) { return _mm256_castps_si256(set1(*p)); }
  static inline Quads add_128(Quads a) {
    return _mm256_xor_si256(a, _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  static inline Ints add_quads(Quads a, Quads b, Ints c) {
    const __m256i twos = _mm256_maddubs_epi16(a, b);
    return _mm256_add_epi32(c, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
  }
  static inline Quads low_halves(Quads a) {
    return _mm256_and_si256(a, _mm256_set1_epi8(0x0f));
  }
  static inline Quads high_halves(Quads a) { return low_halves(_mm256_srli_epi16(a, 4)); }
  static inline Quads even_bytes(Quads a) { return _mm256_and_si256(a, _mm256_set1_epi16(0xff)); }
  static inline Quads odd_bytes(Quads a) { return _mm256_and_si256(a, _mm256_set1_epi16(~0xff)); }
  static inline Quads high_bytes(Quads a) { return _mm256_srli_epi16(a, 8); }
  static inline Quads mul_words(Quads a, Quads b) { return _mm256_mullo_epi16(a, b); }
  static inline Quads add_bytes(Quads a, Quads b) { return _mm256_add_epi8(a, b); }
  // Each of eight bytes four times, but for those that `without` has at 0x80, which become zero.
  static inline Quads spread(const uint8_t* p, __m256i without) {
    const __m256i both =
        _mm256_broadcastsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i order = _mm256_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303, 0x04040404,
                                            0x05050505, 0x06060606, 0x07070707);
    return _mm256_shuffle_epi8(both, _mm256_or_si256(order, without));
  }
  static inline Quads words_of(const uint8_t* p) {
    return spread(p, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  }
  static inline Quads quads_of(const uint8_t* p) { return spread(p, _mm256_setzero_si256()); }
  static inline void store_quads(int8_t* p, Quads a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
  }
  static inline T to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
  static inline void store_bytes(uint8_t* p, T a) {
    const __m256i x = _mm256_cvtps_epi32(a);
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  static inline T swap_neighbours(T a) { return _mm256_permute_ps(a, 0xb1); }
  static inline T max_bits(T a, T b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  static inline uint32_t reduce_max_bits(T a) {
    const __m256i b = _mm256_castps_si256(a);
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
  }

  static inline void transpose(const float* const* src, int64_t offset, float* dst) {
    for (int half = 0; half < 2; half++) {
      T row[4];
      for (int i = 0; i < 4; i++) {
        const int64_t at = offset + 4 * half;
        row[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(src[i] + at)),
                                      _mm_loadu_ps(src[4 + i] + at), 1);
      }
      const T a = _mm256_unpacklo_ps(row[0], row[1]), b = _mm256_unpackhi_ps(row[0], row[1]);
      const T c = _mm256_unpacklo_ps(row[2], row[3]), d = _mm256_unpackhi_ps(row[2], row[3]);
      float* out = dst + 64 * half;
      store(out, _mm256_shuffle_ps(a, c, _MM_SHUFFLE(1, 0, 1, 0)));
      store(out + 16, _mm256_shuffle_ps(a, c, _MM_SHUFFLE(3, 2, 3, 2)));
      store(out + 32, _mm256_shuffle_ps(b, d, _MM_SHUFFLE(1, 0, 1, 0)));
      store(out + 48, _mm256_shuffle_ps(b, d, _MM_SHUFFLE(3, 2, 3, 2)));
    }
  }
};

}  // namespace
