// Summaries by what every processor of this kind has: SSE2 on x86-64, NEON on AArch64. Compiled with
// -ffp-contract=off.
#include "summaries.h"

#if defined(__GNUC__)

#include "rows/summary_impl.h"

namespace onnxport {
void summarize_portable(const float* row, int64_t begin, int64_t end, float scale,
                        const float* ahead, const rows::Summary& to) {
  summarize_part(row, begin, end, scale, ahead, to);
}
}  // namespace onnxport

#endif
