// Threads that help with one call, and sleep between calls: the model's own threads run then.
#pragma once

#include <stdint.h>

namespace onnxport {

using Work = void (*)(void* argument);

// Calls work(argument) on this thread, and meanwhile on up to `num_helpers` others, as far as they
// come before this one is done. `work` must be right on any number of threads, and not throw. Any
// number of threads may call it at once; they share the helpers. A forked child has helpers of its
// own.
void run_together(Work work, void* argument, int64_t num_helpers);

}  // namespace onnxport
