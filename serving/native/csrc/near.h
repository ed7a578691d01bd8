// Drawing near a probability: llama.cpp's sampler adaptive_p.
#pragma once

#include "adapting.h"

namespace onnxport {

// Draws from what all else leaves of a row, the nearer to the target the likelier; see
// serving/adapting.py. Takes a request that is not greedy.
Surprising draw_near(const Kernels& kernels, const Row& row, const Request& request,
                     Scratch& scratch);

}  // namespace onnxport
