// Weights of four bits as AMX's tiles read them. Compiled with the flags of matmul_amx.cpp.
#pragma once

#include "matmul_impl.h"

namespace onnxport {
namespace {

// Nibbles to signed bytes, in the order of the 8-bit format: the nibble's three low bits as they
// are, and its highest one, turned over, as all the others. That is a product of a matrix of bits
// with the packed byte, of which five bits are turned over.
ONNXPORT_INLINE void unpack(const uint8_t* weights, int64_t bytes, uint8_t* out) {
  const __m512i low = _mm512_set1_epi64(0x0102040808080808);
  const __m512i high = _mm512_set1_epi64(0x1020408080808080);
  for (int64_t i = 0; i < bytes; i += 128, out += 256) {
    ONNXPORT_UNROLL
    for (int c = 0; c < 128; c += 64) {
      const __m512i packed = Vec::load_bytes(weights + i + c);
      _mm512_store_si512(out + c, _mm512_gf2p8affine_epi64_epi8(packed, low, 0xf8));
      _mm512_store_si512(out + 128 + c, _mm512_gf2p8affine_epi64_epi8(packed, high, 0xf8));
    }
  }
}

// Likewise, where nibbles are E2M1.
ONNXPORT_ALONE void unpack_fp4(const uint8_t* weights, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; i += 128, out += 256) {
    for (int c = 0; c < 128; c += 64) {
      const __m512i packed = Vec::load_bytes(weights + i + c);
      _mm512_store_si512(out + c, Vec::look_up(kFp4, Vec::low_nibbles(packed)));
      _mm512_store_si512(out + 128 + c, Vec::look_up(kFp4, Vec::high_nibbles(packed)));
    }
  }
}

}  // namespace
}  // namespace onnxport
