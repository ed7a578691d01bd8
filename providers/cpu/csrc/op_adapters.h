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

// Throws a Failure unless a place and the largest rank can be those of a slot.
void check_place(const Api& api, const char* op, const LoraPlace& place, int64_t max_rank);

}  // namespace onnxport::op
