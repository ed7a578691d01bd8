// Packs the weights of serialized products, each in both ways; test_pack.py writes and compares.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pack.h"

namespace {

template <class T>
std::vector<T> read_array(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (std::fread(values.data(), sizeof(T), values.size(), stdin) != values.size()) std::exit(3);
  return values;
}

}  // namespace

int main() {
  for (int64_t left = read_array<int64_t>(1)[0]; left > 0; left--) {
    const std::vector<int64_t> sizes = read_array<int64_t>(4);
    onnxport::MatMul m{};
    m.k = sizes[0];
    m.n = sizes[1];
    m.bits = sizes[2];
    m.block_size = sizes[3];
    const auto quants = read_array<uint8_t>(m.n * num_blocks(m) * m.block_size * m.bits / 8);
    const auto scales = read_array<float>(m.n * num_blocks(m));
    m.half_scales = onnxport::are_halves(scales.data(), m.n * num_blocks(m));
    for (const auto pack : {onnxport::pack_weights, onnxport::pack_weights_in_parts}) {
      // What was in the memory before must not show.
      std::vector<uint8_t> packed(static_cast<size_t>(num_panels(m) * panel_bytes(m)), 0xAA);
      pack(m, quants.data(), scales.data(), packed.data());
      std::fwrite(packed.data(), 1, packed.size(), stdout);
    }
  }
  return 0;
}
