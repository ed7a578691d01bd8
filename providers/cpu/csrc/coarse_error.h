// What outputs by four bits of the weights may be wrong by: coarse.h has the theory. Not for the
// objects of an instruction set: the members here are code.
#pragma once

#include <cfloat>
#include <cmath>

#include "coarse_plane.h"

namespace onnxport {

constexpr double kVariance = 24;  // of e: (17 * 17 - 1) / 12
constexpr double kDeviations = 7;
// What else an output may be wrong by, for one block and scales of one: half a step where the sum
// of the dither is rounded to whole steps; and what rounding of floats makes in both products, at
// most 6e-8 * 2 * (blocks + 3) of each block's share, which is not above |w| * |x| with |w| below
// (127 + 8) * sqrt(256).
constexpr double kRoundedDither = 0.51 * kCoarseStep;
constexpr double kRoundedFloats = 0.08;
constexpr int64_t kMostBlocks = 300;
// Where outputs are so small that floats lose bits, each rounding may make 1.4e-45 more, and there
// are up to 18 times kMostBlocks.
constexpr double kLeastError = FLT_MIN;
// With less than this, no block's share or sum of some exceeds a float, as these are not above
// 2160 / kRoundedFloats times the error.
constexpr double kMostError = 1e33;

struct CoarseErrors {
  int64_t blocks;
  // [rows][blocks]: squared deviations and rounding errors of an output, for a scale of one.
  // Squares of floats need a double's range.
  double *deviations, *rounded;

  // Returns what the dither adds to a block's sums, in steps, and notes what an output may be wrong
  // by. The dither is the block's own.
  int32_t note(const MatMul& call, int64_t row, int64_t block, const uint8_t* dither) {
    const int64_t at = row_block(call, row, block);
    const int8_t* quants = call.quants + at * call.block_size;
    int32_t squares = 0, sum = 0;
    for (int64_t i = 0; i < call.block_size; i++) {
      squares += quants[i] * quants[i];
      sum += (kCoarseStep - dither[i]) * quants[i];
    }
    const double scale = call.scales[at], square = squares;
    deviations[row * blocks + block] =
        scale * scale * square * (kVariance * kDeviations * kDeviations);
    rounded[row * blocks + block] = scale * (kRoundedDither + kRoundedFloats * std::sqrt(square));
    return static_cast<int32_t>(std::nearbyint(static_cast<double>(sum) / kCoarseStep));
  }

  // What an output may be wrong by at most, by its scale of each block.
  template <class ScaleOf>
  double of(int64_t row, ScaleOf scale_of_block) const {
    double square = 0, error = kLeastError;
    for (int64_t block = 0; block < blocks; block++) {
      const double scale = scale_of_block(block);
      square += scale * scale * deviations[row * blocks + block];
      error += scale * rounded[row * blocks + block];
    }
    return std::sqrt(square) + error;
  }
};

}  // namespace onnxport
