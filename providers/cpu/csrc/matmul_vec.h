// What the vectors of all instruction sets need.
#pragma once

#include <stdint.h>

// Not plain inline: GCC takes a function that only prefetches for one without effect, and drops it.
#if defined(_MSC_VER)
#define ONNXPORT_INLINE static __forceinline
#define ONNXPORT_ALONE static __declspec(noinline)
#else
#define ONNXPORT_INLINE static inline __attribute__((always_inline))
#define ONNXPORT_ALONE static __attribute__((noinline))
#endif

namespace onnxport {
namespace {

// The order of a row's quants.
//
// A byte of MatMulNBits' four-bit weights holds an even input in its low half and the odd one after
// it in its high half. So of each eight inputs the even ones come first.
alignas(16) constexpr int8_t kEvenFirst[16] = {0, 2,  4,  6,  1, 3,  5,  7,
                                               8, 10, 12, 14, 9, 11, 13, 15};
alignas(16) constexpr int8_t kInOrder[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                             8, 9, 10, 11, 12, 13, 14, 15};

// Twice what nibbles of E2M1 are, and the same without signs: plus kFp4ZeroPoint.
constexpr int8_t kFp4ZeroPoint = 12;
alignas(16) constexpr int8_t kFp4[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                         0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t kUnsignedFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                 12, 11, 10, 9,  8,  6,  4,  0};

}  // namespace
}  // namespace onnxport
