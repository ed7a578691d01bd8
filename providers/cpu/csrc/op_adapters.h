// LoRA adapters among an operator's inputs.
#pragma once

#include <initializer_list>

#include "add_lora.h"
#include "op.h"

namespace onnxport::op {

// How adapters come, from the input `first` on.
AdapterInputs read_adapters(const Api& api, const ort::KernelContext* context, size_t first);

// The adapters of a call's rows, in integers, where a node may have none, whose largest rank is 0 then:
// false. `slots` has the type, and the largest rank, and gets the rest. Throws a Failure unless it has all that they need, or none, and an InvalidInput as
// check_adapters does.
bool read_optional_adapters(const Api& api, const ort::KernelContext* context, const char* op,
                            size_t first, int64_t rows, std::initializer_list<LoraPlace> places,
                            LoraSlots* slots);

// A place's columns and their number, from the attributes columns0 and so on, and its offset and
// ranks; the depth is left to the caller.
LoraPlace read_place(const Api& api, const ort::KernelInfo* info);

// Reads the attribute max_rank, if there is one: a node without it has no adapters.
bool read_max_rank(const Api& api, const ort::KernelInfo* info, int64_t* max_rank);

// The type of adapters in integers, from the attribute adapter_bits, 8 where there is none.
LoraType read_integer_type(const Api& api, const ort::KernelInfo* info, const char* op);

}  // namespace onnxport::op
