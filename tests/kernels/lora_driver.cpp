// Runs products with random adapters in int8 and int4 without ONNX Runtime or Python, for processors
// that have neither here. Prints a line for each case: rows, bits, those of adapters, a hash of the
// outputs, how many rows have other bits alone, and how far what adapters add is off, as a share of it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "lora.h"
#include "scratch.h"

namespace {

using namespace onnxport;

constexpr int64_t kDepth = 100, kWidth = 123, kMaxRank = 20, kSlots = 4;
constexpr int32_t kRanks[kSlots + 1][kLoraParts] = {
    {0, 0, 0}, {16, 16, 16}, {20, 0, 7}, {0, 3, 0}, {1, 8, 5}};

int one_by_one(void*, size_t count, Task task, void* argument) {
  for (size_t i = 0; i < count; i++) task(argument, i);
  return 0;
}

struct Case {
  LoraType type;
  std::mt19937 random;
  Buffer weight_memory, slot_memory;
  MatMul product{};
  LoraPlace place{};
  std::vector<float> input, scales;
  std::vector<int32_t> tokens;
  uint8_t* slots;
  int64_t slot_bytes;

  Case(int64_t rows, int64_t bits, LoraType of)
      : type(of), random(static_cast<unsigned>(rows * 10 + bits)) {
    product.k = kDepth;
    product.n = kWidth;
    product.bits = bits;
    product.block_size = 32;
    product.rows = rows;
    input.resize(static_cast<size_t>(rows * kDepth));
    std::normal_distribution<float> normal;
    for (float& x : input) x = normal(random);
    scales.resize((kSlots + 1) * kLoraParts * kMaxRank);
    for (float& scale : scales) scale = uniform();
    tokens.resize(static_cast<size_t>(rows));
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % (kSlots + 1));
    place = {0, 0, kDepth, bits, product.block_size, kLoraParts, {70, 33, 20}};
    uint8_t* weights = weight_memory.reserve<uint8_t>(bytes(product));
    fill(weights, product, num_panels(product), kPanel);
    product.weights = weights;
    slot_bytes = (lora_numbers(type, place, kMaxRank) + 63) / 64 * 64;
    slots = slot_memory.reserve<uint8_t>(static_cast<size_t>(slot_bytes * kSlots));
    for (int64_t i = 0; i < slot_bytes * kSlots; i++) slots[i] = static_cast<uint8_t>(random());
    for (int32_t slot = 1; slot <= kSlots; slot++)
      for (int64_t row = 0; row < rank_of(slot);) {
        const Rows panel = panel_of(slot, row);
        fill(slot_of(slot) + panel.offset, product, 1, panel.outputs);
        row = panel.begin + panel.count;
      }
  }

  float uniform() { return std::uniform_real_distribution<float>(1e-3f, 1e-2f)(random); }
  uint8_t* slot_of(int32_t slot) const { return slots + (slot - 1) * slot_bytes; }
  static size_t bytes(const MatMul& m) {
    return static_cast<size_t>(num_panels(m) * panel_bytes(m));
  }

  static int64_t rank_of(int32_t slot) {
    return kRanks[slot][0] + kRanks[slot][1] + kRanks[slot][2];
  }

  // Rows of A that lie together.
  struct Rows {
    int64_t begin, count, outputs, offset;
  };

  // Those that have a row: half a panel if that is enough for the rows from there to the last.
  Rows panel_of(int32_t slot, int64_t row) const {
    const int64_t whole = has_halves() ? 16 : 32, begin = row - row % whole;
    const int64_t offset = begin / whole * panel_bytes(product);
    if (2 * (rank_of(slot) - begin) <= whole) return {begin, whole / 2, 16, offset};
    return {begin, whole, 32, offset};
  }

  bool has_halves() const { return type == kLoraInt8 && product.bits == 4; }

  // Where A ends.
  int64_t end_of_a(int32_t slot) const {
    if (rank_of(slot) == 0) return 0;
    const Rows last = panel_of(slot, rank_of(slot) - 1);
    return last.offset + panel_bytes(product, last.outputs);
  }

  // Any quants, and scales; at 4 bits those of the first halves are sixteen times the others'.
  void fill(uint8_t* weights, const MatMul& m, int64_t panels, int64_t outputs) {
    for (int64_t i = 0; i < panels * panel_bytes(m, outputs); i++)
      weights[i] = static_cast<uint8_t>(random());
    for (int64_t block = 0; block < panels * num_blocks(m); block++) {
      auto* own = reinterpret_cast<float*>(weights + block * block_bytes(m, outputs) +
                                           quant_bytes(m, outputs));
      const int64_t half = outputs / 2;
      for (int64_t i = outputs - 1; i >= 0; i--)
        own[i] = has_halves() && i < half ? 16 * own[i + half] : uniform();
    }
  }

  // A number of a row of A, as lora.h says.
  double a(int32_t slot, int64_t row, int64_t i) const {
    const MatMul& m = product;
    const Rows panel = panel_of(slot, row);
    const int64_t at = row - panel.begin, outputs = panel.outputs;
    const uint8_t* block = slot_of(slot) + panel.offset + i / 32 * block_bytes(m, outputs);
    const auto* own = reinterpret_cast<const float*>(block + quant_bytes(m, outputs));
    const int64_t in = i % 32;
    if (m.bits == 8)
      return static_cast<int8_t>(block[(in / 4 * outputs + at) * 4 + in % 4]) * own[at];
    const auto half = [&](int64_t output) {
      return (block[(in / 8 * outputs + output) * 4 + in % 8 / 2] >> in % 2 * 4 & 15) - 8;
    };
    if (!has_halves()) return half(at) * own[at];
    const int64_t second = at + outputs / 2;
    return half(at) * own[at] + half(second) * own[second];
  }

  // A number of a projection's B, times its column's scale in int4, as kernels.h says.
  double b(const int8_t* stored, int64_t rank, int64_t r, int64_t c) const {
    const int64_t panel = c / kLoraPanel, in = c % kLoraPanel;
    if (type == kLoraInt8) return stored[(panel * rank + r) * kLoraPanel + in];
    const int64_t groups = (rank + 7) / 8;
    const int8_t* own = stored + panel * (64 + groups * 256);
    const auto byte = static_cast<uint8_t>(own[64 + r / 8 * 256 + in * 4 + r % 4]);
    return ((r % 8 < 4 ? byte & 15 : byte >> 4) - 8) * static_cast<double>(own[in]);
  }

  int64_t b_bytes(int64_t rank, int64_t columns) const {
    if (type == kLoraInt8 || rank == 0) return rank * in_lora_panels(columns);
    return in_lora_panels(columns) * (1 + (rank + 7) / 8 * 4);
  }

  // What adapters add to a row, but for how activations and factors are rounded.
  std::vector<double> added(int64_t row) const {
    std::vector<double> sums(kWidth);
    const int32_t slot = tokens[static_cast<size_t>(row)];
    const auto* stored =
        reinterpret_cast<const int8_t*>(slot_of(slot)) + (slot ? end_of_a(slot) : 0);
    int64_t first = 0, a_row = 0;
    for (size_t part = 0; slot && part < kLoraParts; first += place.columns[part++]) {
      const int64_t rank = kRanks[slot][part], columns = place.columns[part];
      for (int64_t r = 0; r < rank; r++, a_row++) {
        double factor = 0;
        for (int64_t i = 0; i < kDepth; i++)
          factor += a(slot, a_row, i) * input[static_cast<size_t>(row * kDepth + i)];
        const size_t at = (static_cast<size_t>(slot) * kLoraParts + part) * kMaxRank;
        factor *= scales[at + static_cast<size_t>(r)];
        for (int64_t c = 0; c < columns; c++)
          sums[static_cast<size_t>(first + c)] += factor * b(stored, rank, r, c);
      }
      stored += b_bytes(rank, columns);
    }
    return sums;
  }

  std::vector<float> run(int64_t first, int64_t rows, bool adapted) const {
    std::vector<float> output(static_cast<size_t>(rows * kWidth));
    MatMul call = product;
    call.rows = rows;
    call.input = input.data() + first * kDepth;
    call.output = output.data();
    const ProductLora lora{{type, tokens.data() + first, &kRanks[0][0],
                            reinterpret_cast<const char*>(slots), scales.data(), kLoraParts,
                            slot_bytes, kMaxRank},
                           place};
    run_matmul(*active_matmul(), call, one_by_one, nullptr, adapted ? &lora : nullptr);
    return output;
  }
};

void check(int64_t rows, int64_t bits, LoraType type) {
  const Case of(rows, bits, type);
  const std::vector<float> found = of.run(0, rows, true), plain = of.run(0, rows, false);
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (size_t i = 0; i < found.size() * sizeof(float); i++)
    hash = (hash ^ reinterpret_cast<const uint8_t*>(found.data())[i]) * 1099511628211u;
  int changed = 0;
  double square = 0, off = 0;
  for (int64_t row = 0; row < rows; row++) {
    const float* own = found.data() + row * kWidth;
    changed += std::memcmp(of.run(row, 1, true).data(), own, kWidth * sizeof(float)) != 0;
    const std::vector<double> wanted = of.added(row);
    for (int64_t c = 0; c < kWidth; c++) {
      const double added = wanted[static_cast<size_t>(c)];
      square += added * added;
      const auto at = static_cast<size_t>(row * kWidth + c);
      const double change = static_cast<double>(own[c]) - plain[at];
      off += (change - added) * (change - added);
    }
  }
  std::printf("%d %d %d %016llx %d %.6f\n", static_cast<int>(rows), static_cast<int>(bits),
              type == kLoraInt4 ? 4 : 8, static_cast<unsigned long long>(hash), changed,
              square > 0 ? std::sqrt(off / square) : 0.0);
}

}  // namespace

int main(int, char** arguments) {
  if (!set_matmul_isa(arguments[1])) return 2;
  for (const int64_t rows : {1, 2, 3, 8, 9, 16, 17, 37, 64, 101, 300})
    for (const int64_t bits : {4, 8})
      for (const LoraType type : {kLoraInt8, kLoraInt4}) check(rows, bits, type);
}
