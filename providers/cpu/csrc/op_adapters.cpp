// Reads the inputs that adapters come in.
#include "op_adapters.h"

namespace onnxport::op {

AdapterInputs read_adapters(const Api& api, const ort::KernelContext* context, size_t first) {
  AdapterInputs in;
  Tensor* tensors[kAdapterInputs] = {&in.slots, &in.ranks, &in.weights, &in.scales};
  constexpr const char* kNames[kAdapterInputs] = {"slots", "ranks", "weights", "scales"};
  for (size_t i = 0; i < kAdapterInputs; i++) {
    const ort::Value* value = optional_input(api, context, first + i);
    if (value) *tensors[i] = describe(api, kNames[i], value);
  }
  return in;
}

bool read_optional_adapters(const Api& api, const ort::KernelContext* context, const char* op,
                            size_t first, int64_t max_rank, int64_t rows,
                            std::initializer_list<LoraPlace> places, LoraSlots* slots) {
  const bool has_rank = max_rank > 0;
  size_t count = 0;
  check(api.input_count(context, &count));
  if (count <= first && !has_rank) return false;
  const char* missing = has_rank ? nullptr : "max_rank";
  bool any = has_rank;
  constexpr const char* kNames[kAdapterInputs] = {"slots", "ranks", "weights", "scales"};
  for (size_t i = 0; i < kAdapterInputs; i++) {
    const bool given = optional_input(api, context, first + i) != nullptr;
    any |= given;
    if (!given && !missing) missing = kNames[i];
  }
  if (!any) return false;
  if (missing)
    fail(api, ort::kInvalidArgument,
         "%s: adapters need slots, ranks, weights, scales and max_rank; there is no %s", op,
         missing);
  *slots = check_adapters(op, read_adapters(api, context, first), kLoraInt8, max_rank, rows, places);
  return true;
}

LoraPlace read_place(const Api& api, const ort::KernelInfo* info) {
  LoraPlace place{};
  check(api.attribute(info, "offset", &place.offset));
  check(api.attribute(info, "ranks", &place.ranks));
  constexpr const char* kNames[kLoraParts] = {"columns0", "columns1", "columns2"};
  for (size_t part = 0; part < kLoraParts; part++)
    check(api.attribute(info, kNames[part], &place.columns[part]));
  count_parts(place);
  return place;
}

bool read_max_rank(const Api& api, const ort::KernelInfo* info, int64_t* max_rank) {
  Status* status = api.attribute(info, "max_rank", max_rank);
  if (status) api.release(status);
  return !status;
}

}  // namespace onnxport::op
