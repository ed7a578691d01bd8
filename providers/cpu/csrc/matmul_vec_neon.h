// Four lanes of 32 bits of AArch64 NEON, with dot products and perhaps matrix products of int8. The
// contract is in matmul_impl.h.
#pragma once

#include <arm_neon.h>
#include <string.h>

#include "matmul_vec.h"

namespace onnxport {
namespace {

struct Vec {
  static constexpr int kLanes = 4;
  static constexpr int64_t kZeroPoint8 = 0;
  static constexpr int32_t kZeroPointFp4 = 0;
  static constexpr int64_t kAhead = 2048;
  using Floats = float32x4_t;
  using Ints = int32x4_t;

  static inline Floats load(const float* p) { return vld1q_f32(p); }
  static inline Floats load_half(const uint8_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
  }
  static inline void store(float* p, Floats a) { vst1q_f32(p, a); }
  static inline Floats set1(float x) { return vdupq_n_f32(x); }
  static inline Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
  static inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static inline Floats max(Floats a, Floats b) { return vmaxq_f32(a, b); }
  static inline Floats keep(Floats a, uint32_t lanes, Floats others) {
    const uint32x4_t bits = {1, 2, 4, 8};
    return vbslq_f32(vtstq_u32(vdupq_n_u32(lanes), bits), a, others);
  }
  static inline float largest_lane(Floats a) { return vmaxvq_f32(a); }
  static inline Floats to_floats(Ints a) { return vcvtq_f32_s32(a); }

  static inline Ints load_bytes(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
  static inline Ints low_nibbles(Ints a) {
    return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(15)));
  }
  static inline Ints high_nibbles(Ints a) {
    return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4));
  }
  static inline Ints look_up(const int8_t* table, Ints nibbles) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(nibbles)));
  }
  ONNXPORT_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

  static inline float largest_magnitude(const float* x, int64_t count) {
    const uint32x4_t no_sign = vdupq_n_u32(0x7fffffff);
    uint32x4_t largest = vdupq_n_u32(0);
    for (int64_t i = 0; i < count; i += 4)
      largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(load(x + i)), no_sign));
    const uint32_t bits = vmaxvq_u32(largest);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  static inline int16x8_t round8(const float* x, float factor) {
    const Ints low = vcvtnq_s32_f32(vmulq_n_f32(load(x), factor));
    const Ints high = vcvtnq_s32_f32(vmulq_n_f32(load(x + 4), factor));
    return vcombine_s16(vmovn_s32(low), vmovn_s32(high));
  }
  static inline int32_t round(const float* x, int64_t count, float factor, const int8_t* order,
                              int8_t* out) {
    const uint8x16_t shuffle = vreinterpretq_u8_s8(vld1q_s8(order));
    Ints sum = vdupq_n_s32(0);
    for (int64_t i = 0; i < count; i += 16) {
      const int16x8_t low = round8(x + i, factor), high = round8(x + i + 8, factor);
      sum = vpadalq_s16(sum, vaddq_s16(low, high));
      const int8x16_t bytes = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
      vst1q_s8(out + i, vqtbl1q_s8(bytes, shuffle));
    }
    return vaddvq_s32(sum);
  }
};

// Four inputs of a row by four outputs at once.
template <Numbers kNumbers>
struct Dot {
  static constexpr int kBits = kNumbers == Numbers::kInt8 ? 8 : 4;
  static constexpr int64_t kOutputs = kPanel;
  static constexpr int kRows = 1;
  static constexpr int kMostUnits = 4;
  static constexpr bool kWholeBlocks = false;
  static constexpr int kGroup = 0;
  static constexpr int columns(int units) { return units <= 2 ? 8 : 4; }
  using Sum = Vec::Ints;
  using Partial = Sum;
  using Inputs = int8x8_t;
  struct Weights {
    int8x16_t first, second;
  };

  static inline Weights prepare(Vec::Ints first, Vec::Ints second) {
    if constexpr (kNumbers == Numbers::kFp4) {
      first = Vec::look_up(kFp4, first);
      second = Vec::look_up(kFp4, second);
    }
    return {vreinterpretq_s8_s32(first), vreinterpretq_s8_s32(second)};
  }
  static inline Inputs inputs(const int8_t* quants, int64_t) { return vld1_s8(quants); }
  static inline Sum start(const int32_t* corrections) { return vdupq_n_s32(*corrections); }
  static inline void add(Sum& sum, const Weights& w, Inputs x) {
    sum = vdotq_lane_s32(vdotq_lane_s32(sum, w.first, x, 0), w.second, x, 1);
  }
  static inline void widen(Sum&, Partial) {}
  static inline void rows(Sum sum, Vec::Ints* out) { out[0] = sum; }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Eight inputs of two rows by two outputs at once.
template <Numbers kNumbers>
struct PairDot {
  static constexpr int kBits = kNumbers == Numbers::kInt8 ? 8 : 4;
  static constexpr int64_t kOutputs = kPanel;
  static constexpr int kRows = 2;
  static constexpr int kMostUnits = 4;
  static constexpr bool kWholeBlocks = false;
  static constexpr int kGroup = 0;
  static constexpr int columns(int units) { return units <= 2 ? 4 : 2; }
  struct Sum {
    Vec::Ints left, right;  // two outputs of the first row, then of the second
  };
  using Partial = Sum;
  using Inputs = int8x16_t;
  struct Weights {
    int8x16_t left, right;  // eight inputs of an output, then of the next one
  };

  static inline Weights prepare(Vec::Ints first, Vec::Ints second) {
    if constexpr (kNumbers == Numbers::kFp4) {
      first = Vec::look_up(kFp4, first);
      second = Vec::look_up(kFp4, second);
    }
    return {vreinterpretq_s8_s32(vzip1q_s32(first, second)),
            vreinterpretq_s8_s32(vzip2q_s32(first, second))};
  }
  static inline Inputs inputs(const int8_t* quants, int64_t block_size) {
    return vcombine_s8(vld1_s8(quants), vld1_s8(quants + block_size));
  }
  static inline Sum start(const int32_t* corrections) {
    const Vec::Ints both = vcombine_s32(vdup_n_s32(corrections[0]), vdup_n_s32(corrections[1]));
    return {both, both};
  }
  static inline void add(Sum& sum, const Weights& w, Inputs x) {
    sum.left = vmmlaq_s32(sum.left, x, w.left);
    sum.right = vmmlaq_s32(sum.right, x, w.right);
  }
  static inline void widen(Sum&, Partial) {}
  static inline void rows(const Sum& sum, Vec::Ints* out) {
    out[0] = vcombine_s32(vget_low_s32(sum.left), vget_low_s32(sum.right));
    out[1] = vcombine_s32(vget_high_s32(sum.left), vget_high_s32(sum.right));
  }
};

#endif

}  // namespace
}  // namespace onnxport
