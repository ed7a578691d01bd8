// Products for AVX-512 VNNI. Compiled with that set's flags: nothing here may run before the
// processor has been asked, and nothing here may be shared with other objects.
#include "matmul.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include "matmul_vec_avx512.h"

#include "matmul_one_impl.h"

namespace onnxport {
namespace {
constexpr MatMulKernels kKernels = {"avx512vnni", kChunkRows, rows_of_tile<1>, quantize,
                                    multiply_dots_or_one<Dot>, kCoarseRows, scale_outputs, summarize_avx512,
                                    Vec::kStreams};
}  // namespace

const MatMulKernels* matmul_avx512vnni() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_avx512vnni() { return nullptr; }
}  // namespace onnxport

#endif
