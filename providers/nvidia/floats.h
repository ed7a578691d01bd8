// 16-bit floats by the instructions that convert them: NVIDIA's own headers are in another package than
// its compiler.
#pragma once

namespace onnxport_cuda {

inline float float_of_half(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

inline unsigned short half_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

inline float float_of_bfloat16(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned int>(bits) << 16);
}

#if NUMBER_TYPE == 16
inline unsigned short bfloat16_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

}  // namespace onnxport_cuda
