// The kernels for AVX2. Compiled with that set's flags: nothing here may run before the processor
// has been asked, and nothing here may be shared with other objects.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <math.h>

#include "half.h"
#include "vec_avx2.h"

#define ONNXPORT_KERNELS_NAME "avx2"
#include "attention_impl.h"

namespace onnxport {
const Kernels* kernels_avx2() { return &kKernels; }
}  // namespace onnxport

#else

#include "kernels.h"

namespace onnxport {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace onnxport

#endif
