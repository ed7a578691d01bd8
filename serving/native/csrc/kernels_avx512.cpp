// The passes for AVX-512. Compiled with that set's flags: nothing here may run before the processor
// has been asked, and nothing here may be shared with other objects.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#define ONNXPORT_KERNELS_NAME "avx512"
#include "kernels_impl.h"

namespace onnxport {
const Kernels* kernels_avx512() { return &kKernels; }
}  // namespace onnxport

#else

#include "kernels.h"

namespace onnxport {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace onnxport

#endif
