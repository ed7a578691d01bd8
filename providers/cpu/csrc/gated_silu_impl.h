// The gate of a gated feed-forward layer. Compiled once per instruction set.
#pragma once

#include <string.h>

#include <stdint.h>

namespace {

static inline Vec::T gated_silu_of(Vec::T gate, Vec::T up) {
  const Vec::T one = Vec::set1(1.f);
  const Vec::T power = Vec::mul(gate, Vec::set1(-1.44269504f));
  // Beyond 2^126 the quotient is zero to every digit that is left, and exp2 ends at 2^127.
  const Vec::T bound = Vec::set1(126.f);
  const Vec::T e = Vec::exp2(Vec::less(power, bound, power, bound));
  return Vec::mul(Vec::div(gate, Vec::add(one, e)), up);
}

// output[i] = gate[i] / (1 + exp(-gate[i])) * up[i]
static void gated_silu(const float* gate, const float* up, float* output, int64_t count) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth)
    Vec::store(output + i, gated_silu_of(Vec::load(gate + i), Vec::load(up + i)));
  if (i == count) return;
  float gates[16] = {}, ups[16] = {}, results[16];
  const size_t rest = static_cast<size_t>(count - i) * sizeof(float);
  memcpy(gates, gate + i, rest);
  memcpy(ups, up + i, rest);
  Vec::store(results, gated_silu_of(Vec::load(gates), Vec::load(ups)));
  memcpy(output + i, results, rest);
}

}  // namespace
