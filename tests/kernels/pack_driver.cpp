// Packs the weights of serialized products, each in both ways; test_pack.py writes and compares.
// Given a file of 8-bit quants, N and K it packs these, and prints how many KiB of the file are in
// its memory: when all was read, when it was packed, and when it was packed in parts.
#include <fcntl.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "pack.h"

namespace {

template <class T>
std::vector<T> read_array(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (std::fread(values.data(), sizeof(T), values.size(), stdin) != values.size()) std::exit(3);
  return values;
}

// KiB of the mapping at an address that are in this process's memory.
long resident(const void* address) {
  std::FILE* maps = std::fopen("/proc/self/smaps", "r");
  char line[4096], begin[32];
  std::snprintf(begin, sizeof begin, "%lx-", reinterpret_cast<unsigned long>(address));
  long found = -1;
  for (bool here = false; found < 0 && std::fgets(line, sizeof line, maps);) {
    here = here || std::strncmp(line, begin, std::strlen(begin)) == 0;
    if (here) std::sscanf(line, "Rss: %ld", &found);
  }
  std::fclose(maps);
  return found;
}

int pack_file(const char* path, int64_t n, int64_t k) {
  onnxport::MatMul m{};
  m.k = k;
  m.n = n;
  m.bits = 8;
  m.block_size = 32;
  const auto size = static_cast<size_t>(n * k);
  void* quants = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, open(path, O_RDONLY), 0);
  if (quants == MAP_FAILED) return 4;
  const auto* bytes = static_cast<const uint8_t*>(quants);
  unsigned sum = 0;
  for (size_t i = 0; i < size; i += 64) sum += bytes[i];
  std::printf("%ld\n", resident(quants) + (sum == 1));  // the sum is used
  const std::vector<float> scales(static_cast<size_t>(n * num_blocks(m)), 1.0f);
  std::vector<uint8_t> packed(static_cast<size_t>(num_panels(m) * panel_bytes(m)));
  for (const auto pack : {onnxport::pack_weights, onnxport::pack_weights_in_parts}) {
    pack(m, bytes, scales.data(), packed.data());
    std::printf("%ld\n", resident(quants));
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 4) return pack_file(arguments[1], std::atoll(arguments[2]), std::atoll(arguments[3]));
  for (int64_t left = read_array<int64_t>(1)[0]; left > 0; left--) {
    const std::vector<int64_t> sizes = read_array<int64_t>(4);
    onnxport::MatMul m{};
    m.k = sizes[0];
    m.n = sizes[1];
    m.bits = sizes[2];
    m.block_size = sizes[3];
    const auto quants = read_array<uint8_t>(m.n * num_blocks(m) * m.block_size * m.bits / 8);
    const auto scales = read_array<float>(m.n * num_blocks(m));
    const auto halves = read_array<uint16_t>(m.n * num_blocks(m));
    const auto exponents = read_array<uint8_t>(m.n * num_blocks(m));
    for (const onnxport::Scales& stored :
         {onnxport::Scales(scales.data()),
          onnxport::Scales(halves.data(), onnxport::Scales::kFloat16),
          onnxport::Scales(exponents.data(), onnxport::Scales::kE8M0)}) {
      m.half_scales = onnxport::are_halves(stored, m.n * num_blocks(m));
      for (const auto pack : {onnxport::pack_weights, onnxport::pack_weights_in_parts}) {
        // What was in the memory before must not show.
        std::vector<uint8_t> packed(static_cast<size_t>(num_panels(m) * panel_bytes(m)), 0xAA);
        pack(m, quants.data(), stored, packed.data());
        std::fwrite(packed.data(), 1, packed.size(), stdout);
      }
    }
  }
  return 0;
}
