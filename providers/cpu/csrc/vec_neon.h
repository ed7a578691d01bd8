// Four floats of AArch64 NEON. The contract is in vec_portable.h.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "half.h"

namespace {

struct Vec {
  static constexpr int kWidth = 4;
  static constexpr int kMaxRows = 8;  // 8 x 2 accumulators, 2 operands, 1 broadcast of 32
  static constexpr int kColumns = 2;
  using T = float32x4_t;

  static inline T load(const float* p) { return vld1q_f32(p); }
  static inline void store(float* p, T a) { vst1q_f32(p, a); }
  static inline T set1(float x) { return vdupq_n_f32(x); }
  static inline T add(T a, T b) { return vaddq_f32(a, b); }
  static inline T sub(T a, T b) { return vsubq_f32(a, b); }
  static inline T mul(T a, T b) { return vmulq_f32(a, b); }
  static inline T div(T a, T b) { return vdivq_f32(a, b); }
  static inline T fma(T a, T b, T c) { return vfmaq_f32(c, a, b); }
  static inline T max(T a, T b) { return vmaxq_f32(a, b); }
  static inline T less(T a, T b, T yes, T no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
  static inline float reduce_max(T a) { return vmaxvq_f32(a); }
  static inline float reduce_add(T a) { return vaddvq_f32(a); }

  static inline T exp2(T x) {
    x = vmaxq_f32(set1(-127.f), x);  // at -127 the exponent field is 0, which makes the result 0
    const T n = vrndnq_f32(x);
    const T f = sub(x, n);
    T p = set1(1.326472707e-3f);  // minimax of degree 5 on [-0.5, 0.5], exact at 0
    p = fma(p, f, set1(9.671512649e-3f));
    p = fma(p, f, set1(5.550733744e-2f));
    p = fma(p, f, set1(2.402224209e-1f));
    p = fma(p, f, set1(6.931469776e-1f));
    p = fma(p, f, set1(1.f));
    const int32x4_t e = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return mul(p, vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
  }
  static inline T keep(T x, int64_t first, int64_t last, float other) {
    const int32_t from = static_cast<int32_t>(first < 0 ? 0 : first > 4 ? 4 : first);
    const int32_t to = static_cast<int32_t>(last < 0 ? 0 : last > 4 ? 4 : last);
    const int32_t lanes[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(lanes);
    const uint32x4_t mask =
        vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)), vcltq_s32(lane, vdupq_n_s32(to)));
    return vbslq_f32(mask, x, set1(other));
  }

  static inline T load_half(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  static inline T load_bfloat16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
  }
  static inline T load_int8(const int8_t* p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    const int16x8_t wide = vmovl_s8(vcreate_s8(four));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  }
  static inline void store_half8(uint16_t* p, const float* x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x))));
    vst1_u16(p + 4, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + 4))));
  }

  static constexpr bool kConvertsHalf = true;
  static constexpr bool kAsksFar = false;
  static constexpr int kMostTurns = 1;  // not measured
  static constexpr bool kPrefersPairs = false;
  using Pairs = uint32x4_t;
  static inline Pairs load_pairs(const uint16_t* p) { return vreinterpretq_u32_u16(vld1q_u16(p)); }
  static inline Pairs set1_pair(const float* p) { return vreinterpretq_u32_f32(set1(*p)); }
  static inline T add_pairs(Pairs a, Pairs b, T c) {
    c = fma(second(a), second(b), c);
    return fma(first(a), first(b), c);
  }
  static inline Pairs one_of_pairs(Pairs a, bool is_second) {
    return vandq_u32(a, vdupq_n_u32(is_second ? 0xffff0000u : 0xffffu));
  }
  static inline void round_to_bfloat16(const float* x, int64_t n, float* out) {
    onnxport::pack_bfloat16(x, n, out);
  }
  static inline void store_bfloat16(float* p, T a) {
    float lanes[kWidth];
    store(lanes, a);
    onnxport::pack_bfloat16(lanes, kWidth, p);
  }
  static inline T first(Pairs a) { return vreinterpretq_f32_u32(vshlq_n_u32(a, 16)); }
  static inline T second(Pairs a) {
    return vreinterpretq_f32_u32(vandq_u32(a, vdupq_n_u32(0xffff0000u)));
  }

  static constexpr int kQuadRows = 4;
  static constexpr int kQuadSums = 8;
  using Ints = int32x4_t;
  using Quads = int8x16_t;
  static inline Quads load_quads(const int8_t* p) { return vld1q_s8(p); }
  static inline Quads set1_quad(const float* p) { return vreinterpretq_s8_f32(set1(*p)); }
  static inline Ints set1_int(const float* p) { return vreinterpretq_s32_f32(set1(*p)); }
  static inline Quads add_128(Quads a) { return veorq_s8(a, vdupq_n_s8(-128)); }
  static inline Ints add_quads(Quads a, Quads b, Ints c) {
    const uint8x16_t bytes = vreinterpretq_u8_s8(a);
    const int16x8_t a0 = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
    const int16x8_t a1 = vreinterpretq_s16_u16(vmovl_high_u8(bytes));
    // products of 16 bits fit: no byte of either is larger than its pairs' sum allows
    const int16x8_t low = vmulq_s16(a0, vmovl_s8(vget_low_s8(b)));
    const int16x8_t high = vmulq_s16(a1, vmovl_high_s8(b));
    return vpadalq_s16(c, vpaddq_s16(low, high));
  }
  static inline Quads low_halves(Quads a) { return vandq_s8(a, vdupq_n_s8(0x0f)); }
  static inline Quads high_halves(Quads a) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(a), 4));
  }
  static inline Quads even_bytes(Quads a) {
    return vandq_s8(a, vreinterpretq_s8_u16(vdupq_n_u16(0x00ff)));
  }
  static inline Quads odd_bytes(Quads a) {
    return vandq_s8(a, vreinterpretq_s8_u16(vdupq_n_u16(0xff00)));
  }
  static inline Quads high_bytes(Quads a) {
    return vreinterpretq_s8_u16(vshrq_n_u16(vreinterpretq_u16_s8(a), 8));
  }
  static inline Quads mul_words(Quads a, Quads b) {
    return vreinterpretq_s8_u16(vmulq_u16(vreinterpretq_u16_s8(a), vreinterpretq_u16_s8(b)));
  }
  static inline Quads add_bytes(Quads a, Quads b) { return vaddq_s8(a, b); }
  static inline void store_quads(int8_t* p, Quads a) { vst1q_s8(p, a); }
  static inline Quads quads_of(const uint8_t* p) {
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    const uint8x8_t four = vcreate_u8(bytes);
    const uint8x8_t pairs = vzip1_u8(four, four);
    const uint16x8_t quads = vmovl_u8(pairs);  // each byte as two words
    return vreinterpretq_s8_u16(vmulq_n_u16(quads, 0x0101));
  }
  static inline Quads words_of(const uint8_t* p) { return even_bytes(quads_of(p)); }
  static inline T to_floats(Ints a) { return vcvtq_f32_s32(a); }
  static inline void store_bytes(uint8_t* p, T a) {
    const uint16x4_t words = vmovn_u32(vcvtnq_u32_f32(a));
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
    vst1_lane_u32(reinterpret_cast<uint32_t*>(p), vreinterpret_u32_u8(bytes), 0);
  }
  static inline T swap_neighbours(T a) { return vrev64q_f32(a); }
  static inline T max_bits(T a, T b) {
    return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b)));
  }
  static inline uint32_t reduce_max_bits(T a) {
    return static_cast<uint32_t>(vmaxvq_s32(vreinterpretq_s32_f32(a)));
  }

  static inline void transpose(const float* const* src, int64_t offset, float* dst) {
    const T a = load(src[0] + offset), b = load(src[1] + offset);
    const T c = load(src[2] + offset), d = load(src[3] + offset);
    const float64x2_t ab0 = vreinterpretq_f64_f32(vtrn1q_f32(a, b));
    const float64x2_t ab1 = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    const float64x2_t cd0 = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
    const float64x2_t cd1 = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    store(dst, vreinterpretq_f32_f64(vtrn1q_f64(ab0, cd0)));
    store(dst + 16, vreinterpretq_f32_f64(vtrn1q_f64(ab1, cd1)));
    store(dst + 32, vreinterpretq_f32_f64(vtrn2q_f64(ab0, cd0)));
    store(dst + 48, vreinterpretq_f32_f64(vtrn2q_f64(ab1, cd1)));
  }
};

}  // namespace
