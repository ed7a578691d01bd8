// The tokens whose surprise is nearest to what it is on average (Meister et al., Locally Typical
// Sampling, 2022).
#pragma once

#include "request.h"
#include "sample.h"

namespace onnxport {

// Those of some candidates, as many as have at least the share `wanted` of all weights, in their
// order. They are counted out into buckets by their distance, and sorted where the last one is.
Candidates typical(const Kernels& kernels, const Candidates& all, Weighing weighing, double wanted,
                   Scratch& scratch);

// As typical, of many candidates of a row: what is left of them; or, if nothing else leaves any
// out, the place of the one that is drawn, if that is found without the others. True: it was drawn.
bool thin_or_draw(const Kernels& kernels, const Row& row, const Candidates& all, Weighing weighing,
                  const Request& request, Scratch& scratch, Candidates& left, int32_t& place);

}  // namespace onnxport
