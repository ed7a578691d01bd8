// One call of the operator: inputs and outputs checked against one another and turned into a
// Problem.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels.h"
#include "op.h"

namespace onnxport::op {

namespace {

struct Call {
  const Kernel& kernel;
  const Api& api;
  ort::KernelContext* context;
  Tensor inputs[kInputCount];

  Call(const Kernel& k, ort::KernelContext* c) : kernel(k), api(k.api), context(c) {
    size_t count = 0;
    check(api.input_count(context, &count));
    for (size_t i = 0; i < count && i < kInputCount; i++) {
      const ort::Value* value = nullptr;
      check(api.input(context, i, &value));
      if (value) inputs[i] = describe(api, kInputNames[i], value);
    }
  }

  const Tensor& require(Input input) const {
    if (!inputs[input]) fail(api, ort::kInvalidArgument, "input %s is missing", kInputNames[input]);
    return inputs[input];
  }

  // Fails unless the tensor has exactly these dimensions; -1 allows any.
  template <size_t kRank>
  void expect(Input input, const int64_t (&dims)[kRank]) const {
    const Tensor& tensor = inputs[input];
    bool same = tensor.rank == kRank;
    for (size_t i = 0; same && i < kRank; i++) same = dims[i] == -1 || dims[i] == tensor.dims[i];
    if (same) return;
    const std::string found = text(tensor.dims, tensor.rank), wanted = text(dims, kRank);
    fail(api, ort::kInvalidArgument, "input %s must have the shape %s, found %s",
         kInputNames[input], wanted.c_str(), found.c_str());
  }

  static std::string text(const int64_t* dims, size_t rank) {
    std::string out = "(";
    for (size_t i = 0; i < rank; i++) {
      if (i) out += ", ";
      out += dims[i] == -1 ? "any" : std::to_string(dims[i]);
    }
    return out + ")";
  }
};

void read_projections(const Call& call, Problem& p) {
  const int64_t q_width = p.num_heads * p.head_size, kv_width = p.kv_heads * p.head_size;
  const Tensor& query = call.require(kQuery);
  if (p.latent) {
    p.key = call.require(kKey).as<float>();
    call.expect(kQuery, {-1, q_width});
    p.num_tokens = query.dims[0];
    call.expect(kKey, {p.num_tokens, kv_width});
    p.query = query.as<float>();
    p.query_stride = q_width;
    p.key_stride = kv_width;
    return;
  }
  const bool packed = !call.inputs[kKey] && !call.inputs[kValue];
  call.expect(kQuery, {-1, packed ? q_width + 2 * kv_width : q_width});
  p.num_tokens = query.dims[0];
  p.query = query.as<float>();
  p.query_stride = query.dims[1];
  if (packed) {
    p.key = p.query + q_width;
    p.value = p.key + kv_width;
    p.key_stride = p.value_stride = p.query_stride;
    return;
  }
  p.key = call.require(kKey).as<float>();
  p.value = call.require(kValue).as<float>();
  call.expect(kKey, {p.num_tokens, kv_width});
  call.expect(kValue, {p.num_tokens, kv_width});
  p.key_stride = p.value_stride = kv_width;
}

void read_sequences(const Call& call, Problem& p) {
  const Tensor& table = call.require(kBlockTable);
  call.expect(kBlockTable, {-1, -1});
  p.batch = table.dims[0];
  p.table_width = table.dims[1];
  p.block_table = table.as<int32_t>();
  p.cumulative_lengths = call.require(kCumulativeLengths).as<int32_t>();
  call.expect(kCumulativeLengths, {p.batch + 1});
  p.past_lengths = call.require(kPastLengths).as<int32_t>();
  call.expect(kPastLengths, {p.batch});
  if (call.inputs[kSlotMapping]) {
    call.expect(kSlotMapping, {p.num_tokens});
    p.slot_mapping = call.inputs[kSlotMapping].as<int32_t>();
  }
}

void read_rotary(const Call& call, Problem& p) {
  if (!call.kernel.do_rotary) return;
  const Tensor& cosine = call.require(kCosine);
  call.require(kSine);
  call.expect(kCosine, {-1, -1});
  call.expect(kSine, {cosine.dims[0], cosine.dims[1]});
  p.rotary_rows = cosine.dims[0];
  p.rotary_dim = 2 * cosine.dims[1];
  p.cosine = cosine.as<float>();
  p.sine = call.inputs[kSine].as<float>();
  if (p.rotary_dim < 1 || p.rotary_offset + p.rotary_dim > p.head_size)
    fail(call.api, ort::kInvalidArgument,
         "cos_cache of width %lld at rotary_offset %lld does not fit a head of %lld",
         static_cast<long long>(cosine.dims[1]), static_cast<long long>(p.rotary_offset),
         static_cast<long long>(p.head_size));
}

const float* read_vector(const Call& call, Input input, int64_t size) {
  if (!call.inputs[input]) return nullptr;
  call.expect(input, {size});
  return call.inputs[input].as<float>();
}

size_t element_size(int64_t cache_type) {
  if (is_integer(static_cast<CacheType>(cache_type))) return 1;
  return cache_type == kFloat32 ? 4 : 2;
}

// The channels of a head, from the last dimension of a cache.
int64_t head_size_of(const Call& call, int64_t width) {
  const int64_t cache_type = call.kernel.settings.cache_type;
  if (cache_type != kInt4) return width - (cache_type == kInt8 ? kScaleBytes : 0);
  for (int64_t size = 8; size <= kMaxHeadSize; size += 8)
    if (int4_row_bytes(size) == width) return size;
  fail(call.api, ort::kInvalidArgument,
       "the last dimension of an int4 cache is %lld, which no head of a multiple of 8 channels has",
       static_cast<long long>(width));
}

// The cache to update: the output's memory, which is the input's where they are bound to one
// another. Where they are not, the whole cache is copied, which is correct and slow.
void* open_cache(const Call& call, size_t output, const Tensor& input, const Problem& p) {
  size_t outputs = 0;
  check(call.api.output_count(call.context, &outputs));
  if (output >= outputs) return input.data;
  ort::Value* value = nullptr;
  check(call.api.output(call.context, output, input.dims, input.rank, &value));
  if (!value) return input.data;
  void* data = nullptr;
  check(call.api.mutable_data(value, &data));
  if (data == input.data) return data;
  const int64_t elements = input.dims[0] * input.dims[1] * input.dims[2] * input.dims[3];
  std::memcpy(data, input.data, static_cast<size_t>(elements) * element_size(p.cache_type));
  return data;
}

// What there is of values: a cache like the keys', or nothing.
void check_values(const Call& call, const Tensor& key_cache, const Problem& p) {
  if (!p.latent) {
    call.require(kValueCache);
    call.expect(kValueCache,
                {key_cache.dims[0], key_cache.dims[1], p.kv_heads, key_cache.dims[3]});
    return;
  }
  for (const Input input : {kValue, kValueCache})
    if (call.inputs[input])
      fail(call.api, ort::kInvalidArgument,
           "input %s must be absent in the LATENT layout, whose keys hold the values",
           kInputNames[input]);
  if (p.value_size != p.head_size && !call.kernel.has_scale)
    fail(call.api, ort::kInvalidArgument,
         "attribute scale is required where v_head_size %lld differs from head_size %lld",
         static_cast<long long>(p.value_size), static_cast<long long>(p.head_size));
}

}  // namespace

int parallel_for(void* context, size_t count, Task task, void* argument) {
  Parallel& parallel = *static_cast<Parallel*>(context);
  parallel.status = parallel.api.parallel_for(parallel.context, task, count, 0, argument);
  return parallel.status ? 1 : 0;
}

void compute(const Kernel& kernel, ort::KernelContext* context) {
  const Call call(kernel, context);
  const Api& api = kernel.api;
  Problem p = kernel.settings;

  const Tensor& key_cache = call.require(kKeyCache);
  call.expect(kKeyCache, {-1, -1, p.kv_heads, -1});
  p.num_blocks = key_cache.dims[0];
  p.block_size = key_cache.dims[1];
  p.head_size = head_size_of(call, key_cache.dims[3]);
  if (!p.value_size) p.value_size = p.head_size;
  check_values(call, key_cache, p);
  if (!kernel.has_scale) {
    // 1 / sqrt in double, so that every platform rounds alike.
    p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.head_size)));
  }
  read_projections(call, p);
  read_sequences(call, p);
  read_rotary(call, p);
  p.head_sink = read_vector(call, kHeadSink, p.num_heads);
  p.q_norm_weight = read_vector(call, kQNorm, p.head_size);
  p.k_norm_weight = read_vector(call, kKNorm, p.head_size);
  if (call.inputs[kKScale] || call.inputs[kVScale])
    fail(api, ort::kInvalidArgument,
         "k_scale and v_scale are not taken; the scales of an int8 or int4 cache lie in the cache");

  char message[400];
  if (!validate(p, message, sizeof message)) fail(api, ort::kInvalidArgument, "%s", message);

  const int64_t output_dims[2] = {p.num_tokens, p.num_heads * p.value_size};
  ort::Value* output = nullptr;
  check(api.output(context, 0, output_dims, 2, &output));
  void* output_data = nullptr;
  check(api.mutable_data(output, &output_data));
  p.output = static_cast<float*>(output_data);
  p.key_cache = open_cache(call, 1, key_cache, p);
  if (!p.latent) p.value_cache = open_cache(call, 2, call.inputs[kValueCache], p);

  Parallel parallel{api, context};
  p.parallel_for = parallel_for;
  p.parallel_context = &parallel;
  if (run_attention(p) != 0) check(parallel.status);
}

}  // namespace onnxport::op
