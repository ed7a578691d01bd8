// Sixteen floats in as many registers as the instruction set needs, with GCC's and Clang's vector
// types. All sets do the same IEEE operations in the same order, and none contracts a product and
// a sum, so that they all get the same bits.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kParts = kLanes * 4 / kBytes;
constexpr int kPartLanes = kLanes / kParts;

typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef uint32_t Bits __attribute__((vector_size(kBytes)));

// Where one of two is NaN, gathered up.
#if defined(__AVX512F__)
typedef __mmask16 Found;
#else
typedef Ints Found;
#endif
static inline Found is_nan(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_UNORD_Q);
#elif defined(__AVX2__)
  const __m256 x = reinterpret_cast<__m256>(a), y = reinterpret_cast<__m256>(b);
  return reinterpret_cast<Ints>(_mm256_cmp_ps(x, y, _CMP_UNORD_Q));
#elif defined(__x86_64__)
  return reinterpret_cast<Ints>(
      _mm_cmpunord_ps(reinterpret_cast<__m128>(a), reinterpret_cast<__m128>(b)));
#else
  return (a != a) | (b != b);
#endif
}
static inline bool any(Found found) {
#if defined(__AVX512F__)
  return found != 0;
#else
  int32_t some = 0;
  for (int i = 0; i < kPartLanes; i++) some |= found[i];
  return some != 0;
#endif
}

// Where lane i of `a` is at least that of `b`, as a mask that stays among the vectors: to make bits
// of each costs more.
static inline Found reaches(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GE_OQ);
#else
  return a >= b;
#endif
}

// The lanes of `yes` that are not in `no`.
static inline Found without(Found yes, Found no) { return static_cast<Found>(yes & ~no); }

// The lanes of both. AVX-512's masks stay what they are: as integers they are moved about.
static inline Found either(Found one, Found other) {
#if defined(__AVX512F__)
  return _kor_mask16(one, other);
#else
  return one | other;
#endif
}

// Adds the lanes of `w` where a mask has them.
static inline Floats add_where(Floats sum, Found mask, Floats w) {
#if defined(__AVX512F__)
  const __m512 old = reinterpret_cast<__m512>(sum);
  return reinterpret_cast<Floats>(_mm512_mask_add_ps(old, mask, old, reinterpret_cast<__m512>(w)));
#else
  return sum + (mask ? w : Floats{});
#endif
}

// Bit i is set where lane i of a mask is.
static inline uint32_t bits_of(Found mask) {
#if defined(__AVX512F__)
  return mask;
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(mask)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kPartLanes; i++) bits |= (static_cast<uint32_t>(mask[i]) & 1u) << i;
  return bits;
#endif
}

struct Vec {
  Floats part[kParts];
};

template <class F>
static inline Vec each(F f) {
  Vec r;
  for (int i = 0; i < kParts; i++) r.part[i] = f(i);
  return r;
}

static inline Vec splat(float x) {
  return each([&](int) { return Floats{} + x; });
}
// Part by part: of the whole, GCC makes a copy through memory.
static inline Vec load(const float* p) {
  return each([&](int i) {
    Floats part;
    memcpy(&part, p + i * kPartLanes, sizeof part);
    return part;
  });
}

// The first `count` lanes, or all if there are fewer.
template <class T>
static inline void store_some(T* p, const Vec& a, int64_t count) {
  static_assert(sizeof(T) == sizeof(float), "a lane is as wide");
  if (count >= kLanes) {
    for (int i = 0; i < kParts; i++) memcpy(p + i * kPartLanes, &a.part[i], sizeof a.part[i]);
  } else {
    memcpy(p, &a, static_cast<size_t>(count) * sizeof(T));
  }
}

static inline void store(float* p, const Vec& a) { store_some(p, a, kLanes); }

// The first `count` floats, and `other` behind them; none beyond them is read.
static inline Vec load_some(const float* p, int64_t count, float other) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = i < count ? p[i] : other;
  return load(lanes);
}

static inline Vec add(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.part[i] + b.part[i]; });
}

// A NaN of `b` leaves `a`.
static inline Vec larger(const Vec& a, const Vec& b) {
  return each([&](int i) { return b.part[i] > a.part[i] ? b.part[i] : a.part[i]; });
}

// The same for the smaller.
static inline Vec smaller(const Vec& a, const Vec& b) {
  return each([&](int i) { return b.part[i] < a.part[i] ? b.part[i] : a.part[i]; });
}

static inline uint32_t at_least(const Vec& a, const Vec& b) {
  uint32_t bits = 0;
  for (int i = 0; i < kParts; i++) {
    bits |= bits_of(reaches(a.part[i], b.part[i])) << (i * kPartLanes);
  }
  return bits;
}

// Of the lanes of two parts, one behind the other, those with even and with odd numbers.
#if defined(__AVX512F__)
#define ONNXPORT_EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ONNXPORT_ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX2__)
#define ONNXPORT_EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ONNXPORT_ODDS 1, 3, 5, 7, 9, 11, 13, 15
#else
#define ONNXPORT_EVENS 0, 2, 4, 6
#define ONNXPORT_ODDS 1, 3, 5, 7
#endif
static inline Floats evens(Floats a, Floats b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ONNXPORT_EVENS);
#else
  return __builtin_shuffle(a, b, Ints{ONNXPORT_EVENS});
#endif
}
static inline Floats odds(Floats a, Floats b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ONNXPORT_ODDS);
#else
  return __builtin_shuffle(a, b, Ints{ONNXPORT_ODDS});
#endif
}

// Lane i is the largest lane of the i-th of kLanes, none of which has a NaN.
static inline Vec largest_lanes(const Vec* each_of) {
  Floats found[kLanes];
  for (int i = 0; i < kLanes; i++) {
    found[i] = each_of[i].part[0];
    for (int p = 1; p < kParts; p++) {
      const Floats other = each_of[i].part[p];
      found[i] = other > found[i] ? other : found[i];
    }
  }
  // Neighbours share the lanes of one, step by step, until each has a single lane.
  for (int count = kLanes / 2; count >= kParts; count /= 2) {
    for (int i = 0; i < count; i++) {
      const Floats even = evens(found[2 * i], found[2 * i + 1]);
      const Floats odd = odds(found[2 * i], found[2 * i + 1]);
      found[i] = odd > even ? odd : even;
    }
  }
  return each([&](int i) { return found[i]; });
}

// a * b + c, rounded once: in one instruction where there is one, with the same bits elsewhere.
static inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_fmadd_ps(
      reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_fmadd_ps(
      reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vfmaq_f32(reinterpret_cast<float32x4_t>(c),
                                            reinterpret_cast<float32x4_t>(a),
                                            reinterpret_cast<float32x4_t>(b)));
#else
  // In double precision the product is exact and the sum is not. Rounded to odd, it rounds to float
  // as the exact one (Boldo and Melquiond, Emulation of FMA and Correctly Rounded Sums, 2008).
  typedef float Half __attribute__((vector_size(kBytes / 2)));
  typedef double Doubles __attribute__((vector_size(kBytes)));
  typedef uint64_t Longs __attribute__((vector_size(kBytes)));
  Half x[2], y[2], z[2];  // as GCC takes vectors apart that are longer than the processor's
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  memcpy(z, &c, sizeof z);
  for (int i = 0; i < 2; i++) {
    const Doubles product =
        __builtin_convertvector(x[i], Doubles) * __builtin_convertvector(y[i], Doubles);
    const Doubles addend = __builtin_convertvector(z[i], Doubles);
    const Doubles sum = product + addend;
    const Doubles second = sum - product;  // what is lost of both parts, exactly: Knuth's TwoSum
    const Doubles lost = (product - (sum - second)) + (addend - second);
    // An even sum that lost something moves to the odd one on the side of what it lost: farther
    // from 0 if that has its sign. All processors have these operations for 64 bits.
    const Longs bits = reinterpret_cast<Longs>(sum), rest = reinterpret_cast<Longs>(lost);
    const Longs moves = reinterpret_cast<Longs>(lost != 0.0) & ~bits & 1;
    const Longs inwards = moves & ((bits ^ rest) >> 63);
    const Longs odd = bits + moves - inwards - inwards;
    z[i] = __builtin_convertvector(reinterpret_cast<Doubles>(odd), Half);
  }
  memcpy(&c, z, sizeof c);
  return c;
#endif
}

// exp2 of t from -126 to 0, relative error 2e-7; exactly 1 at 0. Below, it means nothing.
static inline Floats part_exp2_within(Floats t) {
#if defined(__AVX512DQ__)
  // What rounding to the nearest integer takes away.
  const Floats f = reinterpret_cast<Floats>(_mm512_reduce_ps(reinterpret_cast<__m512>(t), 8));
#else
  const Floats rounded = t + 12582912.f;  // 1.5 * 2^23: the low bits are now the nearest integer
  const Floats f = t - (rounded - 12582912.f);
#endif
  // Minimax of degree 5 on [-0.5, 0.5].
  Floats p = fused(f, Floats{} + 1.326472707e-3f, Floats{} + 9.671512649e-3f);
  p = fused(p, f, Floats{} + 5.550733744e-2f);
  p = fused(p, f, Floats{} + 2.402224209e-1f);
  p = fused(p, f, Floats{} + 6.931469776e-1f);
  p = fused(p, f, Floats{} + 1.f);
#if defined(__AVX512DQ__)
  const Floats whole = t - f;
  return reinterpret_cast<Floats>(
      _mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(whole)));
#else
  const Bits bits = reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(rounded) << 23);
  return reinterpret_cast<Floats>(bits);
#endif
}

// The same of any t <= 0: 0 below -126.
static inline Floats part_exp2(Floats t) {
  const Floats within = part_exp2_within(t);
  return t >= -126.f ? within : Floats{};
}

// exp2((x - maximum) * scale), for x up to the maximum.
static inline Vec weight(const Vec& x, float maximum, float scale) {
  return each([&](int i) { return part_exp2((x.part[i] - maximum) * scale); });
}

#if defined(__AVX512F__)
// Where the lanes are whose bit is set, the first ones.
static inline __m512i set_places(uint32_t bits, int64_t place) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(place)));
  return _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), at);
}
#else
// The lanes of a part whose bits are set, the first ones, and how many: for all bits that there are.
struct SetLanes {
  int32_t lanes[1 << kPartLanes][kPartLanes] = {};
  uint8_t count[1 << kPartLanes] = {};

  constexpr SetLanes() {
    for (int bits = 0; bits < 1 << kPartLanes; bits++) {
      for (int lane = 0; lane < kPartLanes; lane++) {
        if (bits >> lane & 1) lanes[bits][count[bits]++] = lane;
      }
    }
  }
};
static constexpr SetLanes kSetLanes;

// The bits of a part.
static inline uint32_t part_bits(uint32_t bits, int part) {
  return bits >> (part * kPartLanes) & ((1u << kPartLanes) - 1);
}
#endif

// Stores where the lanes are whose bit is set, at `count`; returns the new count. Up to 16 places
// behind it are overwritten. Made for few of them: the values are fetched later.
static inline int64_t append_places(uint32_t bits, int64_t place, int32_t* places, int64_t count) {
#if defined(__AVX512F__)
  const __m512i set = set_places(bits, place);
  const int more = __builtin_popcount(bits);
  // A short store seldom spans two cache lines.
  if (__builtin_expect(more > 4, 0)) {
    _mm512_storeu_si512(places + count, set);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(places + count), _mm512_castsi512_si128(set));
  }
  return count + more;
#else
  // Without a branch, which could not be predicted.
  for (int p = 0; p < kParts; p++) {
    const uint32_t set = part_bits(bits, p);
    Ints lanes;
    memcpy(&lanes, kSetLanes.lanes[set], sizeof lanes);
    lanes += static_cast<int32_t>(place) + p * kPartLanes;
    memcpy(places + count, &lanes, sizeof lanes);
    count += kSetLanes.count[set];
  }
  return count;
#endif
}

// The same with the values, for many of them.
static inline int64_t append(uint32_t bits, const Vec& x, int64_t place, float* values,
                             int32_t* places, int64_t count) {
#if defined(__AVX512F__)
  const __m512 lanes = reinterpret_cast<__m512>(x.part[0]);
  _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), lanes));
  _mm512_storeu_si512(places + count, set_places(bits, place));
  return count + __builtin_popcount(bits);
#else
  const int64_t first = count;
  for (int p = 0; p < kParts; p++) {
    const int32_t* set = kSetLanes.lanes[part_bits(bits, p)];
#if defined(__AVX2__)
    Ints order;
    memcpy(&order, set, sizeof order);
    const __m256 found = _mm256_permutevar8x32_ps(reinterpret_cast<__m256>(x.part[p]),
                                                  reinterpret_cast<__m256i>(order));
    _mm256_storeu_ps(values + count, found);
#else
    float lanes[kPartLanes];
    memcpy(lanes, &x.part[p], sizeof lanes);
    for (int i = 0; i < kPartLanes; i++) values[count + i] = lanes[set[i]];
#endif
    count += kSetLanes.count[part_bits(bits, p)];
  }
  return append_places(bits, place, places, first);
#endif
}

}  // namespace
