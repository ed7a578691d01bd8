// Products for AArch64 processors that multiply matrices of int8, two rows by two outputs at once; a
// single row goes by dot products. Compiled with that set's flags: nothing here may run before the
// processor has been asked, and nothing here may be shared with other objects.
#include "matmul.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)

#include "matmul_vec_neon.h"

#include "matmul_impl.h"

namespace onnxport {
namespace {

void multiply(const MatMul& m, const Part& part) {
  if (m.rows == 1)
    multiply_dots<Dot>(m, part);
  else
    multiply_dots<PairDot>(m, part);
}

void multiply_half_panel(const MatMul& m, const Part& part) {
  if (m.rows == 1)
    multiply_half<Dot>(m, part);
  else
    multiply_half<PairDot>(m, part);
}

int64_t row_unit(int64_t rows) { return rows == 1 ? 1 : PairDot<Numbers::kInt4>::kRows; }

constexpr MatMulKernels kKernels = {"i8mm", kChunkRows, rows_of_units<PairDot<Numbers::kInt4>::kRows>,
                                    quantize, multiply, multiply_half_panel, kCoarseRows, scale_outputs,
                                    summarize_portable, 1, nullptr, row_unit};

}  // namespace

const MatMulKernels* matmul_i8mm() { return &kKernels; }
}  // namespace onnxport

#else

namespace onnxport {
const MatMulKernels* matmul_i8mm() { return nullptr; }
}  // namespace onnxport

#endif
