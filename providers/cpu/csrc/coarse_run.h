// A call of a product of which few outputs must be exact: see coarse.h.
#pragma once

#include "coarse.h"
#include "matmul.h"

namespace onnxport {

constexpr int64_t kMostCoarseRows = 16;

// What there is of a plane.
struct Plane {
  const uint8_t* weights;
  const uint8_t* dither;
  const float* largest_scales;  // [panels][blocks], magnitudes
  const float* top_scales;      // [blocks], of all panels; null until all are ready
  const uint8_t* whole;         // [panels], of which all eight bits are read all the same
  int64_t ready;  // panels
};

struct CoarseCall {
  const MatMulKernels& kernels;
  const MatMul& product;
  const Plane plane;
  const int32_t* exact;     // [rows], 1 to kMostExact each, or kAllAllowed where some are
  const uint32_t* allowed;  // [rows][num_panels], as in CoarseProduct::run; null: all
  const Race* races;        // [rows], likewise; null: none
  int64_t num_exact = 0;    // panels that had to be computed again
};

// Computes the outputs as CoarseProduct::run says, of up to kMostCoarseRows rows; all of them where
// more than a few panels need all eight bits. Returns zero or what parallel_for returned.
int run_coarse(CoarseCall& call, ParallelFor parallel_for, void* context);

}  // namespace onnxport
