// Packs weights: in each block, a transpose of 32-bit words from [kPanel][words] to [words][kPanel].
#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "half.h"
#include "pages.h"

namespace onnxport {
namespace {

// Packing copies from memory to memory, which more threads than these do not make faster.
constexpr int64_t kMostThreads = 4;
// Packed bytes that are worth a thread: it takes some ten microseconds to start.
constexpr int64_t kPartBytes = 1 << 20;

// The E8M0 that is no number; and those of 2^-23 to 2^16, half of which is a float16.
constexpr uint8_t kNoPower = 255, kLeastHalf = 127 - 23, kMostHalf = 127 + 16;

// A side of the square tiles that are turned over in registers.
constexpr int64_t kTile = 4;

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ONNXPORT_VECTOR_PACK 1
#endif
#endif

#if defined(ONNXPORT_VECTOR_PACK)

typedef uint32_t Words __attribute__((vector_size(16)));

Words load(const uint8_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

void store(uint8_t* to, Words words) { std::memcpy(to, &words, sizeof words); }

// Turns over kTile words of kTile output features, which are row_bytes apart.
void turn(const uint8_t* from, int64_t row_bytes, uint32_t flip, uint8_t* to) {
  const Words a = load(from), b = load(from + row_bytes), c = load(from + 2 * row_bytes),
              d = load(from + 3 * row_bytes);
  const Words ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Words cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Words ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Words cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store(to, __builtin_shufflevector(ab, cd, 0, 1, 4, 5) ^ flip);
  store(to + kPanel * 4, __builtin_shufflevector(ab, cd, 2, 3, 6, 7) ^ flip);
  store(to + 2 * kPanel * 4, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5) ^ flip);
  store(to + 3 * kPanel * 4, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7) ^ flip);
}

#else

void turn(const uint8_t* from, int64_t row_bytes, uint32_t flip, uint8_t* to) {
  for (int64_t j = 0; j < kTile; j++)
    for (int64_t i = 0; i < kTile; i++) {
      uint32_t word;
      std::memcpy(&word, from + j * row_bytes + i * 4, 4);
      word ^= flip;
      std::memcpy(to + (i * kPanel + j) * 4, &word, 4);
    }
}

#endif

// The quants of a block of count output features, which are row_bytes apart.
void pack_block(const uint8_t* from, int64_t row_bytes, int64_t words, int64_t count,
                uint32_t flip, uint8_t* to) {
  const int64_t tiled_words = words / kTile * kTile, tiled_count = count / kTile * kTile;
  for (int64_t i = 0; i < tiled_words; i += kTile)
    for (int64_t j = 0; j < tiled_count; j += kTile)
      turn(from + j * row_bytes + i * 4, row_bytes, flip, to + (i * kPanel + j) * 4);
  for (int64_t j = 0; j < count; j++)
    for (int64_t i = j < tiled_count ? tiled_words : 0; i < words; i++) {
      uint32_t word;
      std::memcpy(&word, from + j * row_bytes + i * 4, 4);
      word ^= flip;
      std::memcpy(to + (i * kPanel + j) * 4, &word, 4);
    }
}

// Half of the power of two that an E8M0 is: 2^(exponent - 128), which the two least ones write without
// an exponent of their own.
float half_of_power(uint8_t exponent) {
  if (exponent == kNoPower) return NAN;
  return bits_float(exponent > 1 ? (exponent - 1u) << 23 : 0x200000u << exponent);
}

float scale_at(const Scales& scales, int64_t place) {
  switch (scales.type) {
    case Scales::kFloat16:
      return float_from_half(static_cast<const uint16_t*>(scales.data)[place]);
    case Scales::kE8M0: return half_of_power(static_cast<const uint8_t*>(scales.data)[place]);
    default: return static_cast<const float*>(scales.data)[place];
  }
}

uint16_t half_at(const Scales& scales, int64_t place) {
  if (scales.type == Scales::kFloat16) return static_cast<const uint16_t*>(scales.data)[place];
  return half_from_float(scale_at(scales, place));
}

// A block's scales of count output features, which are stride apart.
void pack_scales(const MatMul& call, const Scales& scales, int64_t first, int64_t stride,
                 int64_t count, uint8_t* to) {
  for (int64_t j = 0; j < count; j++) {
    const int64_t place = first + j * stride;
    if (call.half_scales) {
      const uint16_t half = half_at(scales, place);
      std::memcpy(to + j * 2, &half, sizeof half);
    } else {
      const float scale = scale_at(scales, place);
      std::memcpy(to + j * 4, &scale, sizeof scale);
    }
  }
}

}  // namespace

bool are_halves(const Scales& stored, int64_t count) {
  if (stored.type == Scales::kFloat16) return true;
  if (stored.type == Scales::kE8M0) {
    const auto* exponents = static_cast<const uint8_t*>(stored.data);
    bool is_other = false;
    for (int64_t i = 0; i < count; i++)
      is_other |= static_cast<uint8_t>(exponents[i] - kLeastHalf) > kMostHalf - kLeastHalf;
    return !is_other;
  }
  const auto* scales = static_cast<const float*>(stored.data);
  // Without branches, so that the loop becomes vectors: every bit that a float16 lacks, and
  // exponents out of its range.
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t magnitude = float_bits(scales[i]) & 0x7fffffffu;
    const bool in_range = magnitude - 0x38800000u < 0x47800000u - 0x38800000u;
    bad |= (magnitude & 0x1fffu) | static_cast<uint32_t>(!in_range & (magnitude != 0));
  }
  return bad == 0;
}

void pack_weights(const MatMul& call, const uint8_t* quants, const Scales& scales,
                  uint8_t* packed) {
  pack_rows(call, quants, scales, 1, packed);
}

void pack_rows(const MatMul& call, const uint8_t* quants, const Scales& scales, int64_t step,
               uint8_t* packed) {
  const int64_t blocks = num_blocks(call), words = call.block_size * call.bits / 32;
  const int64_t row_bytes = blocks * words * 4 * step, row_scales = blocks * step;
  const uint32_t flip = call.bits == 8 ? 0x80808080u : 0;
  for (int64_t panel = 0; panel < num_panels(call); panel++) {
    const int64_t first = panel * kPanel, count = std::min(kPanel, call.n - first);
    for (int64_t block = 0; block < blocks; block++, packed += block_bytes(call)) {
      if (count < kPanel) std::memset(packed, 0, static_cast<size_t>(block_bytes(call)));
      pack_block(quants + first * row_bytes + block * words * 4, row_bytes, words, count, flip,
                 packed);
      pack_scales(call, scales, first * row_scales + block, row_scales, count,
                  packed + quant_bytes(call));
    }
  }
}

void pack_zeros(const MatMul& call, const uint8_t* stored, uint16_t* packed, int64_t step) {
  const int64_t blocks = num_blocks(call), row_bytes = stored_zero_bytes(call) * step;
  const int middle = 1 << (call.bits - 1);
  for (int64_t panel = 0; panel < num_panels(call); panel++) {
    const int64_t first = panel * kPanel, count = std::min(kPanel, call.n - first);
    for (int64_t block = 0; block < blocks; block++, packed += kPanel) {
      std::fill_n(packed, kPanel, uint16_t{0});
      for (int64_t j = 0; j < count; j++) {
        const uint8_t* row = stored + (first + j) * row_bytes;
        if (call.has_offsets) {
          std::memcpy(packed + j, row + block * 2, sizeof *packed);
          continue;
        }
        const int zero = call.bits == 8 ? row[block] : row[block / 2] >> block % 2 * 4 & 15;
        packed[j] = half_from_float(static_cast<float>(middle - zero));
      }
    }
  }
}

void in_parts(int64_t count, int64_t bytes, const Range& pack) {
  const int64_t size = std::max<int64_t>(1, kPartBytes / bytes), parts = ceil_div(count, size);
  std::atomic<int64_t> next{0};
  const auto take = [&] {
    for (int64_t part = next++; part < parts; part = next++)
      pack(part * size, std::min(count, (part + 1) * size));
  };
  const auto processors = static_cast<int64_t>(std::thread::hardware_concurrency());
  std::vector<std::thread> others;
  others.reserve(kMostThreads);
  try {
    while (static_cast<int64_t>(others.size()) < std::min({kMostThreads, processors, parts}) - 1)
      others.emplace_back(take);
  } catch (const std::exception&) {  // this process may have no more: those there are do it all
  }
  take();
  for (std::thread& other : others) other.join();
}

void pack_weights_in_parts(const MatMul& call, const uint8_t* quants, const Scales& scales,
                           uint8_t* packed) {
  const int64_t blocks = num_blocks(call), row_bytes = blocks * call.block_size * call.bits / 8;
  in_parts(num_panels(call), panel_bytes(call), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPanel;
    MatMul part = call;
    part.n = std::min(call.n, end * kPanel) - first;
    const uint8_t* from = quants + first * row_bytes;
    pack_weights(part, from, scales_from(scales, first * blocks),
                 packed + begin * panel_bytes(call));
    // At once: the head alone may be a third of a model, which would be in memory twice.
    forget_file_pages(from, static_cast<size_t>(part.n * row_bytes));
  });
}

}  // namespace onnxport
