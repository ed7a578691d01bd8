// Instructions that few processors have, computed by others, so that tests of the kernels that use
// them run on more machines: AMX's tiles on any processor with AVX-512 and its products of bfloat16
// and bytes, AVX-VNNI on any with AVX2. A build with ONNXPORT_EMULATE includes this before all else.
//
// What the tiles do is as Intel's "Intrinsics Guide" and Software Developer's Manual (volume 2, the
// pseudocode of each instruction) tell it, the faults included: a product of tiles whose shapes do
// not fit, or of tiles that were never configured, ends the process.
#pragma once

#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Files that include this are compiled for other sets, and share nothing.
namespace {
namespace onnxport_emulated {

[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}

constexpr int kRows = 16, kBytes = 64, kRegisters = 8;

struct Register {
  int rows = 0, bytes = 0;
  uint8_t at[kRows][kBytes] = {};
};

struct Tiles {
  bool configured = false;
  Register registers[kRegisters];

  Register& get(int number) {
    if (!configured) fault("used without a configuration");
    Register& found = registers[number];
    if (found.rows == 0 || found.bytes == 0) fault("a register that is not configured");
    return found;
  }
};

inline Tiles& tiles() {
  static thread_local Tiles of_thread;
  return of_thread;
}

inline void load_configuration(const void* memory) {
  uint8_t given[64];
  std::memcpy(given, memory, sizeof given);
  if (given[0] != 1) fault("a palette other than 1");
  for (int i = 1; i < 16; i++)
    if (given[i] != 0) fault("a start row, or what is reserved");
  Tiles& all = tiles();
  all.configured = true;
  for (int t = 0; t < kRegisters; t++) {
    Register fresh;
    uint16_t bytes;
    std::memcpy(&bytes, given + 16 + 2 * t, sizeof bytes);
    fresh.bytes = bytes;
    fresh.rows = given[48 + t];
    if (fresh.rows > kRows || fresh.bytes > kBytes || fresh.bytes % 4 != 0)
      fault("a shape beyond a register's");
    all.registers[t] = fresh;
  }
}

inline void release() { tiles() = Tiles(); }

inline void zero(int number) {
  Register& found = tiles().get(number);
  std::memset(found.at, 0, sizeof found.at);
}

// Rows and bytes beyond the configured ones become zero.
inline void load(int number, const void* memory, int64_t stride) {
  Register& found = tiles().get(number);
  std::memset(found.at, 0, sizeof found.at);
  for (int row = 0; row < found.rows; row++)
    std::memcpy(found.at[row], static_cast<const char*>(memory) + row * stride,
                static_cast<size_t>(found.bytes));
}

inline void store(int number, void* memory, int64_t stride) {
  const Register& found = tiles().get(number);
  for (int row = 0; row < found.rows; row++)
    std::memcpy(static_cast<char*>(memory) + row * stride, found.at[row],
                static_cast<size_t>(found.bytes));
}

// sums [rows, columns] += left [rows, steps] x right [steps, columns], in elements of four bytes.
struct Operands {
  Register &sums, &left, &right;
  int rows, columns, steps;
};

inline Operands operands(int sums, int left, int right) {
  if (sums == left || sums == right || left == right) fault("a register given twice");
  Tiles& all = tiles();
  Register &c = all.get(sums), &a = all.get(left), &b = all.get(right);
  if (c.rows != a.rows || c.bytes != b.bytes || a.bytes != 4 * b.rows)
    fault("a product of shapes that do not fit");
  return {c, a, b, c.rows, c.bytes / 4, b.rows};
}

// Registers are no one else's memory: under sanitizers only what is loaded and stored is looked at.
#if defined(__GNUC__) && !defined(__clang__)
#define ONNXPORT_FAST __attribute__((optimize("O3"), no_sanitize("address", "undefined")))
#else
#define ONNXPORT_FAST
#endif

template <class Left>
ONNXPORT_FAST void multiply_bytes(int sums, int left, int right) {
  const Operands of = operands(sums, left, right);
  for (int row = 0; row < of.rows; row++) {
    uint32_t totals[16];  // sums wrap around
    std::memcpy(totals, of.sums.at[row], sizeof totals);
    for (int step = 0; step < of.steps; step++) {
      const auto* quad = reinterpret_cast<const Left*>(of.left.at[row] + 4 * step);
      const auto* columns = reinterpret_cast<const int8_t*>(of.right.at[step]);
      for (int column = 0; column < 16; column++)  // those beyond are not kept
        totals[column] += static_cast<uint32_t>(
            quad[0] * columns[4 * column] + quad[1] * columns[4 * column + 1] +
            quad[2] * columns[4 * column + 2] + quad[3] * columns[4 * column + 3]);
    }
    std::memcpy(of.sums.at[row], totals, static_cast<size_t>(of.columns) * 4);
  }
}

ONNXPORT_FAST inline float flushed(float value) {
  return std::fabs(value) < FLT_MIN ? 0.0f : value;
}

ONNXPORT_FAST inline float from_bfloat16(const uint8_t* at) {
  uint16_t upper;
  std::memcpy(&upper, at, sizeof upper);
  const uint32_t bits = uint32_t{upper} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return flushed(value);
}

// First and second numbers of pairs are summed apart, over all steps, and added at the end.
ONNXPORT_FAST inline void multiply_pairs(int sums, int left, int right) {
  const Operands of = operands(sums, left, right);
  for (int row = 0; row < of.rows; row++) {
    for (int column = 0; column < of.columns; column++) {
      float halves[2] = {0, 0};
      for (int step = 0; step < of.steps; step++)
        for (int i = 0; i < 2; i++)
          halves[i] = flushed(std::fma(from_bfloat16(of.left.at[row] + 4 * step + 2 * i),
                                       from_bfloat16(of.right.at[step] + 4 * column + 2 * i),
                                       halves[i]));
      float total;
      std::memcpy(&total, of.sums.at[row] + 4 * column, sizeof total);
      total = flushed(flushed(total) + flushed(halves[0] + halves[1]));
      std::memcpy(of.sums.at[row] + 4 * column, &total, sizeof total);
    }
  }
}

#ifdef __AVX2__
ONNXPORT_FAST inline __m256i multiply_quads(__m256i sums, __m256i left, __m256i right) {
  uint32_t totals[8];
  uint8_t unsigned_bytes[32];
  int8_t signed_bytes[32];
  std::memcpy(totals, &sums, sizeof totals);
  std::memcpy(unsigned_bytes, &left, sizeof unsigned_bytes);
  std::memcpy(signed_bytes, &right, sizeof signed_bytes);
  for (int i = 0; i < 32; i++)
    totals[i / 4] += static_cast<uint32_t>(int32_t{unsigned_bytes[i]} * signed_bytes[i]);
  __m256i found;
  std::memcpy(&found, totals, sizeof found);
  return found;
}
#endif

}  // namespace onnxport_emulated
}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#undef _mm256_dpbusd_avx_epi32
#define _tile_loadconfig onnxport_emulated::load_configuration
#define _tile_release onnxport_emulated::release
#define _tile_zero onnxport_emulated::zero
#define _tile_loadd(number, memory, stride) \
  onnxport_emulated::load(number, memory, static_cast<int64_t>(stride))
#define _tile_stream_loadd _tile_loadd
#define _tile_stored(number, memory, stride) \
  onnxport_emulated::store(number, memory, static_cast<int64_t>(stride))
#define _tile_dpbssd onnxport_emulated::multiply_bytes<int8_t>
#define _tile_dpbusd onnxport_emulated::multiply_bytes<uint8_t>
#define _tile_dpbf16ps onnxport_emulated::multiply_pairs
#define _mm256_dpbusd_avx_epi32 onnxport_emulated::multiply_quads
