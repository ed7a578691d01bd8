// com.microsoft.PagedAttention as an ONNX Runtime custom operator: its signature, attributes, and
// the translation of one call into a Problem. ONNX Runtime ships no CPU kernel; registering the
// name in its own domain overrides its schema, so artifacts run unchanged.
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "attention.h"
#include "ort_abi.h"

namespace onnxport {
namespace {

using ort::Api;
using ort::Status;

enum Input : size_t {
  kQuery, kKey, kValue, kKeyCache, kValueCache, kCumulativeLengths, kPastLengths, kBlockTable,
  kCosine, kSine, kSlotMapping, kHeadSink, kQNorm, kKNorm, kKScale, kVScale, kMetadata,
  kInputCount
};
constexpr const char* kInputNames[kInputCount] = {
    "query",        "key",           "value",
    "key_cache",    "value_cache",   "cumulative_sequence_length",
    "past_seqlens", "block_table",   "cos_cache",
    "sin_cache",    "slot_mapping",  "head_sink",
    "q_norm_weight", "k_norm_weight", "k_scale",
    "v_scale",      "attention_metadata"};
constexpr size_t kOutputCount = 3;

// Carries an OrtStatus out of nested calls; never leaves this file.
struct Failure {
  Status* status;
};

void check(Status* status) {
  if (status) throw Failure{status};
}

[[noreturn]] void fail(const Api& api, ort::ErrorCode code, const char* format, ...) {
  char text[512];
  const int prefix = std::snprintf(text, sizeof text, "PagedAttention (CPU): ");
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text + prefix, sizeof text - static_cast<size_t>(prefix), format, arguments);
  va_end(arguments);
  throw Failure{api.create_status(code, text)};
}

// Runs f and turns whatever it throws into a status: no exception crosses the C boundary.
template <class F>
Status* guarded(const Api& api, F f) noexcept {
  try {
    f();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    return api.create_status(ort::kFail, error.what());
  } catch (...) {
    return api.create_status(ort::kFail, "PagedAttention (CPU): unknown error");
  }
}

// ---- Attributes ---------------------------------------------------------------------------------

class Attributes {
 public:
  Attributes(const Api& api, const ort::KernelInfo* info) : api_(api), info_(info) {}

  bool find(const char* name, int64_t* out) const { return ok(api_.attribute(info_, name, out)); }
  bool find(const char* name, float* out) const { return ok(api_.attribute(info_, name, out)); }
  bool find(const char* name, std::string* out) const {
    char text[64];
    size_t size = sizeof text;
    Status* status = api_.attribute(info_, name, text, &size);
    if (status && size > sizeof text) {
      api_.release(status);
      fail(api_, ort::kInvalidArgument, "attribute %s is %zu characters long", name, size - 1);
    }
    if (!ok(status)) return false;
    *out = text;
    return true;
  }

  // The runtime tells a missing attribute from one of another type in its message only, so a
  // missing one is asked for in every type.
  template <class T>
  T get(const char* name, T fallback) const {
    T value{};
    if (find(name, &value)) return value;
    int64_t integer;
    float real;
    std::string text;
    if (find(name, &integer) || find(name, &real) || find(name, &text))
      fail(api_, ort::kInvalidArgument, "attribute %s has the wrong type", name);
    return fallback;
  }
  int64_t require(const char* name) const {
    const int64_t value = get<int64_t>(name, INT64_MIN);
    if (value == INT64_MIN) fail(api_, ort::kInvalidArgument, "attribute %s is missing", name);
    return value;
  }
  bool flag(const char* name, int64_t fallback) const {
    const int64_t value = get<int64_t>(name, fallback);
    if (value != 0 && value != 1)
      fail(api_, ort::kInvalidArgument, "attribute %s must be 0 or 1, found %lld", name,
           static_cast<long long>(value));
    return value != 0;
  }

 private:
  bool ok(Status* status) const {
    if (!status) return true;
    api_.release(status);
    return false;
  }

  const Api& api_;
  const ort::KernelInfo* info_;
};

struct Kernel {
  Api api;
  Problem settings;  // what the attributes say; the rest is filled in for each call
  bool do_rotary;
  bool has_scale;
};

struct Operator {
  ort::CustomOp op;  // first, so that a pointer to it is a pointer to this
  ort::ElementType cache_type;
};

const char* name_of(ort::ElementType type) {
  switch (type) {
    case ort::kFloat: return "float";
    case ort::kFloat16: return "float16";
    case ort::kBFloat16: return "bfloat16";
    case ort::kInt8: return "int8";
    case ort::kUint8: return "uint8 (packed int4 or float4e2m1)";
    case ort::kFloat8E4M3FN: return "float8e4m3fn";
    default: return "unknown";
  }
}

CacheType cache_type_of(const Api& api, ort::ElementType type) {
  switch (type) {
    case ort::kFloat: return kFloat32;
    case ort::kFloat16: return kFloat16;
    case ort::kBFloat16: return kBFloat16;
    case ort::kInt8: return kInt8;
    default:
      fail(api, ort::kNotImplemented,
           "cache type %s is not supported; allowed are float, float16, bfloat16 and int8",
           name_of(type));
  }
}

void check_cache_dtype(const Api& api, const Attributes& attributes, const char* name,
                       ort::ElementType type) {
  const std::string found = attributes.get<std::string>(name, "");
  if (found.empty() || found == name_of(type)) return;
  fail(api, ort::kInvalidArgument, "attribute %s is '%s', but the cache tensor holds %s", name,
       found.c_str(), name_of(type));
}

bool quantized_per_channel(const Api& api, const Attributes& attributes, const char* name,
                           bool quantized) {
  const std::string found = attributes.get<std::string>(name, "NONE");
  if (quantized && found != "PER_TENSOR" && found != "PER_CHANNEL")
    fail(api, ort::kInvalidArgument,
         "attribute %s must be PER_TENSOR or PER_CHANNEL for an int8 cache, found '%s'", name,
         found.c_str());
  if (!quantized && found != "NONE")
    fail(api, ort::kInvalidArgument,
         "attribute %s must be NONE for a floating-point cache, found '%s'", name, found.c_str());
  return found == "PER_CHANNEL";
}

CacheLayout layout_of(const Api& api, const Attributes& attributes) {
  const std::string kv_layout = attributes.get<std::string>("kv_cache_layout", "SEPARATE");
  if (kv_layout != "SEPARATE")
    fail(api, ort::kNotImplemented, "kv_cache_layout must be SEPARATE, found '%s'",
         kv_layout.c_str());
  const std::string layout = attributes.get<std::string>("cache_layout", "canonical");
  if (layout == "canonical") return kCanonical;
  if (layout == "tiled") return kTiled;
  fail(api, ort::kInvalidArgument, "cache_layout must be canonical or tiled, found '%s'",
       layout.c_str());
}

std::unique_ptr<Kernel> make_kernel(const Api& api, const ort::KernelInfo* info,
                                    ort::ElementType type) {
  const Attributes attributes(api, info);
  auto kernel = std::make_unique<Kernel>();
  kernel->api = api;
  Problem& p = kernel->settings;
  p = Problem{};
  p.cache_layout = layout_of(api, attributes);
  p.cache_type = cache_type_of(api, type);
  p.num_heads = attributes.require("num_heads");
  p.kv_heads = attributes.require("kv_num_heads");
  if (p.kv_heads < 1 || p.num_heads < 1 || p.num_heads % p.kv_heads != 0)
    fail(api, ort::kInvalidArgument,
         "num_heads must be a positive multiple of kv_num_heads, found %lld and %lld",
         static_cast<long long>(p.num_heads), static_cast<long long>(p.kv_heads));
  check_cache_dtype(api, attributes, "k_cache_dtype", type);
  check_cache_dtype(api, attributes, "v_cache_dtype", type);
  const bool quantized = p.cache_type == kInt8;
  p.k_per_channel = quantized_per_channel(api, attributes, "k_quant_type", quantized);
  p.v_per_channel = quantized_per_channel(api, attributes, "v_quant_type", quantized);

  const int64_t window = attributes.get<int64_t>("local_window_size", -1);
  if (window != -1 && window < 1)
    fail(api, ort::kInvalidArgument, "local_window_size must be -1 or positive, found %lld",
         static_cast<long long>(window));
  p.window = window == -1 ? 0 : window;
  p.causal = attributes.flag("is_causal", 1);
  kernel->do_rotary = attributes.flag("do_rotary", 0);
  p.interleaved = attributes.flag("rotary_interleaved", 0);
  p.rotary_offset = attributes.get<int64_t>("rotary_offset", 0);
  if (p.rotary_offset < 0 || p.rotary_offset % 8 != 0)
    fail(api, ort::kInvalidArgument, "rotary_offset must be a multiple of 8, found %lld",
         static_cast<long long>(p.rotary_offset));
  p.softcap = attributes.get<float>("softcap", 0.f);
  if (!(p.softcap >= 0))
    fail(api, ort::kInvalidArgument, "softcap must not be negative, found %g",
         static_cast<double>(p.softcap));
  p.norm_epsilon = attributes.get<float>("qk_norm_epsilon", 1e-6f);
  // ONNX Runtime's own kernels take 0 for "not given", too.
  p.scale = attributes.get<float>("scale", 0.f);
  kernel->has_scale = p.scale != 0.f;
  if (const int64_t v_head_size = attributes.get<int64_t>("v_head_size", 0))
    fail(api, ort::kNotImplemented, "v_head_size needs the LATENT layout, found %lld",
         static_cast<long long>(v_head_size));
  return kernel;
}

// ---- One call -----------------------------------------------------------------------------------

constexpr size_t kMaxRank = 4;

struct Tensor {
  void* data = nullptr;  // null: not given
  int64_t dims[kMaxRank] = {};
  size_t rank = 0;

  explicit operator bool() const { return rank != 0; }
  template <class T>
  T* as() const { return static_cast<T*>(data); }
};

Tensor describe(const Api& api, const char* name, const ort::Value* value) {
  struct Info {
    const Api& api;
    ort::ShapeInfo* info = nullptr;
    ~Info() { if (info) api.release(info); }
  } info{api};
  Tensor tensor;
  check(api.shape_info(value, &info.info));
  check(api.rank(info.info, &tensor.rank));
  if (tensor.rank < 1 || tensor.rank > kMaxRank)
    fail(api, ort::kInvalidArgument, "%s must have 1 to %zu dimensions, found %zu", name, kMaxRank,
         tensor.rank);
  check(api.dimensions(info.info, tensor.dims, tensor.rank));
  // The accessor wants a mutable value even for inputs; only the caches are written to.
  check(api.mutable_data(const_cast<ort::Value*>(value), &tensor.data));
  return tensor;
}

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
    if (!inputs[input])
      fail(api, ort::kInvalidArgument, "input %s is missing", kInputNames[input]);
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

const float* read_scale(const Call& call, Input input, bool per_channel, const Problem& p) {
  const float* scale = call.require(input).as<float>();
  if (per_channel)
    call.expect(input, {p.kv_heads, 1, p.head_size});
  else
    call.expect(input, {1});
  return scale;
}

const float* read_vector(const Call& call, Input input, int64_t size) {
  if (!call.inputs[input]) return nullptr;
  call.expect(input, {size});
  return call.inputs[input].as<float>();
}

size_t element_size(int64_t cache_type) {
  return cache_type == kFloat32 ? 4 : cache_type == kInt8 ? 1 : 2;
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

struct Parallel {
  const Api& api;
  const ort::KernelContext* context;
  Status* status = nullptr;
};

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
  call.require(kValueCache);
  call.expect(kValueCache,
              {key_cache.dims[0], key_cache.dims[1], p.kv_heads, key_cache.dims[3]});
  p.num_blocks = key_cache.dims[0];
  p.block_size = key_cache.dims[1];
  p.head_size = key_cache.dims[3];
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
  if (p.cache_type == kInt8) {
    p.k_scale = read_scale(call, kKScale, p.k_per_channel != 0, p);
    p.v_scale = read_scale(call, kVScale, p.v_per_channel != 0, p);
  } else if (call.inputs[kKScale] || call.inputs[kVScale]) {
    fail(api, ort::kInvalidArgument, "k_scale and v_scale are for an int8 cache");
  }

  char message[400];
  if (!validate(p, message, sizeof message)) fail(api, ort::kInvalidArgument, "%s", message);

  const int64_t output_dims[2] = {p.num_tokens, p.num_heads * p.head_size};
  ort::Value* output = nullptr;
  check(api.output(context, 0, output_dims, 2, &output));
  void* output_data = nullptr;
  check(api.mutable_data(output, &output_data));
  p.output = static_cast<float*>(output_data);
  p.key_cache = open_cache(call, 1, key_cache, p);
  p.value_cache = open_cache(call, 2, call.inputs[kValueCache], p);

  Parallel parallel{api, context};
  p.parallel_for = parallel_for;
  p.parallel_context = &parallel;
  if (run_attention(p) != 0) check(parallel.status);
}

// ---- Registration -------------------------------------------------------------------------------

int input_type(const ort::CustomOp* op, size_t index) {
  switch (index) {
    case kKeyCache:
    case kValueCache: return reinterpret_cast<const Operator*>(op)->cache_type;
    case kCumulativeLengths:
    case kPastLengths:
    case kBlockTable:
    case kSlotMapping:
    case kMetadata: return ort::kInt32;
    default: return ort::kFloat;
  }
}

int input_characteristic(const ort::CustomOp*, size_t index) {
  switch (index) {
    case kQuery:
    case kKeyCache:
    case kCumulativeLengths:
    case kPastLengths:
    case kBlockTable: return ort::kRequired;
    default: return ort::kOptional;
  }
}

// The outputs that are the inputs' own memory.
size_t cache_aliases(int** inputs, int** outputs) {
  static int from[] = {kKeyCache, kValueCache};
  static int to[] = {1, 2};
  *inputs = from;
  *outputs = to;
  return 2;
}

Status* create_kernel(const ort::CustomOp* op, const void* const* table,
                      const ort::KernelInfo* info, void** out) {
  const Api api{table};
  return guarded(api, [&] {
    *out = make_kernel(api, info, reinterpret_cast<const Operator*>(op)->cache_type).release();
  });
}

Status* compute_kernel(void* state, ort::KernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(state);
  return guarded(kernel.api, [&] { compute(kernel, context); });
}

Operator make_operator(ort::ElementType cache_type) {
  Operator result{};
  result.cache_type = cache_type;
  ort::CustomOp& op = result.op;
  op.version = ort::kApiVersion;
  op.name = [](const ort::CustomOp*) { return "PagedAttention"; };
  op.execution_provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.input_type = input_type;
  op.input_type_count = [](const ort::CustomOp*) { return size_t{kInputCount}; };
  op.output_type = [](const ort::CustomOp* self, size_t index) -> int {
    return index == 0 ? ort::kFloat : reinterpret_cast<const Operator*>(self)->cache_type;
  };
  op.output_type_count = [](const ort::CustomOp*) { return kOutputCount; };
  op.destroy_kernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.input_characteristic = input_characteristic;
  op.output_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index == 0 ? ort::kRequired : ort::kOptional;
  };
  op.input_memory_type = [](const ort::CustomOp*, size_t) { return 0; };
  const auto one = [](const ort::CustomOp*) { return 1; };
  op.variadic_input_min_arity = op.variadic_input_homogeneity = one;
  op.variadic_output_min_arity = op.variadic_output_homogeneity = one;
  op.create_kernel = create_kernel;
  op.compute = compute_kernel;
  op.start_version = one;
  op.end_version = [](const ort::CustomOp*) { return INT32_MAX; };
  op.may_inplace = op.alias_map = cache_aliases;
  op.release_may_inplace = op.release_alias_map = [](int*, int*) {};
  return result;
}

}  // namespace

Status* register_operators(ort::SessionOptions* options, const ort::ApiBase* base) {
  const void* const* table = base->get_api(ort::kApiVersion);
  if (!table) return nullptr;  // the runtime has said so itself on its standard error
  const Api api{table};
  // One operator for each cache type under the same name. The last two exist to be refused with
  // our words rather than as an unknown type.
  static const Operator operators[] = {
      make_operator(ort::kFloat), make_operator(ort::kFloat16), make_operator(ort::kBFloat16),
      make_operator(ort::kInt8),  make_operator(ort::kUint8),   make_operator(ort::kFloat8E4M3FN)};
  return guarded(api, [&] {
    // The runtime keeps pointers to the domain and the operators; neither is ever freed.
    ort::CustomOpDomain* domain = nullptr;
    check(api.create_domain("com.microsoft", &domain));
    for (const Operator& op : operators) check(api.add_operator(domain, &op.op));
    check(api.add_domain(options, domain));
  });
}

}  // namespace onnxport

#if defined(_WIN32)
#define ONNXPORT_EXPORT extern "C" __declspec(dllexport)
#else
#define ONNXPORT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The entry point that SessionOptions.register_custom_ops_library looks for.
ONNXPORT_EXPORT onnxport::ort::Status* ONNXPORT_ORT_CALL RegisterCustomOps(
    onnxport::ort::SessionOptions* options, const onnxport::ort::ApiBase* base) {
  return onnxport::register_operators(options, base);
}
