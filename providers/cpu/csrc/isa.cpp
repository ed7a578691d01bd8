// Which kernels this processor can run, and which are in use.
#include <atomic>
#include <cstring>

#include "kernels.h"
#include "matmul.h"

#if defined(__x86_64__) || defined(_M_X64)
#define ONNXPORT_X86 1
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace onnxport {
namespace {

struct Features {
  bool avx2 = false;     // with FMA and F16C
  bool avxvnni = false;  // AVX2 with VNNI
  bool avx512 = false;   // F, BW, DQ, VL
  bool bf16 = false;     // AVX-512 with products of bfloat16
  bool vnni = false;     // AVX-512 with VNNI
  bool amx = false;      // with both, tiles of int8 and of bfloat16, and products of bit matrices
  bool dotprod = false;  // Arm's dot products of int8
  bool i8mm = false;     // and its products of matrices of int8
};

#ifdef ONNXPORT_X86
void cpuid(unsigned leaf, unsigned out[4], unsigned part = 0) {
#if defined(_MSC_VER)
  __cpuidex(reinterpret_cast<int*>(out), static_cast<int>(leaf), static_cast<int>(part));
#else
  __cpuid_count(leaf, part, out[0], out[1], out[2], out[3]);
#endif
}

// Register sets that the operating system saves: the processor's word alone is not enough.
unsigned long long enabled_state() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
#endif
}

// Whether this process may use the tile registers. Linux reserves memory for them on request.
bool may_use_tiles(unsigned long long state) {
  constexpr unsigned long long kTileState = 0x60000;
  if ((state & kTileState) != kTileState) return false;
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return true;
#endif
}

Features detect() {
  Features found;
  unsigned r[4];
  cpuid(0, r);
  if (r[0] < 7) return found;
  cpuid(1, r);
  const bool osxsave = r[2] >> 27 & 1, avx = r[2] >> 28 & 1;
  const bool fma = r[2] >> 12 & 1, f16c = r[2] >> 29 & 1;
  if (!osxsave || !avx) return found;
  const unsigned long long state = enabled_state();
  cpuid(7, r);
  const unsigned last_part = r[0], b = r[1], c = r[2], d = r[3];
  found.avx2 = (state & 0x6) == 0x6 && fma && f16c && (b >> 5 & 1);
  found.avx512 = found.avx2 && (state & 0xe6) == 0xe6 && (b >> 16 & 1) && (b >> 17 & 1) &&
                 (b >> 30 & 1) && (b >> 31 & 1);
  found.vnni = found.avx512 && (c >> 11 & 1);
  const bool has_tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
  const bool has_bit_matrices = c >> 8 & 1;
  if (last_part >= 1) cpuid(7, r, 1);
  found.avxvnni = found.avx2 && last_part >= 1 && (r[0] >> 4 & 1);
  // with VNNI, as every processor so far has it
  found.bf16 = found.vnni && last_part >= 1 && (r[0] >> 5 & 1);
  found.amx = found.bf16 && has_tiles && has_bit_matrices && may_use_tiles(state);
#ifdef ONNXPORT_EMULATE  // what these sets have besides is computed by others
  found.avxvnni = found.avx2;
  found.amx = found.bf16 && has_bit_matrices;
#endif
  return found;
}
#elif defined(__aarch64__) && defined(__linux__)
// The kernel's numbers, which older headers lack.
Features detect() {
  constexpr unsigned long kDotProducts = 1ul << 20, kMatrixProducts = 1ul << 13;
  Features found;
  found.dotprod = getauxval(AT_HWCAP) & kDotProducts;
  found.i8mm = found.dotprod && (getauxval(AT_HWCAP2) & kMatrixProducts);
  return found;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

Features detect() {
  Features found;
  found.dotprod = has("hw.optional.arm.FEAT_DotProd");
  found.i8mm = found.dotprod && has("hw.optional.arm.FEAT_I8MM");
  return found;
}
#else
Features detect() { return {}; }
#endif

const Features& features() {
  static const Features found = detect();
  return found;
}

// Best first.
constexpr int kSets = 6;

const Kernels* supported(int i) {
  switch (i) {
    case 0: return features().amx ? kernels_amx() : nullptr;
    case 1: return features().bf16 ? kernels_avx512bf16() : nullptr;
    case 2: return features().avx512 ? kernels_avx512() : nullptr;
    case 3: return features().avx2 ? kernels_avx2() : nullptr;
    case 4: return kernels_neon();
    default: return kernels_portable();
  }
}

const Kernels* best() {
  for (int i = 0; i < kSets; i++)
    if (const Kernels* kernels = supported(i)) return kernels;
  return kernels_portable();
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> kernels{best()};
  return kernels;
}

// Best first.
constexpr int kMatMulSets = 6;

const MatMulKernels* supported_matmul(int i) {
  switch (i) {
    case 0: return features().amx ? matmul_amx() : nullptr;
    case 1: return features().vnni ? matmul_avx512vnni() : nullptr;
    case 2: return features().avxvnni ? matmul_avxvnni() : nullptr;
    case 3: return features().avx2 ? matmul_avx2() : nullptr;
    case 4: return features().i8mm ? matmul_i8mm() : nullptr;
    default: return features().dotprod ? matmul_dotprod() : nullptr;
  }
}

const MatMulKernels* best_matmul() {
  for (int i = 0; i < kMatMulSets; i++)
    if (const MatMulKernels* kernels = supported_matmul(i)) return kernels;
  return nullptr;
}

std::atomic<const MatMulKernels*>& active_matmul_slot() {
  static std::atomic<const MatMulKernels*> kernels{best_matmul()};
  return kernels;
}

}  // namespace

const Kernels* active_kernels() { return active().load(std::memory_order_acquire); }

bool set_isa(const char* name) {
  if (!name) {
    active().store(best(), std::memory_order_release);
    return true;
  }
  for (int i = 0; i < kSets; i++) {
    const Kernels* kernels = supported(i);
    if (!kernels || std::strcmp(kernels->name, name) != 0) continue;
    active().store(kernels, std::memory_order_release);
    return true;
  }
  return false;
}

const MatMulKernels* active_matmul() {
  return active_matmul_slot().load(std::memory_order_acquire);
}

bool set_matmul_isa(const char* name) {
  if (!name) {
    active_matmul_slot().store(best_matmul(), std::memory_order_release);
    return true;
  }
  for (int i = 0; i < kMatMulSets; i++) {
    const MatMulKernels* kernels = supported_matmul(i);
    if (!kernels || std::strcmp(kernels->name, name) != 0) continue;
    active_matmul_slot().store(kernels, std::memory_order_release);
    return true;
  }
  return false;
}

}  // namespace onnxport
