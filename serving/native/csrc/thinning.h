// What is left of a row's tokens by how spread its logits are, how typical a token is, and whether
// the likeliest choices are left out.
#pragma once

#include "likeliest.h"
#include "request.h"

namespace onnxport {

// The least value that top_n_sigma keeps: so many standard deviations of the finite ones below the
// largest (Tang et al., Top-n-sigma, 2024).
float sigma_floor(const Kernels& kernels, const Row& row, double deviations);

// The place of the token that is drawn from `kept`, candidates of a row, all of weight: typical_p,
// top_p and XTC each choose among what the one before left.
int32_t draw_thinned(const Kernels& kernels, const Row& row, const Candidates& kept,
                     Weighing weighing, const Request& request, Scratch& scratch);

// What XTC leaves of some candidates, whose likely choices are those of a weight of at least
// `bound`: all but these, and the least likely one of them; in scratch.others.
Candidates without_choices(const Kernels& kernels, const Candidates& all, Weighing weighing,
                           double bound, Scratch& scratch);

}  // namespace onnxport
