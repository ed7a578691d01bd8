#include "coarse_plane.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace onnxport {
namespace {

// SplitMix64 of the place: see serving/sampler.py, which draws with it, too.
uint64_t mixed(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// Arithmetic on two numbers of up to 16 bits in the halves of a word. So an output is a lane, of
// any instruction set, and nothing has to move between lanes.
constexpr uint32_t kBytes = 0x00ff00ffu, kLowNibbles = 0x000f000fu, kHighNibbles = 0x00f000f0u;
constexpr uint32_t kOnes = 0x01010101u, kTops = 0x80808080u;
// 241 / 4096 is nearly 1 / 17: up to 271 the quotients are those of 17, and products have 16 bits.
constexpr uint32_t kReciprocal = 241;

// Of four inputs, the first one ahead: bytes of the even ones' u in the low nibbles and the odd
// ones' in the high ones, two of them. Each byte of weights is w + 127.
inline uint32_t two_bytes(uint32_t weights, uint32_t even_dither, uint32_t odd_dither) {
  const uint32_t even = ((weights & kBytes) + even_dither) * kReciprocal;
  const uint32_t odd = (((weights >> 8) & kBytes) + odd_dither) * kReciprocal;
  const uint32_t both = ((even >> 12) & kLowNibbles) | ((odd >> 8) & kHighNibbles);
  return (both | (both >> 8)) & 0xffffu;
}

inline uint32_t two_dithers(const uint8_t* d) {
  return static_cast<uint32_t>(d[0]) | (static_cast<uint32_t>(d[2]) << 16);
}

// Four bits of eight inputs of a panel's outputs: `from` holds two rows of words of four bytes, of
// the first and of the last four inputs. Returns whether all weights are -127 or more; an output
// that there is none of has zeros.
bool convert_inputs(const uint8_t* from, const uint8_t* dither, uint8_t* to) {
  const uint32_t even[2] = {two_dithers(dither), two_dithers(dither + 4)};
  const uint32_t odd[2] = {two_dithers(dither + 1), two_dithers(dither + 5)};
  uint32_t words[2][kPanel], bytes[kPanel], below = 0;
  std::memcpy(words, from, sizeof words);
  for (int i = 0; i < kPanel; i++) {
    const uint32_t first = words[0][i] ^ kTops, second = words[1][i] ^ kTops;
    below |= ((first - kOnes) & ~first) | ((second - kOnes) & ~second);
    bytes[i] = two_bytes(first - kOnes, even[0], odd[0]) |
               (two_bytes(second - kOnes, even[1], odd[1]) << 16);
  }
  std::memcpy(to, bytes, sizeof bytes);
  return (below & kTops) == 0;  // else a byte of w + 128 was zero
}

}  // namespace

std::vector<uint8_t> make_dither(const MatMul& product) {
  std::vector<uint8_t> dither(static_cast<size_t>(num_blocks(product) * product.block_size));
  for (size_t i = 0; i < dither.size(); i++)
    dither[i] = static_cast<uint8_t>(mixed(i) % kCoarseStep);
  return dither;
}

MatMul plane_of(MatMul product) {
  product.bits = 4;
  product.weights = nullptr;
  return product;
}

float scale_of(const MatMul& product, const uint8_t* scales, int64_t output) {
  if (product.half_scales) {
    uint16_t half;
    std::memcpy(&half, scales + output * 2, sizeof half);
    return std::fabs(float_from_half(half));
  }
  float scale;
  std::memcpy(&scale, scales + output * 4, sizeof scale);
  return std::fabs(scale);
}

Conversion convert_panel(const MatMul& product, const MatMul& plane, const uint8_t* dither,
                         const uint8_t* from, uint8_t* to, float* largest) {
  bool is_small = true, is_number = true;
  for (int64_t block = 0; block < num_blocks(product); block++) {
    for (int64_t i = 0; i < product.block_size; i += 8)
      is_small &= convert_inputs(from + i * kPanel, dither + i, to + i / 2 * kPanel);
    dither += product.block_size;
    const uint8_t* scales = from + quant_bytes(product);
    std::memcpy(to + quant_bytes(plane), scales,
                static_cast<size_t>(block_bytes(product) - quant_bytes(product)));
    float most = 0.f;
    for (int64_t output = 0; output < kPanel; output++) {
      const float scale = scale_of(product, scales, output);
      is_number &= std::isfinite(scale);
      most = std::max(most, scale);
    }
    largest[block] = most;
    from += block_bytes(product);
    to += block_bytes(plane);
  }
  return !is_number ? Conversion::kNoNumber : is_small ? Conversion::kMade : Conversion::kTooLarge;
}

}  // namespace onnxport
