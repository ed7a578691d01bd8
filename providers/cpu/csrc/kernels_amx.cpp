// The kernels for AMX, whose tile registers multiply pairs of bfloat16 and int8; what is neither is
// as on AVX-512. Compiled with those sets' flags: nothing here may run before the processor and the
// operating system have been asked, and nothing here may be shared with other objects.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__AVX512VNNI__)

#include <math.h>

#include "half.h"
#include "vec_avx512.h"

#define ONNXPORT_KERNELS_AMX 1
#define ONNXPORT_KERNELS_NAME "amx"
#include "attention_impl.h"

namespace onnxport {
const Kernels* kernels_amx() { return &kKernels; }
}  // namespace onnxport

#else

#include "kernels.h"

namespace onnxport {
const Kernels* kernels_amx() { return nullptr; }
}  // namespace onnxport

#endif
