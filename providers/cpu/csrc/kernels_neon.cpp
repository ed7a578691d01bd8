// The kernels for AArch64's NEON, which every such processor has.
#if defined(__aarch64__) || defined(_M_ARM64)

#include <math.h>

#include "half.h"
#include "vec_neon.h"

#define ONNXPORT_KERNELS_NAME "neon"
#include "attention_impl.h"

namespace onnxport {
const Kernels* kernels_neon() { return &kKernels; }
}  // namespace onnxport

#else

#include "kernels.h"

namespace onnxport {
const Kernels* kernels_neon() { return nullptr; }
}  // namespace onnxport

#endif
