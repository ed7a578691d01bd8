// Products for AArch64 processors with dot products of int8. Compiled with that set's flags:
// nothing here may run before the processor has been asked, and nothing here may be shared with
// other objects.
#include "matmul.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

#include "matmul_vec_neon.h"

#include "matmul_impl.h"

namespace onnxport {
namespace {
constexpr MatMulKernels kKernels = {"dotprod", kChunkRows, rows_of_units<1>, quantize,
                                    multiply_dots<Dot>, multiply_half<Dot>, kCoarseRows,
                                    scale_outputs, summarize_portable};
}  // namespace

const MatMulKernels* matmul_dotprod() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_dotprod() { return nullptr; }
}  // namespace onnxport

#endif
