// LoRA adapters among an operator's inputs.
#pragma once

#include <initializer_list>

#include "lora.h"
#include "op.h"

namespace onnxport::op {

constexpr size_t kAdapterInputs = 4;  // slots of tokens, ranks, weights, and scales of int8

// The adapters of a call's rows, from the input `first` on. Throws a Failure where an input does
// not fit the others or the places, or a token's slot or rank is none: a call would read elsewhere.
LoraSlots read_adapters(const Api& api, const ort::KernelContext* context, const char* op,
                        size_t first, LoraType type, int64_t max_rank, int64_t rows,
                        std::initializer_list<LoraPlace> places);

// Likewise where a node may have no adapters, whose largest rank is 0 then: false. Throws a Failure
// unless it has all that they need, or none. They are int8.
bool read_optional_adapters(const Api& api, const ort::KernelContext* context, const char* op,
                            size_t first, int64_t max_rank, int64_t rows,
                            std::initializer_list<LoraPlace> places, LoraSlots* slots);

// Throws a Failure unless a place and the largest rank can be those of a slot.
void check_place(const Api& api, const char* op, const LoraPlace& place, int64_t max_rank);

// A place's columns and their number, from the attributes columns0 and so on, and its offset and
// ranks; the depth is left to the caller.
LoraPlace read_place(const Api& api, const ort::KernelInfo* info);

// Reads the attribute max_rank, if there is one: a node without it has no adapters.
bool read_max_rank(const Api& api, const ort::KernelInfo* info, int64_t* max_rank);

}  // namespace onnxport::op
