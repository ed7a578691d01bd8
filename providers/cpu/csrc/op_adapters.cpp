// Reads the inputs that adapters come in.
#include "op_adapters.h"

namespace onnxport::op {
namespace {

// Whether there is such an attribute, whose value is read then.
bool read_optional(const Api& api, const ort::KernelInfo* info, const char* name, int64_t* value) {
  Status* status = api.attribute(info, name, value);
  if (status) api.release(status);
  return !status;
}

}  // namespace

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
                            size_t first, int64_t rows, std::initializer_list<LoraPlace> places,
                            LoraSlots* slots) {
  const bool has_rank = slots->max_rank > 0;
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
  *slots = check_adapters(op, read_adapters(api, context, first), slots->type, slots->max_rank, rows,
                          places);
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
  return read_optional(api, info, "max_rank", max_rank);
}

LoraType read_integer_type(const Api& api, const ort::KernelInfo* info, const char* op) {
  int64_t bits = 8;
  read_optional(api, info, "adapter_bits", &bits);
  if (bits != 4 && bits != 8)
    fail(api, ort::kInvalidArgument, "%s: adapter_bits must be 4 or 8, found %lld", op,
         static_cast<long long>(bits));
  return bits == 4 ? kLoraInt4 : kLoraInt8;
}

}  // namespace onnxport::op
