// Four floats in plain C++, and the contract of the vector types:
//   kWidth    lanes; a divisor of 16
//   kMaxRows  query rows held in registers at once, kColumns vectors each
//   exp2      relative error 2e-7; 0 from -127 down, or from -126; arguments above 127 are not expected
//   keep      lane i keeps its value where first <= i < last, else takes `other`
//   transpose dst[16 * i + j] = src[j][i] for i, j below kWidth
//   Pairs     kWidth pairs of bfloat16, the first in the low half of 32 bits
//   set1_pair the pair that lies in a float's place
//   add_pairs c and both products of each pair, added in float
//   one_of_pairs  makes the other one zero
//   round_to_bfloat16  n numbers, a multiple of 8; out may be where they are, or ahead of it
//   store_bfloat16  rounds a vector to where kWidth / 2 floats have room
//   kPrefersPairs  whether add_pairs is faster than two times fma
//   Quads     kWidth quads of bytes; Ints as many sums, of 32 bits
//   set1_quad, set1_int  the quad, or the integer, that lies in a float's place
//   add_128   makes uint8 of int8
//   add_quads c and the four products of each quad, a's bytes unsigned and b's signed; the first two
//             together, and the last two, are no more than 16 bits hold
//   low_halves, high_halves  four bits of each byte, as a byte
//   even_bytes, odd_bytes  the others become zero; high_bytes  the odd ones as words
//   mul_words  the low halves of products of 16 bits; add_bytes  sums of bytes, which may wrap
//   words_of, quads_of  kWidth bytes from memory, each as two words or as four bytes of its quad
//   kQuadRows query rows whose sums of quads are held in registers at once; kQuadSums vectors of them
//   store_bytes  rounds numbers from 0 to 255 to the nearest, ties to even; anything for a NaN
//   swap_neighbours  lanes 0 and 1, 2 and 3, and so on
//   max_bits, reduce_max_bits  the larger bits as signed integers: of what is not negative the larger
//             number, and a NaN if there is one
//   kConvertsHalf  whether load_half is an instruction, so that reading half the bytes pays
//   kAsksFar       whether the second cache is asked for lines, which waits for more of them at once
//   kMostTurns     see Kernels::most_turns
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

namespace {

struct Vec {
  static constexpr int kWidth = 4;
  static constexpr int kMaxRows = 4;
  static constexpr int kColumns = 2;
  struct T {
    float v[4];
  };

  template <class F>
  static inline T each(F f) {
    T r;
    for (int i = 0; i < 4; i++) r.v[i] = f(i);
    return r;
  }
  static inline T load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  static inline void store(float* p, T a) {
    for (int i = 0; i < 4; i++) p[i] = a.v[i];
  }
  static inline T set1(float x) { return {{x, x, x, x}}; }
  static inline T add(T a, T b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static inline T sub(T a, T b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static inline T mul(T a, T b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static inline T div(T a, T b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static inline T fma(T a, T b, T c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static inline T max(T a, T b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static inline T less(T a, T b, T yes, T no) {
    return each([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
  }
  static inline float reduce_max(T a) {
    const float x = a.v[0] > a.v[1] ? a.v[0] : a.v[1];
    const float y = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
    return x > y ? x : y;
  }
  static inline float reduce_add(T a) { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }
  static inline T exp2(T x) {
    return each([&](int i) { return x.v[i] <= -127.f ? 0.f : exp2f(x.v[i]); });
  }
  static inline T keep(T x, int64_t first, int64_t last, float other) {
    return each([&](int i) { return i >= first && i < last ? x.v[i] : other; });
  }
  static inline T load_half(const uint16_t* p) {
    return each([&](int i) { return onnxport::float_from_half(p[i]); });
  }
  static inline T load_bfloat16(const uint16_t* p) {
    return each([&](int i) { return onnxport::float_from_bfloat16(p[i]); });
  }
  static inline T load_int8(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  static inline void store_half8(uint16_t* p, const float* x) {
    for (int i = 0; i < 8; i++) p[i] = onnxport::half_from_float(x[i]);
  }
  static constexpr bool kConvertsHalf = false;
  static constexpr bool kAsksFar = false;
  static constexpr int kMostTurns = 8;
  static constexpr bool kPrefersPairs = false;
  struct Pairs {
    uint32_t v[4];
  };
  static inline Pairs load_pairs(const uint16_t* p) {
    Pairs r;
    memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static inline Pairs set1_pair(const float* p) {
    const uint32_t pair = onnxport::float_bits(*p);
    return {{pair, pair, pair, pair}};
  }
  static inline T add_pairs(Pairs a, Pairs b, T c) {
    c = fma(second(a), second(b), c);
    return fma(first(a), first(b), c);
  }
  static inline Pairs one_of_pairs(Pairs a, bool is_second) {
    for (uint32_t& pair : a.v) pair &= is_second ? 0xffff0000u : 0xffffu;
    return a;
  }
  static inline void round_to_bfloat16(const float* x, int64_t n, float* out) {
    onnxport::pack_bfloat16(x, n, out);
  }
  static inline void store_bfloat16(float* p, T a) {
    float lanes[kWidth];
    store(lanes, a);
    onnxport::pack_bfloat16(lanes, kWidth, p);
  }
  static inline T first(Pairs a) {
    return each([&](int i) { return onnxport::bits_float(a.v[i] << 16); });
  }
  static inline T second(Pairs a) {
    return each([&](int i) { return onnxport::bits_float(a.v[i] & 0xffff0000u); });
  }

  static constexpr int kQuadRows = 4;
  static constexpr int kQuadSums = 8;
  struct Ints {
    int32_t v[4];
  };
  struct Quads {
    uint8_t v[16];
  };
  static inline Quads load_quads(const int8_t* p) {
    Quads r;
    memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static inline Quads set1_quad(const float* p) {
    Quads r;
    for (int i = 0; i < 4; i++) memcpy(r.v + 4 * i, p, 4);
    return r;
  }
  static inline Ints set1_int(const float* p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return {{x, x, x, x}};
  }
  static inline Quads add_128(Quads a) {
    for (uint8_t& byte : a.v) byte ^= 0x80u;
    return a;
  }
  static inline Ints add_quads(Quads a, Quads b, Ints c) {
    for (int i = 0; i < 16; i++) c.v[i / 4] += a.v[i] * static_cast<int8_t>(b.v[i]);
    return c;
  }
  static inline Quads low_halves(Quads a) {
    for (uint8_t& byte : a.v) byte &= 15u;
    return a;
  }
  static inline Quads high_halves(Quads a) {
    for (uint8_t& byte : a.v) byte = static_cast<uint8_t>(byte >> 4);
    return a;
  }
  static inline Quads even_bytes(Quads a) {
    for (int i = 1; i < 16; i += 2) a.v[i] = 0;
    return a;
  }
  static inline Quads odd_bytes(Quads a) {
    for (int i = 0; i < 16; i += 2) a.v[i] = 0;
    return a;
  }
  static inline Quads high_bytes(Quads a) {
    for (int i = 0; i < 16; i += 2) {
      const uint16_t word = a.v[i + 1];
      memcpy(a.v + i, &word, sizeof word);
    }
    return a;
  }
  static inline Quads mul_words(Quads a, Quads b) {
    uint16_t x[8], y[8];
    memcpy(x, a.v, sizeof x);
    memcpy(y, b.v, sizeof y);
    for (int i = 0; i < 8; i++) x[i] = static_cast<uint16_t>(uint32_t{x[i]} * y[i]);
    memcpy(a.v, x, sizeof x);
    return a;
  }
  static inline Quads add_bytes(Quads a, Quads b) {
    for (int i = 0; i < 16; i++) a.v[i] = static_cast<uint8_t>(a.v[i] + b.v[i]);
    return a;
  }
  static inline void store_quads(int8_t* p, Quads a) { memcpy(p, a.v, sizeof a.v); }
  static inline Quads words_of(const uint8_t* p) {
    Quads r;
    for (int i = 0; i < 16; i++) {
      const uint16_t word = p[i / 4];  // as this machine has it in memory
      memcpy(r.v + i / 2 * 2, &word, sizeof word);
    }
    return r;
  }
  static inline Quads quads_of(const uint8_t* p) {
    Quads r;
    for (int i = 0; i < 16; i++) r.v[i] = p[i / 4];
    return r;
  }
  static inline T to_floats(Ints a) {
    return each([&](int i) { return static_cast<float>(a.v[i]); });
  }
  static inline void store_bytes(uint8_t* p, T a) {
    for (int i = 0; i < 4; i++)
      p[i] = a.v[i] >= 0.f ? static_cast<uint8_t>(nearbyintf(a.v[i])) : uint8_t{0};
  }
  static inline T swap_neighbours(T a) { return {{a.v[1], a.v[0], a.v[3], a.v[2]}}; }
  static inline int32_t bits(float x) { return static_cast<int32_t>(onnxport::float_bits(x)); }
  static inline T max_bits(T a, T b) {
    return each([&](int i) { return bits(a.v[i]) > bits(b.v[i]) ? a.v[i] : b.v[i]; });
  }
  static inline uint32_t reduce_max_bits(T a) {
    int32_t largest = bits(a.v[0]);
    for (float x : a.v) largest = bits(x) > largest ? bits(x) : largest;
    return static_cast<uint32_t>(largest);
  }

  static inline void transpose(const float* const* src, int64_t offset, float* dst) {
    for (int i = 0; i < 4; i++)  // by memcpy: they may be bits of something else
      for (int j = 0; j < 4; j++) memcpy(dst + 16 * i + j, src[j] + offset + i, sizeof(float));
  }
};

}  // namespace
