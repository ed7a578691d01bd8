// Sixteen lanes of 32 bits of AVX-512 VNNI. The contract is in matmul_impl.h.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "matmul_vec.h"

namespace onnxport {
namespace {

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr int64_t kZeroPoint8 = 128;  // one factor must be unsigned
  static constexpr int32_t kZeroPointFp4 = kFp4ZeroPoint;
  static constexpr int64_t kStreams = 4;
#if defined(__AMX_INT8__)
  static constexpr int64_t kStreamAhead = 3072;  // the best on a Xeon with AMX
#else
  static constexpr int64_t kStreamAhead = 1024;  // of 512 to 3072 the best on a Zen 4
#endif
  // Of 2 to 16 KiB the best on that Xeon for two to eight rows, by some per cent.
  static constexpr int64_t kAhead = 6144;
  using Floats = __m512;
  using Ints = __m512i;

  static inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static inline Floats load_half(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
  static inline Floats set1(float x) { return _mm512_set1_ps(x); }
  static inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static inline Floats keep(Floats a, uint32_t lanes, Floats others) {
    return _mm512_mask_mov_ps(others, static_cast<__mmask16>(lanes), a);
  }
  static inline float largest_lane(Floats a) { return _mm512_reduce_max_ps(a); }
  static inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }

  static inline Ints load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
  static inline Ints low_nibbles(Ints a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  static inline Ints high_nibbles(Ints a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
  static inline Ints look_up(const int8_t* table, Ints nibbles) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), nibbles);
  }
  // Into the second cache, which waits for more lines at once than the first.
  ONNXPORT_INLINE void prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }

  static inline float largest_magnitude(const float* x, int64_t count) {
    const Ints no_sign = _mm512_set1_epi32(0x7fffffff);
    Ints largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16)
      largest = _mm512_max_epi32(largest,
                                 _mm512_and_si512(_mm512_castps_si512(load(x + i)), no_sign));
    const int bits = _mm512_reduce_max_epi32(largest);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
  }
  static inline int32_t round(const float* x, int64_t count, float factor, const int8_t* order,
                              int8_t* out) {
    const __m128i shuffle = _mm_load_si128(reinterpret_cast<const __m128i*>(order));
    Ints sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16) {
      const Ints quants = _mm512_cvtps_epi32(mul(load(x + i), set1(factor)));
      sum = _mm512_add_epi32(sum, quants);
      _mm_store_si128(reinterpret_cast<__m128i*>(out + i),
                      _mm_shuffle_epi8(_mm512_cvtepi32_epi8(quants), shuffle));
    }
    return _mm512_reduce_add_epi32(sum);
  }
};

template <Numbers kNumbers>
struct Dot {
  static constexpr int kBits = kNumbers == Numbers::kInt8 ? 8 : 4;
  static constexpr int64_t kOutputs = kPanel;
  static constexpr int kRows = 1;
  static constexpr int kMostUnits = 8;
  static constexpr bool kWholeBlocks = false;
  static constexpr int kGroup = 0;
  static constexpr int columns(int) { return 2; }
  using Sum = Vec::Ints;
  using Partial = Sum;
  struct Weights {
    Vec::Ints first, second;
  };
  struct Inputs {
    Vec::Ints first, second;
  };

  static inline Weights prepare(Vec::Ints first, Vec::Ints second) {
    if constexpr (kNumbers == Numbers::kFp4)
      return {Vec::look_up(kUnsignedFp4, first), Vec::look_up(kUnsignedFp4, second)};
    const Vec::Ints flip = _mm512_set1_epi8(kBits == 8 ? -128 : 0);
    return {_mm512_xor_si512(first, flip), _mm512_xor_si512(second, flip)};
  }
  static inline Inputs inputs(const int8_t* quants, int64_t) {
    int32_t first, second;
    memcpy(&first, quants, 4);
    memcpy(&second, quants + 4, 4);
    return {_mm512_set1_epi32(first), _mm512_set1_epi32(second)};
  }
  static inline Sum start(const int32_t* corrections) { return _mm512_set1_epi32(*corrections); }
  static inline void add(Sum& sum, const Weights& w, const Inputs& x) {
    add_four(sum, w.first, x.first);
    add_four(sum, w.second, x.second);
  }
  static inline void add_four(Sum& sum, Vec::Ints w, Vec::Ints x) {
#if defined(__GNUC__) && !defined(__clang__)
    // Around the intrinsic, GCC 12 copies each sum and stores a third of them, again and again.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#else
    sum = _mm512_dpbusd_epi32(sum, w, x);
#endif
  }
  static inline void widen(Sum&, Partial) {}
  static inline void rows(Sum sum, Vec::Ints* out) { out[0] = sum; }
};

}  // namespace
}  // namespace onnxport
