// Products for AVX2. Compiled with that set's flags: nothing here may run before the processor has been
// asked, and nothing here may be shared with other objects.
#include "matmul.h"

#if defined(__AVX2__) && defined(__FMA__)

#include "matmul_vec_avx2.h"
#include "matmul_many_avx2.h"

namespace onnxport {
namespace {
// Four bits take two thirds of the time of eight even where neither waits for memory, until rows
// have too few panels in common that none of them needs.
constexpr int64_t kMostCoarseRows = 16;

void multiply_for_avx2(const MatMul& m, const Part& part) {
  if (!is_for_many(m))
    multiply_dots_or_one<Dot>(m, part);
  else if (m.is_fp4)
    multiply_many<Numbers::kFp4, kPanel>(m, part);
  else
    multiply_many<Numbers::kInt4, kPanel>(m, part);
}

void multiply_half_for_avx2(const MatMul& m, const Part& part) {
  if (is_for_many(m))
    multiply_many<Numbers::kInt4, kHalfPanel>(m, part);
  else
    multiply_half<Dot>(m, part);
}

constexpr MatMulKernels kKernels = {"avx2", kChunkRows, rows_of_units<1>, quantize_for_avx2,
                                    multiply_for_avx2, multiply_half_for_avx2, kMostCoarseRows,
                                    scale_outputs, summarize_avx2, Vec::kStreams};
}  // namespace

const MatMulKernels* matmul_avx2() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_avx2() { return nullptr; }
}  // namespace onnxport

#endif
