// Eight lanes of 32 bits of AVX2 or AVX-VNNI. The contract is in matmul_impl.h.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "matmul_vec.h"

namespace onnxport {
namespace {

struct Vec {
  static constexpr int kLanes = 8;
#if defined(__AVXVNNI__)
  static constexpr int64_t kZeroPoint8 = 128;  // one factor must be unsigned
#else
  static constexpr int64_t kZeroPoint8 = 0;
#endif
  static constexpr int32_t kZeroPointFp4 = kFp4ZeroPoint;
  static constexpr int64_t kStreams = 2, kStreamAhead = 1024;  // the best on a Zen 3
  static constexpr int64_t kAhead = 2048;
  using Floats = __m256;
  using Ints = __m256i;

  static inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static inline Floats load_half(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a); }
  static inline Floats set1(float x) { return _mm256_set1_ps(x); }
  static inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static inline Floats keep(Floats a, uint32_t lanes, Floats others) {
    const Ints bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const Ints has = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bits);
    return _mm256_blendv_ps(others, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(has, bits)));
  }
  static inline float largest_lane(Floats a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  static inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }

  static inline Ints load_bytes(const uint8_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  static inline Ints low_nibbles(Ints a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
  static inline Ints high_nibbles(Ints a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
  static inline Ints look_up(const int8_t* table, Ints nibbles) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), nibbles);
  }
  ONNXPORT_INLINE void prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  }

  static inline float largest_magnitude(const float* x, int64_t count) {
    const Ints no_sign = _mm256_set1_epi32(0x7fffffff);
    Ints largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += 8)
      largest = _mm256_max_epi32(largest,
                                 _mm256_and_si256(_mm256_castps_si256(load(x + i)), no_sign));
    __m128i half =
        _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
  }
  static inline int32_t round(const float* x, int64_t count, float factor, const int8_t* order,
                              int8_t* out) {
    const __m128i shuffle = _mm_load_si128(reinterpret_cast<const __m128i*>(order));
    Ints sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += 16) {
      const Ints low = _mm256_cvtps_epi32(mul(load(x + i), set1(factor)));
      const Ints high = _mm256_cvtps_epi32(mul(load(x + i + 8), set1(factor)));
      sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
      const Ints words =
          _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), _MM_SHUFFLE(3, 1, 2, 0));
      const __m128i bytes =
          _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      _mm_store_si128(reinterpret_cast<__m128i*>(out + i), _mm_shuffle_epi8(bytes, shuffle));
    }
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtsi128_si32(half);
  }
};

// What all dots have in common: each input is in every lane.
struct DotBase {
  static constexpr int64_t kOutputs = kPanel;
  static constexpr int kRows = 1;
  static constexpr int kMostUnits = 4;
  static constexpr bool kWholeBlocks = true;
  static constexpr int columns(int units) { return units <= 2 ? 4 : 2; }
  using Sum = Vec::Ints;
  struct Inputs {
    Vec::Ints first, second;
  };

  static inline Inputs inputs(const int8_t* quants, int64_t) {
    int32_t first, second;
    memcpy(&first, quants, 4);
    memcpy(&second, quants + 4, 4);
    return {_mm256_set1_epi32(first), _mm256_set1_epi32(second)};
  }
  static inline Sum start(const int32_t* corrections) { return _mm256_set1_epi32(*corrections); }
  static inline void rows(Sum sum, Vec::Ints* out) { out[0] = sum; }
};

#if defined(__AVXVNNI__)

template <Numbers kNumbers>
struct Dot : DotBase {
  static constexpr int kBits = kNumbers == Numbers::kInt8 ? 8 : 4;
  static constexpr int kGroup = 0;
  using Partial = Sum;
  struct Weights {
    Vec::Ints first, second;
  };

  static inline Weights prepare(Vec::Ints first, Vec::Ints second) {
    if constexpr (kNumbers == Numbers::kFp4)
      return {Vec::look_up(kUnsignedFp4, first), Vec::look_up(kUnsignedFp4, second)};
    const Vec::Ints flip = _mm256_set1_epi8(kBits == 8 ? -128 : 0);
    return {_mm256_xor_si256(first, flip), _mm256_xor_si256(second, flip)};
  }
  static inline void add(Sum& sum, const Weights& w, const Inputs& x) {
    add_four(sum, w.first, x.first);
    add_four(sum, w.second, x.second);
  }
  static inline void add_four(Sum& sum, Vec::Ints w, Vec::Ints x) {
#if defined(__GNUC__) && !defined(__clang__) && !defined(ONNXPORT_EMULATE)
    // Around the intrinsic, GCC 12 copies sums and stores some of them, again and again.
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#else
    sum = _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
  }
  static inline void widen(Sum&, Partial) {}
};

#else

// AVX2 multiplies unsigned by signed bytes and adds two products in 16 bits, with saturation. The
// operands below can never reach it.
template <Numbers kNumbers>
struct Dot;

// Weights are 0 to kMost, and kInputs of them put half as many products into each half of a lane.
template <int kMost, int kInputs>
struct NibbleDot : DotBase {
  static_assert(kInputs / 2 * kMost * 127 <= INT16_MAX, "sums of 16 bits");
  static constexpr int kBits = 4;
  static constexpr int kGroup = kInputs;
  using Partial = Vec::Ints;
  struct Weights {
    Vec::Ints first, second;
  };

  static inline void add(Partial& part, const Weights& w, const Inputs& x) {
    part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w.first, x.first));
    part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w.second, x.second));
  }
  static inline void widen(Sum& sum, Partial part) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
  }
};

// At most 16 * 15 * 127 = 30480.
template <>
struct Dot<Numbers::kInt4> : NibbleDot<15, 32> {
  static inline Weights prepare(Vec::Ints first, Vec::Ints second) { return {first, second}; }
};

// At most 8 * 24 * 127 = 24384; 32 inputs could make 48768.
template <>
struct Dot<Numbers::kFp4> : NibbleDot<24, 16> {
  static inline Weights prepare(Vec::Ints first, Vec::Ints second) {
    return {Vec::look_up(kUnsignedFp4, first), Vec::look_up(kUnsignedFp4, second)};
  }
};

// The unsigned factor is a weight's magnitude, up to 128; its sign goes to the input, which is
// never -128 and so has a negative. Two products are at most 2 * 128 * 127 = 32512.
template <>
struct Dot<Numbers::kInt8> : DotBase {
  static constexpr int kBits = 8;
  static constexpr int kGroup = 0;
  using Partial = Sum;
  struct Weights {
    Vec::Ints first, second, first_magnitude, second_magnitude;
  };

  static inline Weights prepare(Vec::Ints first, Vec::Ints second) {
    return {first, second, _mm256_abs_epi8(first), _mm256_abs_epi8(second)};
  }
  static inline Vec::Ints product(Vec::Ints w, Vec::Ints magnitude, Vec::Ints x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w)),
                             _mm256_set1_epi16(1));
  }
  static inline void add(Sum& sum, const Weights& w, const Inputs& x) {
    sum = _mm256_add_epi32(sum, product(w.first, w.first_magnitude, x.first));
    sum = _mm256_add_epi32(sum, product(w.second, w.second_magnitude, x.second));
  }
  static inline void widen(Sum&, Partial) {}
};

#endif

}  // namespace
}  // namespace onnxport
