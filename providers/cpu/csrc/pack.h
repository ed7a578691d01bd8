// Packing on several threads, while a session is made and the runtime's own have nothing to do.
#pragma once

#include <cstdint>
#include <functional>

#include "matmul.h"

namespace onnxport {

using Range = std::function<void(int64_t begin, int64_t end)>;

// Calls pack for ranges of count things, each of which has so many packed bytes, on a few threads
// at once; returns when all are done. pack must not throw.
void in_parts(int64_t count, int64_t bytes, const Range& pack);

// The scales from a place on.
inline Scales scales_from(const Scales& scales, int64_t place) {
  const int64_t bytes = place * scale_bytes(scales.type);
  return {static_cast<const uint8_t*>(scales.data) + bytes, scales.type};
}

// As pack_weights, of every step-th row of those that are stored, from the first one on.
void pack_rows(const MatMul& call, const uint8_t* quants, const Scales& scales, int64_t step,
               uint8_t* packed);

// As pack_weights, to the byte. What is packed of a file leaves the process's memory.
void pack_weights_in_parts(const MatMul& call, const uint8_t* quants, const Scales& scales,
                           uint8_t* packed);

}  // namespace onnxport
