// The passes for AVX2. Compiled with that set's flags: nothing here may run before the processor
// has been asked, and nothing here may be shared with other objects.
#if defined(__AVX2__)

#define ONNXPORT_KERNELS_NAME "avx2"
#include "kernels_impl.h"

namespace onnxport {
const Kernels* kernels_avx2() { return &kKernels; }
}  // namespace onnxport

#else

#include "kernels.h"

namespace onnxport {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace onnxport

#endif
