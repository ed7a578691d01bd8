// Drawing from the largest values of a row, as far down as top_p says.
#pragma once

#include "likeliest.h"
#include "request.h"

namespace onnxport {

// The place of the token that is drawn from `descent`. The weights of all that top_p chooses from
// add up to `total`; those in `descent` are the largest of them, and enough.
int32_t draw_nucleus(const Descent& descent, const Request& request, double total);

// The same for all values of a row that are at least `least`, which weigh something. `has_floor`:
// others weigh something, too, which does not count.
int32_t draw_above(const Kernels& kernels, const Row& row, float least, bool has_floor,
                   Weighing weighing, const Request& request, Scratch& scratch);

}  // namespace onnxport
