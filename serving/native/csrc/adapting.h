// What of drawing is known when a row's logits are: the temperature by how unsure the model is, and
// what Mirostat leaves.
#pragma once

#include "likeliest.h"
#include "request.h"

namespace onnxport {

// How a row is drawn from, with the temperature that its entropy gives it, if that is asked for:
// see serving/adapting.py.
Request adapted(const Kernels& kernels, const Row& row, const Request& request);

inline bool is_dynamic(const Request& request) {
  return request.adapting == kDynamic || request.adapting == kDynamicNear;
}

inline bool is_near(const Request& request) {
  return request.adapting == kNear || request.adapting == kDynamicNear;
}

inline bool has_mu(const Request& request) {
  return request.adapting == kMirostat1 || request.adapting == kMirostat2;
}

// The place of the token that is drawn, and how much it surprises among those that were left to
// draw from, in bits.
struct Surprising {
  int32_t place;
  double surprise;
};

// Draws from what Mirostat leaves (Basu et al., Mirostat, 2021, and llama.cpp's two samplers of that
// name). `vocab`: tokens of the model, however few of them the row has.
Surprising draw_mirostat(const Kernels& kernels, const Row& row, const Request& request,
                         int64_t vocab, Scratch& scratch);

}  // namespace onnxport
