// A node's attributes, checked and turned into the settings of its kernel.
#include <string>

#include "op.h"

namespace onnxport::op {

namespace {

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
    case ort::kUint8: return kInt4;
    default:
      fail(api, ort::kNotImplemented,
           "cache type %s is not supported; allowed are float, float16, bfloat16, int8 and uint8 "
           "(packed int4)",
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

// PER_TOKEN and PER_GROUP are ours: scales are computed when a token is written, and lie in the cache.
void check_granularity(const Api& api, const Attributes& attributes, const char* name,
                       int64_t cache_type) {
  const std::string found = attributes.get<std::string>(name, "NONE");
  const char* wanted =
      cache_type == kInt8 ? "PER_TOKEN" : cache_type == kInt4 ? "PER_GROUP" : "NONE";
  const char* what = cache_type == kInt8   ? "an int8"
                     : cache_type == kInt4 ? "an int4"
                                           : "a floating-point";
  if (found != wanted)
    fail(api, ort::kInvalidArgument, "attribute %s must be %s for %s cache, found '%s'", name,
         wanted, what, found.c_str());
}

bool is_latent(const Api& api, const Attributes& attributes) {
  const std::string layout = attributes.get<std::string>("kv_cache_layout", "SEPARATE");
  if (layout != "SEPARATE" && layout != "LATENT")
    fail(api, ort::kInvalidArgument, "kv_cache_layout must be SEPARATE or LATENT, found '%s'",
         layout.c_str());
  return layout == "LATENT";
}

// A latent cache is one of one head's keys, and no other one of values, which could have a type.
void check_latent(const Api& api, const Attributes& attributes, const Problem& p) {
  if (p.kv_heads != 1)
    fail(api, ort::kInvalidArgument, "kv_num_heads must be 1 in the LATENT layout, found %lld",
         static_cast<long long>(p.kv_heads));
  if (p.cache_type == kInt4)
    fail(api, ort::kNotImplemented,
         "an int4 cache cannot be LATENT; allowed are float, float16, bfloat16 and int8");
  for (const char* name : {"v_cache_dtype", "v_quant_type"}) {
    const std::string found = attributes.get<std::string>(name, "");
    if (!found.empty() && found != "NONE")
      fail(api, ort::kInvalidArgument,
           "attribute %s is '%s', but there is no value cache in the LATENT layout", name,
           found.c_str());
  }
}

CacheLayout layout_of(const Api& api, const Attributes& attributes) {
  const std::string layout = attributes.get<std::string>("cache_layout", "canonical");
  if (layout == "canonical") return kCanonical;
  if (layout == "tiled") return kTiled;
  if (layout == "paired") return kPaired;
  fail(api, ort::kInvalidArgument, "cache_layout must be canonical, tiled or paired, found '%s'",
       layout.c_str());
}

}  // namespace

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
  check_granularity(api, attributes, "k_quant_type", p.cache_type);
  p.latent = is_latent(api, attributes);
  if (p.latent) {
    check_latent(api, attributes, p);
  } else {
    check_cache_dtype(api, attributes, "v_cache_dtype", type);
    check_granularity(api, attributes, "v_quant_type", p.cache_type);
  }

  const int64_t window = attributes.get<int64_t>("local_window_size", -1);
  if (window != -1 && window < 1)
    fail(api, ort::kInvalidArgument, "local_window_size must be -1 or positive, found %lld",
         static_cast<long long>(window));
  p.window = window == -1 ? 0 : window;
  p.chunked = attributes.flag("local_window_chunked", 0);
  if (p.chunked && !p.window)
    fail(api, ort::kInvalidArgument, "local_window_chunked needs a local_window_size");
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
  p.value_size = attributes.get<int64_t>("v_head_size", 0);  // 0: as wide as keys
  if (p.value_size < 0)
    fail(api, ort::kInvalidArgument, "v_head_size must not be negative, found %lld",
         static_cast<long long>(p.value_size));
  if (p.value_size && !p.latent)
    fail(api, ort::kInvalidArgument, "v_head_size needs the LATENT layout, found %lld",
         static_cast<long long>(p.value_size));
  return kernel;
}

}  // namespace onnxport::op
