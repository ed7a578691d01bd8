#include "op_pools.h"

#include <cstring>
#include <string>

namespace onnxport::op {
namespace {

std::string text(const int64_t* dims, size_t rank) {
  std::string out = "(";
  for (size_t i = 0; i < rank; i++) {
    if (i) out += ", ";
    out += dims[i] == -1 ? "any" : std::to_string(dims[i]);
  }
  return out + ")";
}

bool fits(const Tensor& tensor, const int64_t* dims, size_t rank) {
  bool same = tensor.rank == rank;
  for (size_t i = 0; same && i < rank; i++) same = dims[i] == -1 || dims[i] == tensor.dims[i];
  return same;
}

}  // namespace

Tensor PoolCall::tensor(size_t input, const char* name, std::initializer_list<int64_t> dims) const {
  const ort::Value* value = nullptr;
  check(api_.input(context_, input, &value));
  const Tensor found = describe(api_, name, value);
  if (!fits(found, dims.begin(), dims.size()))
    fail(api_, ort::kInvalidArgument, "%s: %s must have the shape %s, found %s", op_, name,
         text(dims.begin(), dims.size()).c_str(), text(found.dims, found.rank).c_str());
  return found;
}

Tensor PoolCall::rows(size_t input, const char* name, int64_t rows, int64_t width) const {
  const ort::Value* value = optional_input(api_, context_, input);
  if (!value) fail(api_, ort::kInvalidArgument, "%s: %s is missing", op_, name);
  const Tensor found = describe(api_, name, value);
  Tensor flat = found;
  flat.rank = 2;
  flat.dims[1] = 1;
  for (size_t i = 1; i < found.rank; i++) flat.dims[1] *= found.dims[i];
  const int64_t wanted[] = {rows, width};
  if (!fits(flat, wanted, 2))
    fail(api_, ort::kInvalidArgument, "%s: %s must have rows of the shape %s, found %s", op_, name,
         text(wanted, 2).c_str(), text(found.dims, found.rank).c_str());
  return flat;
}

StateSlots PoolCall::slots(int64_t num_tokens, int64_t num_slots, size_t lengths) const {
  const Tensor reads = tensor(lengths + 1, "state_reads", {-1});
  const int64_t batch = reads.dims[0];
  const StateSlots found{
      batch,
      num_tokens,
      num_slots,
      tensor(lengths, "cumulative_sequence_length", {batch + 1}).as<const int32_t>(),
      reads.as<const int32_t>(),
      tensor(lengths + 2, "state_writes", {batch}).as<const int32_t>()};
  check_slots(found);
  return found;
}

float* PoolCall::open_pool(const Tensor& pool) const {
  ort::Value* value = nullptr;
  void* data = nullptr;
  check(api_.output(context_, 1, pool.dims, pool.rank, &value));
  check(api_.mutable_data(value, &data));
  if (data != pool.data) {
    int64_t count = 1;
    for (size_t i = 0; i < pool.rank; i++) count *= pool.dims[i];
    std::memcpy(data, pool.data, static_cast<size_t>(count) * sizeof(float));
  }
  return static_cast<float*>(data);
}

void PoolCall::refuse_width(const char* name, int64_t width, int64_t head_size,
                            int64_t besides) const {
  fail(api_, ort::kInvalidArgument,
       "%s: %s has %lld numbers of a token, which are no heads of %lld and %lld besides", op_, name,
       static_cast<long long>(width), static_cast<long long>(head_size),
       static_cast<long long>(besides));
}

}  // namespace onnxport::op
