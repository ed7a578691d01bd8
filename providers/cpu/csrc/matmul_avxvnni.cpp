// Products for AVX-VNNI, the 256 bits of VNNI that processors without AVX-512 have. Compiled with
// that set's flags: nothing here may run before the processor has been asked, and nothing here may
// be shared with other objects.
#include "matmul.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__AVXVNNI__)

#include "matmul_vec_avx2.h"

#include "matmul_one_impl.h"

namespace onnxport {
namespace {
constexpr MatMulKernels kKernels = {"avxvnni", kChunkRows, rows_of_units<1>, quantize,
                                    multiply_dots_or_one<Dot>, multiply_half<Dot>, kCoarseRows,
                                    scale_outputs, summarize_avx2, Vec::kStreams};
}  // namespace

const MatMulKernels* matmul_avxvnni() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_avxvnni() { return nullptr; }
}  // namespace onnxport

#endif
