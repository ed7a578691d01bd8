// Four of the eight bits of weights, dithered: see coarse.h for what they mean.
#pragma once

#include <cstdint>
#include <vector>

#include "matmul.h"

namespace onnxport {

constexpr int kCoarseStep = 17;  // between two values of u

// [k, up to whole blocks], 0 to 16 each.
std::vector<uint8_t> make_dither(const MatMul& product);

// The product with four bits of each weight, which are still to be made.
MatMul plane_of(MatMul product);

// Magnitude of an output's scale among a block's packed ones.
float scale_of(const MatMul& product, const uint8_t* scales, int64_t output);

// What became of a panel: its plane was made; it has a weight of -128, for which four bits cannot
// stand; or a scale that is no number.
enum class Conversion { kMade, kTooLarge, kNoNumber };

// Makes a panel's plane, and the largest magnitude of each block's scales.
Conversion convert_panel(const MatMul& product, const MatMul& plane, const uint8_t* dither,
                         const uint8_t* from, uint8_t* to, float* largest);

}  // namespace onnxport
