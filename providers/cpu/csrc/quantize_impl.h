// Activations to int8, over an instruction set's vectors: see matmul_impl.h, which includes this.
#pragma once

#include <float.h>
#include <math.h>
#include <string.h>

#include "matmul.h"

// Sums only stay in registers if every loop over them is gone.
#if defined(__clang__)
#define ONNXPORT_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define ONNXPORT_UNROLL _Pragma("GCC unroll 16")
#else
#define ONNXPORT_UNROLL
#endif

namespace onnxport {
namespace {

// Below it a block counts as zero: 127 over the largest magnitude must not overflow.
constexpr float kSmallest = 1e-36f;

// What weights have too much when they are multiplied.
ONNXPORT_INLINE int32_t zero_point(const MatMul& m) {
  if (m.bits == 8) return static_cast<int32_t>(Vec::kZeroPoint8);
  return m.is_fp4 ? Vec::kZeroPointFp4 : 8;
}

// One block of one row.
ONNXPORT_INLINE void quantize_block(const MatMul& m, const float* x, int64_t at) {
  // Magnitudes compare like integers, and a NaN is then the largest of all.
  const float maximum = Vec::largest_magnitude(x, m.block_size);
  const bool usable = maximum >= kSmallest && maximum <= FLT_MAX;
  int8_t* quants = m.quants + at * m.block_size;
  int32_t sum = 0;
  if (usable)
    sum = Vec::round(x, m.block_size, 127.f / maximum, m.bits == 4 ? kEvenFirst : kInOrder, quants);
  else
    for (int64_t i = 0; i < m.block_size; i += 16) memset(quants + i, 0, 16);
  m.scales[at] = usable ? maximum / 127.f : maximum < kSmallest ? 0.f : NAN;
  m.corrections[at] = -sum * zero_point(m);
  if (m.sums) m.sums[at] = static_cast<float>(sum) * m.scales[at];
}

// residual = x + skip; returns its mean of squares, of sixteen sums however wide vectors are. A
// product with one is exact, so fma() is a sum here.
float add_residual(const float* x, const float* skip, int64_t count, float* residual) {
  constexpr int kSums = 16 / Vec::kLanes;
  const Vec::Floats one = Vec::set1(1.f);
  Vec::Floats parts[kSums];
  for (int v = 0; v < kSums; v++) parts[v] = Vec::set1(0.f);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    ONNXPORT_UNROLL
    for (int v = 0; v < kSums; v++) {
      const int64_t at = i + v * Vec::kLanes;
      const Vec::Floats sum = Vec::fma(Vec::load(x + at), one, Vec::load(skip + at));
      Vec::store(residual + at, sum);
      parts[v] = Vec::fma(sum, sum, parts[v]);
    }
  }
  float sums[16];
  for (int v = 0; v < kSums; v++) Vec::store(sums + v * Vec::kLanes, parts[v]);
  for (int lane = 0; i < count; i++, lane++) {
    residual[i] = x[i] + skip[i];
    sums[lane] = fmaf(residual[i], residual[i], sums[lane]);
  }
  for (int width = 8; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
  return sums[0] / static_cast<float>(count);
}

void quantize_normalized(const MatMul& m, const float* x, int64_t row) {
  float* residual = m.norm.residual + row * m.k;
  const float mean = add_residual(x, m.norm.skip + row * m.k, m.k, residual);
  const float factor = 1.f / sqrtf(mean + m.norm.epsilon);
  for (int64_t block = 0; block < num_blocks(m); block++) {
    const int64_t first = block * m.block_size, left = m.k - first;
    const int64_t count = left < m.block_size ? left : m.block_size;
    float values[kLargestBlock];
    for (int64_t i = 0; i < count; i++)
      values[i] = residual[first + i] * factor * m.norm.gamma[first + i];
    for (int64_t i = count; i < m.block_size; i++) values[i] = 0.f;
    if (m.norm.normalized)
      memcpy(m.norm.normalized + row * m.k + first, values,
             static_cast<size_t>(count) * sizeof(float));
    quantize_block(m, values, row_block(m, row, block));
  }
}

void quantize(const MatMul& m, const float* x, int64_t row, int64_t begin, int64_t end) {
  if (x && m.norm.gamma) return quantize_normalized(m, x, row);
  for (int64_t block = begin; block < end; block++) {
    const int64_t left = x ? m.k - block * m.block_size : 0;
    const int64_t at = row_block(m, row, block);
    if (left >= m.block_size) {
      quantize_block(m, x, at);
      x += m.block_size;
    } else {
      float filled[kLargestBlock] = {};
      if (left > 0) memcpy(filled, x, static_cast<size_t>(left) * sizeof(float));
      quantize_block(m, filled, at);
    }
  }
}

}  // namespace
}  // namespace onnxport
