// The passes for what every processor of this kind has: SSE2 on x86-64, NEON on AArch64.
#define ONNXPORT_KERNELS_NAME "portable"
#include "kernels_impl.h"

namespace onnxport {
const Kernels* kernels_portable() { return &kKernels; }
}  // namespace onnxport
