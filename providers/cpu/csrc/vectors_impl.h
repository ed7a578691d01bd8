// What the micro-kernels share. Compiled once per instruction set.
#pragma once

#include "tiles_impl.h"

namespace {

// The accumulators only stay in registers if every loop over them is gone.
#if defined(__clang__)
#define ONNXPORT_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define ONNXPORT_UNROLL _Pragma("GCC unroll 16")
#else
#define ONNXPORT_UNROLL
#endif

// Two rounds of a loop in one, where its own instructions count.
#if defined(__clang__)
#define ONNXPORT_TWICE _Pragma("clang loop unroll_count(2)")
#elif defined(__GNUC__)
#define ONNXPORT_TWICE _Pragma("GCC unroll 2")
#else
#define ONNXPORT_TWICE
#endif

constexpr int kVecsPerTile = kTile / Vec::kWidth;

// Vectors of sixteen-token tiles: where their channels begin, and where their scales lie.
template <class Type>
struct KeyVectors {
  const typename Type::Element* key[kTilesPerChunk * kVecsPerTile];
  const float* scale[kTilesPerChunk * kVecsPerTile];
  int64_t ahead[kTilesPerChunk * kVecsPerTile];  // see Tiles
};

template <class Element>
static inline void prefetch_ahead(const Element* here, int64_t ahead) {
  prefetch(reinterpret_cast<const char*>(here) + ahead);
}

}  // namespace
