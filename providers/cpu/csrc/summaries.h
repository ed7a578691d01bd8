// Summaries of rows of outputs, made while these are in a near cache; serving/native/csrc/rows says
// what they are. Every instruction set makes the same bits. Null where the compiler lacks the vector
// types of GCC and Clang.
#pragma once

#include "rows/summary.h"

namespace onnxport {

// Summarizes outputs [begin, end) of a row: whole chunks, and the end of the row. Without sums unless
// the scale is above 0; does not set the summary's own. Meanwhile asks for what is as far from `ahead`
// as the outputs are from `row`; null: for nothing.
using Summarize = void (*)(const float* row, int64_t begin, int64_t end, float scale,
                           const float* ahead, const rows::Summary& to);

#if defined(__GNUC__)
void summarize_portable(const float* row, int64_t begin, int64_t end, float scale,
                        const float* ahead, const rows::Summary& to);
void summarize_avx2(const float* row, int64_t begin, int64_t end, float scale,
                    const float* ahead, const rows::Summary& to);
void summarize_avx512(const float* row, int64_t begin, int64_t end, float scale,
                      const float* ahead, const rows::Summary& to);
#else
constexpr Summarize summarize_portable = nullptr;
constexpr Summarize summarize_avx2 = nullptr;
constexpr Summarize summarize_avx512 = nullptr;
#endif

}  // namespace onnxport
