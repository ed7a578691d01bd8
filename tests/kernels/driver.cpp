// Runs serialized problems without ONNX Runtime or Python, for processors that have neither here.
// standalone.py writes the input and reads the output; see there for the format.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "drivers.h"
#include "kernels.h"

namespace {

using onnxport::Problem;

void read(void* data, size_t size) {
  if (size != 0 && std::fread(data, 1, size, stdin) != size) std::exit(3);
}

int64_t read_integer() {
  int64_t value;
  read(&value, sizeof value);
  return value;
}

struct Array {
  std::vector<char> bytes;
  bool present = false;

  void load() {
    const int64_t size = read_integer();
    present = size >= 0;
    bytes.resize(present ? static_cast<size_t>(size) : 0);
    read(bytes.data(), bytes.size());
  }
  template <class T>
  T* as() {
    return present ? reinterpret_cast<T*>(bytes.data()) : nullptr;
  }
  void write() const {
    if (!bytes.empty()) std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || !onnxport::set_isa(argv[1])) return 2;
  for (int64_t problems = read_integer(); problems > 0; problems--) {
    Problem p{};
    // The integers and floats come first in the structure; the pointers are set below.
    read(&p, offsetof(Problem, query));
    Array query, key, value, output, key_cache, value_cache, cumulative, past, table, slots, cosine,
        sine, sink, q_norm, k_norm;
    for (Array* array :
         {&query, &key, &value, &output, &key_cache, &value_cache, &cumulative, &past, &table,
          &slots, &cosine, &sine, &sink, &q_norm, &k_norm})
      array->load();
    p.query = query.as<float>();
    p.key = key.as<float>();
    p.value = value.as<float>();
    p.output = output.as<float>();
    p.key_cache = key_cache.as<void>();
    p.value_cache = value_cache.as<void>();
    p.cumulative_lengths = cumulative.as<int32_t>();
    p.past_lengths = past.as<int32_t>();
    p.block_table = table.as<int32_t>();
    p.slot_mapping = slots.as<int32_t>();
    p.cosine = cosine.as<float>();
    p.sine = sine.as<float>();
    p.head_sink = sink.as<float>();
    p.q_norm_weight = q_norm.as<float>();
    p.k_norm_weight = k_norm.as<float>();
    p.parallel_for = run_on_threads;
    char message[400];
    if (!onnxport::validate(p, message, sizeof message)) {
      std::fprintf(stderr, "%s\n", message);
      return 1;
    }
    if (onnxport::run_attention(p) != 0) return 4;
    output.write();
    key_cache.write();
    value_cache.write();
  }
  return 0;
}
