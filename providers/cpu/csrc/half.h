// Scalar conversions between float and the 16-bit types, rounding to nearest even. Static, so that
// every instruction set's object has its own.
#pragma once

#include <stdint.h>
#include <string.h>

namespace onnxport {

static inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float float_from_bfloat16(uint16_t x) {
  return bits_float(static_cast<uint32_t>(x) << 16);
}

static inline uint16_t bfloat16_from_float(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Writes n bfloat16 to where n / 2 floats have room. Out may be x, or lie ahead of it.
static inline void pack_bfloat16(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 2) {
    const uint16_t pair[2] = {bfloat16_from_float(x[i]), bfloat16_from_float(x[i + 1])};
    memcpy(out + i / 2, pair, sizeof pair);
  }
}

static inline float float_from_half(uint16_t x) {
  const uint32_t sign = (x & 0x8000u) << 16;
  const uint32_t exponent = (x >> 10) & 0x1fu;
  const uint32_t mantissa = x & 0x3ffu;
  if (exponent == 0x1f) return bits_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

static inline uint16_t half_from_float(float x) {
  const uint32_t bits = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // from 65520 on
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, in units of 2^-24
    // Adding 0.5 puts the unit of 2^-24 at the last mantissa bit, so the addition rounds.
    const uint32_t sum = float_bits(bits_float(magnitude) + 0.5f);
    return static_cast<uint16_t>(sign | (sum - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace onnxport
