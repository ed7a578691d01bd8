// Which passes this processor can run.
#include <string.h>

#include "kernels.h"

namespace onnxport {
namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace

const Kernels* find_kernels(const char* name) {
  const Kernels* best_first[] = {has_avx512() ? kernels_avx512() : nullptr,
                                 has_avx2() ? kernels_avx2() : nullptr, kernels_portable()};
  for (const Kernels* kernels : best_first)
    if (kernels && (!name || strcmp(kernels->name, name) == 0)) return kernels;
  return nullptr;
}

}  // namespace onnxport
