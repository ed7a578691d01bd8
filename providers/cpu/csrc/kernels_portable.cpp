// The kernels in plain C++, for processors that have none of the other sets.
#include "vec_portable.h"

#define ONNXPORT_KERNELS_NAME "portable"
#include "attention_impl.h"

namespace onnxport {
const Kernels* kernels_portable() { return &kKernels; }
}  // namespace onnxport
