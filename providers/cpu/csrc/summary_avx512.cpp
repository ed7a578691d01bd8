// Summaries by AVX-512. Compiled with that set's flags and -ffp-contract=off: nothing here may be shared
// with other objects.
#include "summaries.h"

#if defined(__GNUC__) && defined(__AVX512F__) && defined(__AVX512BW__)

#include "rows/summary_impl.h"

namespace onnxport {
void summarize_avx512(const float* row, int64_t begin, int64_t end, float scale,
                      const float* ahead, const rows::Summary& to) {
  summarize_part(row, begin, end, scale, ahead, to);
}
}  // namespace onnxport

#endif
