// Products with weights in floats as they are stored. Compiled once per instruction set.
//
// A number is one sum for each lane, over the inputs in order, and then the sum of the lanes.
// However many rows and outputs are held in registers at once, and however inputs are cut into
// blocks, that is the same.
#pragma once

#include <string.h>

#include "cache_impl.h"
#include "micro_impl.h"

namespace {

using onnxport::RowProduct;

constexpr int kProductOutputs = 4;                                        // in registers, and so
constexpr int kProductRows = Vec::kMaxRows >= 8 ? 6 : Vec::kMaxRows / 2;  // many rows beside them
constexpr int kAloneOutputs = 8;  // of a row alone: what hides the time that an addition takes

// Of many rows, so many share the weights of so many outputs and inputs as the first cache holds
// with what they read of their own.
constexpr int64_t kBlockRows = 18, kBlockOutputs = 64, kBlockInputs = 256;

// How many rows go together where there are not so many left.
constexpr int fewer_rows(int rows) { return rows > 3 ? rows / 2 : rows - 1; }

// The first `count` of a vector, and zeros.
template <class Type>
static inline Vec::T load_first(const typename Type::Element* from, int64_t count) {
  typename Type::Element values[16] = {};
  memcpy(values, from, static_cast<size_t>(count) * sizeof(values[0]));
  return Type::load(values);
}

template <class Type>
static inline const typename Type::Element* product_weights(const RowProduct& p, int64_t output) {
  return static_cast<const typename Type::Element*>(p.weights) + output * p.depth;
}

static inline int64_t whole_depth(const RowProduct& p) {
  return p.depth / Vec::kWidth * Vec::kWidth;
}

// What is behind the whole vectors, and the sum of the lanes.
template <class Type>
static inline float finish_sum(const RowProduct& p, int64_t row, int64_t output, Vec::T sum) {
  const int64_t whole = whole_depth(p), rest = p.depth - whole;
  if (rest)
    sum = Vec::fma(load_first<Float32>(p.inputs[row] + whole, rest),
                   load_first<Type>(product_weights<Type>(p, output) + whole, rest), sum);
  return Vec::reduce_add(sum);
}

// Rows and outputs from one on.
template <class Type, int kRows, int kOutputs>
static inline void product_tile(const RowProduct& p, int64_t row, int64_t output) {
  const float* inputs[kRows];
  Vec::T sum[kRows][kOutputs];
  ONNXPORT_UNROLL
  for (int r = 0; r < kRows; r++) {
    inputs[r] = p.inputs[row + r];
    ONNXPORT_UNROLL
    for (int o = 0; o < kOutputs; o++) sum[r][o] = Vec::set1(0.f);
  }
  const auto* weights = product_weights<Type>(p, output);
  for (int64_t i = 0; i < whole_depth(p); i += Vec::kWidth) {
    Vec::T x[kRows];
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) x[r] = Vec::load(inputs[r] + i);
    ONNXPORT_UNROLL
    for (int o = 0; o < kOutputs; o++) {
      const Vec::T w = Type::load(weights + o * p.depth + i);
      ONNXPORT_UNROLL
      for (int r = 0; r < kRows; r++) sum[r][o] = Vec::fma(x[r], w, sum[r][o]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int o = 0; o < kOutputs; o++)
      p.output[(row + r) * p.stride + output + o] =
          finish_sum<Type>(p, row + r, output + o, sum[r][o]);
}

// All rows from one on, the most at once first.
template <class Type, int kRows, int kOutputs>
static inline void product_rows(const RowProduct& p, int64_t row, int64_t output) {
  for (; row + kRows <= p.rows; row += kRows) product_tile<Type, kRows, kOutputs>(p, row, output);
  if constexpr (kRows > 1) {
    if (row < p.rows) product_rows<Type, fewer_rows(kRows), kOutputs>(p, row, output);
  }
}

// What is at work on kBlockRows rows and kBlockOutputs outputs, vectors of different rows or
// outputs side by side: rows that lie a power of two apart would drive each other out of the cache.
struct ProductBlock {
  alignas(64) float inputs[kBlockInputs / Vec::kWidth][kBlockRows][Vec::kWidth];
  alignas(64) float weights[kBlockInputs / Vec::kWidth][kProductOutputs][Vec::kWidth];
  float sums[kBlockRows][kBlockOutputs][Vec::kWidth];  // whose lanes are not added up yet
};

// Adds the products of `count` inputs to the sums of kProductOutputs outputs from one on, and of
// all rows from one on.
template <int kRows>
static inline void add_block(ProductBlock& block, int64_t row, int64_t rows, int64_t output,
                             int64_t count) {
  for (; row + kRows <= rows; row += kRows) {
    Vec::T sum[kRows][kProductOutputs];
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      ONNXPORT_UNROLL
      for (int o = 0; o < kProductOutputs; o++)
        sum[r][o] = Vec::load(block.sums[row + r][output + o]);
    }
    for (int64_t i = 0; i < count / Vec::kWidth; i++) {
      Vec::T x[kRows];
      ONNXPORT_UNROLL
      for (int r = 0; r < kRows; r++) x[r] = Vec::load(block.inputs[i][row + r]);
      ONNXPORT_UNROLL
      for (int o = 0; o < kProductOutputs; o++) {
        const Vec::T w = Vec::load(block.weights[i][o]);
        ONNXPORT_UNROLL
        for (int r = 0; r < kRows; r++) sum[r][o] = Vec::fma(x[r], w, sum[r][o]);
      }
    }
    ONNXPORT_UNROLL
    for (int r = 0; r < kRows; r++) {
      ONNXPORT_UNROLL
      for (int o = 0; o < kProductOutputs; o++)
        Vec::store(block.sums[row + r][output + o], sum[r][o]);
    }
  }
  if constexpr (kRows > 1) {
    if (row < rows) add_block<fewer_rows(kRows)>(block, row, rows, output, count);
  }
}

// Copies kProductOutputs outputs' weights of `count` inputs, and asks for those `ahead` numbers
// behind: each output's are a stretch of their own.
template <class Type>
static inline void copy_weights(const typename Type::Element* weights, int64_t depth, int64_t count,
                                int64_t ahead, ProductBlock& block) {
  constexpr int64_t kLine = kLineBytes / sizeof(typename Type::Element);
  for (int64_t i = 0; i < count; i += Vec::kWidth) {
    ONNXPORT_UNROLL
    for (int o = 0; o < kProductOutputs; o++) {
      const auto* from = weights + o * depth + i;
      if (i % kLine == 0) prefetch(reinterpret_cast<const char*>(from + ahead));
      Vec::store(block.weights[i / Vec::kWidth][o], Type::load(from));
    }
  }
}

// kBlockOutputs outputs of `rows` rows, at most kBlockRows, from one on.
template <class Type>
static void product_block(const RowProduct& p, int64_t row, int64_t rows, int64_t output) {
  ProductBlock block;
  memset(block.sums, 0, static_cast<size_t>(rows) * sizeof block.sums[0]);
  const int64_t whole = whole_depth(p);
  for (int64_t begin = 0; begin < whole; begin += kBlockInputs) {
    const int64_t count = whole - begin < kBlockInputs ? whole - begin : kBlockInputs;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < count; i += Vec::kWidth)
        Vec::store(block.inputs[i / Vec::kWidth][r], Vec::load(p.inputs[row + r] + begin + i));
    for (int64_t o = 0; o < kBlockOutputs; o += kProductOutputs) {
      const bool is_last = o + kProductOutputs == kBlockOutputs;
      const int64_t ahead = is_last ? kBlockInputs - o * p.depth : kProductOutputs * p.depth;
      copy_weights<Type>(product_weights<Type>(p, output + o) + begin, p.depth, count, ahead,
                         block);
      add_block<kProductRows>(block, 0, rows, o, count);
    }
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < kBlockOutputs; o++)
      p.output[(row + r) * p.stride + output + o] =
          finish_sum<Type>(p, row + r, output + o, Vec::load(block.sums[r][o]));
}

template <class Type>
static void product_of(const RowProduct& p) {
  int64_t output = 0;
  if (p.rows == 1)
    for (; output + kAloneOutputs <= p.outputs; output += kAloneOutputs)
      product_tile<Type, 1, kAloneOutputs>(p, 0, output);
  if (p.rows > kProductRows)
    for (; output + kBlockOutputs <= p.outputs; output += kBlockOutputs)
      for (int64_t row = 0; row < p.rows; row += kBlockRows)
        product_block<Type>(p, row, p.rows - row < kBlockRows ? p.rows - row : kBlockRows, output);
  for (; output + kProductOutputs <= p.outputs; output += kProductOutputs)
    product_rows<Type, kProductRows, kProductOutputs>(p, 0, output);
  for (; output < p.outputs; output++) product_rows<Type, kProductRows, 1>(p, 0, output);
}

static void multiply_rows(const RowProduct& p) {
  switch (p.type) {
    case kFloat32: return product_of<Float32>(p);
    case kFloat16: return product_of<Float16>(p);
    case kBFloat16: return product_of<BFloat16>(p);
    case kInt8:
    case kInt4: return;  // nobody asks
  }
}

}  // namespace
