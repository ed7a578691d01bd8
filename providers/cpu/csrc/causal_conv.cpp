// Divides a convolution into tasks: some channels of a sequence.
#include "causal_conv.h"

#include <algorithm>

#include "kernels.h"
#include "product.h"

namespace onnxport {
namespace {

struct Run {
  const Kernels& kernels;
  const CausalConv& conv;
  int64_t groups;  // of channels, of each sequence

  void task(int64_t index) const {
    const StateSlots& slots = conv.slots;
    const int64_t sequence = index / groups, first = index % groups * kConvChannels;
    const int64_t begin = slots.cumulative_lengths[sequence];
    const int64_t past = conv.taps - 1, at = begin * conv.channels + first;
    const auto state = [&](int32_t slot) {
      return conv.pool + (slot * conv.channels + first) * past;
    };
    kernels.convolve({conv.input + at, conv.weights + first,
                      conv.bias ? conv.bias + first : nullptr, state(slots.reads[sequence]),
                      state(slots.writes[sequence]), conv.output + at,
                      slots.cumulative_lengths[sequence + 1] - begin,
                      std::min<int64_t>(kConvChannels, conv.channels - first), conv.channels,
                      conv.taps, conv.has_silu});
  }
};

}  // namespace

int run_causal_conv(const CausalConv& conv, ParallelFor parallel_for, void* context) {
  Run run{*active_kernels(), conv, ceil_div(conv.channels, kConvChannels)};
  return run_tasks(
      conv.slots.batch * run.groups,
      [](void* argument, size_t index) {
        static_cast<const Run*>(argument)->task(static_cast<int64_t>(index));
      },
      &run, parallel_for, context);
}

}  // namespace onnxport
