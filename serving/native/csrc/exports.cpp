// The plain C entry points, for ctypes.
#include <stddef.h>

#include <new>

#include "pool.h"
#include "request.h"

#define ONNXPORT_EXPORT extern "C" __attribute__((visibility("default")))

using onnxport::Batch;
using onnxport::Kernels;
using onnxport::Request;

namespace {

// Does rows that no other thread has begun, until there are none left.
void run_rows(void* argument) {
  Batch& batch = *static_cast<Batch*>(argument);
  for (;;) {
    const int64_t row = __atomic_fetch_add(&batch.next, 1, __ATOMIC_RELAXED);
    if (row >= batch.num_rows) return;
    Request& request = batch.requests[row];
    try {
      onnxport::sample_row(batch, batch.logits + row * batch.stride, request);
    } catch (const std::bad_alloc&) {
      request.status = onnxport::kOutOfMemory;
    }
  }
}

// Whether a row takes no pass over its logits: then it is done before another thread is awake.
bool is_short(const Batch& batch, int64_t row) {
  const Request& request = batch.requests[row];
  if (!request.greedy || request.has_logprobs || !batch.summaries) return false;
  float* const summary = batch.summaries + row * batch.summary_stride;
  return *onnxport::rows::summary_at(summary, batch.vocab).scale != onnxport::rows::kNothing;
}

}  // namespace

// Sizes of the structures, so that a caller can check its own declarations of them.
ONNXPORT_EXPORT size_t onnxport_sampling_request_size() { return sizeof(Request); }
ONNXPORT_EXPORT size_t onnxport_sampling_batch_size() { return sizeof(Batch); }

// The passes of an instruction set, "avx512", "avx2" or "portable", or of the best one for null;
// null if this processor lacks it.
ONNXPORT_EXPORT const Kernels* onnxport_sampling_kernels(const char* name) {
  return onnxport::find_kernels(name);
}

ONNXPORT_EXPORT const char* onnxport_sampling_name(const Kernels* kernels) { return kernels->name; }

// Summarizes a row as a model may have done, of summary_floats(count): see rows/summary.h.
ONNXPORT_EXPORT void onnxport_sampling_summarize(const Kernels* kernels, const float* row,
                                                 int64_t count, float scale, float* summary) {
  const onnxport::rows::Summary to = onnxport::rows::summary_at(summary, count);
  kernels->summarize(row, count, scale, to);
}

// What this thread wrote before, other threads see before what it writes after.
ONNXPORT_EXPORT void onnxport_sampling_fence() { __atomic_thread_fence(__ATOMIC_RELEASE); }

// Does the rows of a batch on this thread, and on up to `num_threads` in all; a row gets the same
// bits on any of them.
ONNXPORT_EXPORT void onnxport_sampling_run(Batch* batch, int64_t num_threads) {
  int64_t long_rows = 0;
  for (int64_t row = 0; row < batch->num_rows; row++) long_rows += !is_short(*batch, row);
  if (num_threads > long_rows) num_threads = long_rows;
  batch->num_threads = num_threads > 1 ? num_threads : 1;
  onnxport::run_together(run_rows, batch, batch->num_threads - 1);
}
