// A causal convolution of some channels of a sequence. Compiled once per instruction set.
#pragma once

#include <string.h>

#include "gate_impl.h"
#include "kernels.h"

namespace {

using onnxport::ConvPart;
using onnxport::kConvChannels;
using onnxport::kMostTaps;

// One vector of channels; `rows` are what the taps read.
static inline Vec::T convolved(const float* const* rows, const float* weights, int64_t stride,
                               int64_t taps, Vec::T sum) {
  for (int64_t tap = 0; tap < taps; tap++)
    sum = Vec::fma(Vec::load(weights + tap * stride), Vec::load(rows[tap]), sum);
  return sum;
}

static inline Vec::T activated(Vec::T x, bool has_silu) {
  return has_silu ? gated<Curve::kSilu>(x, Vec::set1(1.f), Swiglu{}) : x;
}

static void convolve(const ConvPart& p) {
  const int64_t past = p.taps - 1, whole = p.channels / Vec::kWidth * Vec::kWidth;
  const int64_t rest = p.channels - whole;
  const size_t rest_bytes = static_cast<size_t>(rest) * sizeof(float);
  // What the state has, token by token; and all that the last channels read, for whole vectors.
  float before[kMostTaps - 1][kConvChannels];
  float last_weights[kMostTaps][Vec::kWidth] = {}, last_rows[kMostTaps][Vec::kWidth] = {};
  float last_bias[Vec::kWidth] = {}, last_output[Vec::kWidth];
  for (int64_t c = 0; c < p.channels; c++)
    for (int64_t i = 0; i < past; i++) before[i][c] = p.from[c * past + i];
  for (int64_t tap = 0; tap < p.taps; tap++)
    memcpy(last_weights[tap], p.weights + tap * p.stride + whole, rest_bytes);
  if (p.bias) memcpy(last_bias, p.bias + whole, rest_bytes);
  const auto row = [&](int64_t token) {
    return token < 0 ? before[past + token] : p.input + token * p.stride;
  };
  for (int64_t token = 0; token < p.tokens; token++) {
    const float* rows[kMostTaps];
    float* output = p.output + token * p.stride;
    for (int64_t tap = 0; tap < p.taps; tap++) rows[tap] = row(token - past + tap);
    for (int64_t c = 0; c < whole; c += Vec::kWidth) {
      const Vec::T bias = p.bias ? Vec::load(p.bias + c) : Vec::set1(0.f);
      Vec::store(output + c,
                 activated(convolved(rows, p.weights + c, p.stride, p.taps, bias), p.has_silu));
      for (int64_t tap = 0; tap < p.taps; tap++) rows[tap] += Vec::kWidth;
    }
    if (!rest) continue;
    for (int64_t tap = 0; tap < p.taps; tap++) {
      memcpy(last_rows[tap], rows[tap], rest_bytes);
      rows[tap] = last_rows[tap];
    }
    const Vec::T bias = Vec::load(last_bias);
    Vec::store(last_output,
               activated(convolved(rows, last_weights[0], Vec::kWidth, p.taps, bias), p.has_silu));
    memcpy(output + whole, last_output, rest_bytes);
  }
  for (int64_t i = 0; i < past; i++) {
    const float* kept = row(p.tokens - past + i);
    for (int64_t c = 0; c < p.channels; c++) p.to[c * past + i] = kept[c];
  }
}

}  // namespace
