// What users of AMX share. Included by files that are compiled for it, and by no others.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

// Of a tile register: 16 rows of 64 bytes.
constexpr int kRegisterRows = 16, kRegisterBytes = 64;

// The shapes of the eight tile registers: whole ones.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfiguration() {
    for (int t = 0; t < 8; t++) {
      rows[t] = kRegisterRows;
      row_bytes[t] = kRegisterBytes;
    }
  }
};

// What the compiler has not written yet is written before tile registers are loaded or configured: it
// does not know that they read memory, or, of the configuration, all of it.
static inline void finish_writes() { __asm__ volatile("" ::: "memory"); }

}  // namespace
