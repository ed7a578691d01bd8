// The kernels for AVX-512 with products of bfloat16, and of bytes (VNNI). Compiled with that set's
// flags: nothing here may run before the processor has been asked, and nothing here may be shared with
// other objects.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512BF16__)

#include <math.h>

#include "half.h"
#include "vec_avx512.h"

#define ONNXPORT_KERNELS_NAME "avx512bf16"
#include "attention_impl.h"

namespace onnxport {
const Kernels* kernels_avx512bf16() { return &kKernels; }
}  // namespace onnxport

#else

#include "kernels.h"

namespace onnxport {
const Kernels* kernels_avx512bf16() { return nullptr; }
}  // namespace onnxport

#endif
