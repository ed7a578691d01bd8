// The gate of a gated feed-forward layer, or the activation of one without. Compiled once per
// instruction set.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"

namespace {

using onnxport::Gate;
using onnxport::Swiglu;

enum class Curve { kSilu, kGelu, kSwiglu };

// log2 of exp(-x), or of exp(-2 z) with the z of GELU's tanh (arXiv:1606.08415): both activations
// are x / (1 + 2^power), for (1 + tanh(z)) / 2 is the sigmoid of 2 z.
template <Curve kCurve>
static inline Vec::T gate_power(Vec::T x, const Swiglu& of) {
  if (kCurve == Curve::kSwiglu) return Vec::mul(x, Vec::set1(-1.44269504f * of.alpha));
  const Vec::T linear = Vec::set1(kCurve == Curve::kGelu ? -2.30220819f : -1.44269504f);
  if (kCurve == Curve::kSilu) return Vec::mul(x, linear);
  return Vec::mul(x, Vec::fma(Vec::mul(x, x), Vec::set1(-0.10294324f), linear));
}

// NaN stays what it is.
static inline Vec::T at_most(Vec::T x, Vec::T limit) { return Vec::less(limit, x, limit, x); }
static inline Vec::T at_least(Vec::T x, Vec::T limit) { return Vec::less(x, limit, limit, x); }

template <Curve kCurve>
static inline Vec::T gated(Vec::T gate, Vec::T up, const Swiglu& of) {
  const Vec::T one = Vec::set1(1.f);
  if (kCurve == Curve::kSwiglu) {
    gate = at_most(gate, Vec::set1(of.limit));
    up = at_least(at_most(up, Vec::set1(of.limit)), Vec::set1(-of.limit));
    up = Vec::add(up, Vec::set1(of.up_offset));
  }
  const Vec::T power = gate_power<kCurve>(gate, of);
  // Beyond 2^126 the quotient is zero to every digit that is left, and exp2 ends at 2^127.
  const Vec::T bound = Vec::set1(126.f);
  const Vec::T e = Vec::exp2(Vec::less(power, bound, power, bound));
  return Vec::mul(Vec::div(gate, Vec::add(one, e)), up);
}

template <bool kIsAdded, Curve kCurve>
static void gate_row(const Gate& g) {
  const Swiglu of = kCurve == Curve::kSwiglu ? *g.swiglu : Swiglu{};
  const auto load = [](const float* x, const float* added, int64_t at) {
    return kIsAdded ? Vec::add(Vec::load(x + at), Vec::load(added + at)) : Vec::load(x + at);
  };
  int64_t i = 0;
  for (; i + Vec::kWidth <= g.count; i += Vec::kWidth) {
    const Vec::T gate = load(g.gate, g.gate_added, i), up = load(g.up, g.up_added, i);
    Vec::store(g.output + i, gated<kCurve>(gate, up, of));
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
  Vec::store(results, gated<kCurve>(gate, up, of));
  memcpy(g.output + i, results, rest);
}

static inline Vec::T relu2(Vec::T x) {
  x = at_least(x, Vec::set1(0.f));
  return Vec::mul(x, x);
}

template <bool kIsAdded>
static void relu2_row(const Gate& g) {
  const auto load = [](const float* x, const float* added, int64_t at) {
    return kIsAdded ? Vec::add(Vec::load(x + at), Vec::load(added + at)) : Vec::load(x + at);
  };
  int64_t i = 0;
  for (; i + Vec::kWidth <= g.count; i += Vec::kWidth)
    Vec::store(g.output + i, relu2(load(g.gate, g.gate_added, i)));
  if (i == g.count) return;
  float values[2][16] = {}, results[16];
  const size_t rest = static_cast<size_t>(g.count - i) * sizeof(float);
  memcpy(values[0], g.gate + i, rest);
  if (kIsAdded) memcpy(values[1], g.gate_added + i, rest);
  Vec::store(results, relu2(load(values[0], values[1], 0)));
  memcpy(g.output + i, results, rest);
}

template <Curve kCurve>
static void gate_curve(const Gate& g) {
  g.gate_added ? gate_row<true, kCurve>(g) : gate_row<false, kCurve>(g);
}

static void gate(const Gate& g) {
  if (g.is_relu2)
    g.gate_added ? relu2_row<true>(g) : relu2_row<false>(g);
  else if (g.is_gelu)
    gate_curve<Curve::kGelu>(g);
  else
    g.swiglu ? gate_curve<Curve::kSwiglu>(g) : gate_curve<Curve::kSilu>(g);
}

}  // namespace
