// Which slots of a pool the states of a step's sequences are in, free of ONNX Runtime. A pool has
// [num_slots] states of one layer, of which slot 0 is all zeros: what a sequence begins with. A
// state is read in one slot and written to another, so that what was there can be gone on from
// again, or written where it was read.
#pragma once

#include <cstdint>

namespace onnxport {

struct StateSlots {
  int64_t batch, num_tokens, num_slots;
  const int32_t* cumulative_lengths;  // [batch + 1], new tokens
  const int32_t* reads;               // [batch]
  const int32_t* writes;              // [batch]
};

// Throws an InvalidInput unless lengths add up to the tokens, slots are there, and each that is
// written is not 0, is written once, and read by no other sequence.
void check_slots(const StateSlots& slots);

}  // namespace onnxport
