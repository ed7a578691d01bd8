// Reads and checks the inputs that adapters come in.
#include "op_adapters.h"

#include <algorithm>

namespace onnxport::op {
namespace {

constexpr int64_t kLine = 64;

struct Inputs {
  const Api& api;
  const char* op;
  Tensor slots, ranks, weights, scales;

  void expect(bool fits, const char* what, int64_t found, int64_t wanted) const {
    if (!fits)
      fail(api, ort::kInvalidArgument, "%s: %s must be %lld, found %lld", op, what,
           static_cast<long long>(wanted), static_cast<long long>(found));
  }

  void expect_equal(const char* what, int64_t found, int64_t wanted) const {
    expect(found == wanted, what, found, wanted);
  }

  // Int8 means nothing without scales, and scales would be passed over without int8.
  void check_scales(LoraType type, int64_t max_rank) const {
    if (bool(scales) != (type == kLoraInt8))
      fail(api, ort::kInvalidArgument, "%s: adapters in int8 %s, found %s", op,
           scales ? "alone have scales" : "need scales", scales ? "others" : "none");
    if (!scales) return;
    if (scales.rank != 4)
      fail(api, ort::kInvalidArgument, "%s: scales have 4 dimensions, found %zu", op, scales.rank);
    for (size_t axis = 0; axis < 3; axis++)
      expect_equal("scales' dimensions, as those of ranks,", scales.dims[axis], ranks.dims[axis]);
    expect_equal("scales of a projection", scales.dims[3], max_rank);
  }

  void check_shapes(int64_t rows) const {
    if (slots.rank != 1 || ranks.rank != 3 || weights.rank != 2)
      fail(api, ort::kInvalidArgument,
           "%s: slots, ranks and weights must have 1, 3 and 2 dimensions, found %zu, %zu and %zu",
           op, slots.rank, ranks.rank, weights.rank);
    expect_equal("the number of token slots", slots.dims[0], rows);
    expect_equal("the slots with ranks", ranks.dims[0], weights.dims[0] + 1);
  }

  void check_room(LoraType type, const LoraPlace& place, int64_t max_rank) const {
    const int64_t end = place.offset + lora_numbers(type, place, max_rank);
    const int64_t numbers = weights.dims[1], in_slot = ranks.dims[1] * ranks.dims[2];
    expect(end <= numbers, "the numbers of a slot, at least,", numbers, end);
    expect(place.ranks + place.parts <= in_slot, "the ranks of a slot, at least,", in_slot,
           place.ranks + place.parts);
  }

  // A in int8 is read like a product's weights.
  void check_lines(const LoraPlace& place) const {
    const bool is_line = reinterpret_cast<uintptr_t>(weights.data) % kLine == 0;
    if (!is_line || weights.dims[1] % kLine || place.offset % kLine)
      fail(api, ort::kInvalidArgument,
           "%s: adapters in int8 must lie at multiples of %lld bytes; the slots are %s, of %lld "
           "bytes each, and the place in a slot is %lld",
           op, static_cast<long long>(kLine), is_line ? "so" : "not",
           static_cast<long long>(weights.dims[1]), static_cast<long long>(place.offset));
  }

  void check_slot(int32_t slot) const {
    if (slot < 0 || slot >= ranks.dims[0])
      fail(api, ort::kInvalidArgument, "%s: slot %d; there are 0 to %lld", op, slot,
           static_cast<long long>(ranks.dims[0] - 1));
  }

  void check_ranks(const LoraSlots& all, const LoraPlace& place, int32_t slot) const {
    for (int64_t part = 0; part < place.parts; part++) {
      const int64_t rank = lora_rank(all, place, slot, part);
      if (rank < 0 || rank > all.max_rank)
        fail(api, ort::kInvalidArgument, "%s: rank %lld; there are 0 to %lld", op,
             static_cast<long long>(rank), static_cast<long long>(all.max_rank));
    }
  }
};

}  // namespace

LoraSlots read_adapters(const Api& api, const ort::KernelContext* context, const char* op,
                        size_t first, LoraType type, int64_t max_rank, int64_t rows,
                        std::initializer_list<LoraPlace> places) {
  Inputs in{api, op, {}, {}, {}, {}};
  Tensor* tensors[kAdapterInputs] = {&in.slots, &in.ranks, &in.weights, &in.scales};
  constexpr const char* kNames[kAdapterInputs] = {"slots", "ranks", "weights", "scales"};
  for (size_t i = 0; i < kAdapterInputs; i++) {
    const ort::Value* value = optional_input(api, context, first + i);
    if (value) *tensors[i] = describe(api, kNames[i], value);
  }
  in.check_shapes(rows);
  for (const LoraPlace& place : places) {
    in.check_room(type, place, max_rank);
    if (type == kLoraInt8) in.check_lines(place);
  }
  in.check_scales(type, max_rank);
  const LoraSlots all{type,
                      in.slots.as<const int32_t>(),
                      in.ranks.as<const int32_t>(),
                      in.weights.as<const char>(),
                      in.scales.as<const float>(),
                      in.ranks.dims[1] * in.ranks.dims[2],
                      in.weights.dims[1],
                      max_rank};
  int32_t checked = 0;  // most tokens have the slot of the one before
  for (int64_t row = 0; row < rows; row++) {
    const int32_t slot = all.tokens[row];
    if (slot == checked) continue;
    in.check_slot(slot);
    for (const LoraPlace& place : places) in.check_ranks(all, place, slot);
    checked = slot;
  }
  return all;
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
  *slots = read_adapters(api, context, op, first, kLoraInt8, max_rank, rows, places);
  return true;
}

LoraPlace read_place(const Api& api, const ort::KernelInfo* info) {
  LoraPlace place{};
  check(api.attribute(info, "offset", &place.offset));
  check(api.attribute(info, "ranks", &place.ranks));
  constexpr const char* kNames[kLoraParts] = {"columns0", "columns1", "columns2"};
  for (size_t part = 0; part < kLoraParts; part++) {
    check(api.attribute(info, kNames[part], &place.columns[part]));
    if (place.columns[part] > 0) place.parts = static_cast<int64_t>(part) + 1;
  }
  return place;
}

bool read_max_rank(const Api& api, const ort::KernelInfo* info, int64_t* max_rank) {
  Status* status = api.attribute(info, "max_rank", max_rank);
  if (status) api.release(status);
  return !status;
}

void check_place(const Api& api, const char* op, const LoraPlace& place, int64_t max_rank) {
  const int64_t* end = place.columns + kLoraParts;
  const bool is_negative = place.offset < 0 || place.ranks < 0 ||
                           std::any_of(place.columns, end, [](int64_t n) { return n < 0; });
  if (is_negative || max_rank < 1 || place.parts < 1)
    fail(api, ort::kInvalidArgument,
         "%s: an attribute is negative, or there are no columns or no ranks", op);
}

}  // namespace onnxport::op
