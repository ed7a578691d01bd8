// The gate of a gated feed-forward layer. Compiled once per instruction set.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"

namespace {

using onnxport::GatedSilu;

static inline Vec::T gated_silu_of(Vec::T gate, Vec::T up) {
  const Vec::T one = Vec::set1(1.f);
  const Vec::T power = Vec::mul(gate, Vec::set1(-1.44269504f));
  // Beyond 2^126 the quotient is zero to every digit that is left, and exp2 ends at 2^127.
  const Vec::T bound = Vec::set1(126.f);
  const Vec::T e = Vec::exp2(Vec::less(power, bound, power, bound));
  return Vec::mul(Vec::div(gate, Vec::add(one, e)), up);
}

static void gated_silu(const GatedSilu& g) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= g.count; i += Vec::kWidth)
    Vec::store(g.output + i, gated_silu_of(Vec::load(g.gate + i), Vec::load(g.up + i)));
  if (i == g.count) return;
  float gate[16] = {}, up[16] = {}, results[16];
  const size_t rest = static_cast<size_t>(g.count - i) * sizeof(float);
  memcpy(gate, g.gate + i, rest);
  memcpy(up, g.up + i, rest);
  Vec::store(results, gated_silu_of(Vec::load(gate), Vec::load(up)));
  memcpy(g.output + i, results, rest);
}

}  // namespace
