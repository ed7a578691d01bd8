// Products for AVX-512 VNNI. Compiled with that set's flags: nothing here may run before the
// processor has been asked, and nothing here may be shared with other objects.
#include "matmul.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include "matmul_vec_avx512.h"

#include "matmul_one_impl.h"

namespace onnxport {
namespace {
// On a Zen 4 with so many rows a head of 2048 inputs takes as long either way, one of 896 with 16.
constexpr int64_t kMostCoarseRows = 12;

constexpr MatMulKernels kKernels = {"avx512vnni", kChunkRows, rows_of_units<1>, quantize,
                                    multiply_dots_or_one<Dot>, multiply_half<Dot>, kMostCoarseRows,
                                    scale_outputs, summarize_avx512, Vec::kStreams};
}  // namespace

const MatMulKernels* matmul_avx512vnni() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_avx512vnni() { return nullptr; }
}  // namespace onnxport

#endif
