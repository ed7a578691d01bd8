// The gate of a gated feed-forward layer. Compiled once per instruction set.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"

namespace {

using onnxport::Gate;

// log2 of exp(-x), or of exp(-2 z) with the z of GELU's tanh (arXiv:1606.08415): both activations
// are x / (1 + 2^power), for (1 + tanh(z)) / 2 is the sigmoid of 2 z.
template <bool kIsGelu>
static inline Vec::T gate_power(Vec::T x) {
  const Vec::T linear = Vec::set1(kIsGelu ? -2.30220819f : -1.44269504f);
  if (!kIsGelu) return Vec::mul(x, linear);
  return Vec::mul(x, Vec::fma(Vec::mul(x, x), Vec::set1(-0.10294324f), linear));
}

template <bool kIsGelu>
static inline Vec::T gated(Vec::T gate, Vec::T up) {
  const Vec::T one = Vec::set1(1.f);
  const Vec::T power = gate_power<kIsGelu>(gate);
  // Beyond 2^126 the quotient is zero to every digit that is left, and exp2 ends at 2^127.
  const Vec::T bound = Vec::set1(126.f);
  const Vec::T e = Vec::exp2(Vec::less(power, bound, power, bound));
  return Vec::mul(Vec::div(gate, Vec::add(one, e)), up);
}

template <bool kIsAdded, bool kIsGelu>
static void gate_row(const Gate& g) {
  const auto load = [](const float* x, const float* added, int64_t at) {
    return kIsAdded ? Vec::add(Vec::load(x + at), Vec::load(added + at)) : Vec::load(x + at);
  };
  int64_t i = 0;
  for (; i + Vec::kWidth <= g.count; i += Vec::kWidth) {
    const Vec::T gate = load(g.gate, g.gate_added, i), up = load(g.up, g.up_added, i);
    Vec::store(g.output + i, gated<kIsGelu>(gate, up));
  }
  if (i == g.count) return;
  float values[4][16] = {}, results[16];
  const size_t rest = static_cast<size_t>(g.count - i) * sizeof(float);
  memcpy(values[0], g.gate + i, rest);
  memcpy(values[1], g.up + i, rest);
  if (kIsAdded) {
    memcpy(values[2], g.gate_added + i, rest);
    memcpy(values[3], g.up_added + i, rest);
  }
  const Vec::T gate = load(values[0], values[2], 0), up = load(values[1], values[3], 0);
  Vec::store(results, gated<kIsGelu>(gate, up));
  memcpy(g.output + i, results, rest);
}

static void gate(const Gate& g) {
  if (g.gate_added)
    g.is_gelu ? gate_row<true, true>(g) : gate_row<true, false>(g);
  else
    g.is_gelu ? gate_row<false, true>(g) : gate_row<false, false>(g);
}

}  // namespace
