// The plain C entry points, for ctypes: choosing an instruction set and running without
// ONNX Runtime.
#include <cstdio>
#include <new>

#include "add_lora.h"
#include "coarse.h"
#include "kernels.h"
#include "matmul.h"
#include "pages.h"
#include "shared_weights.h"

#if defined(_WIN32)
#define ONNXPORT_EXPORT extern "C" __declspec(dllexport)
#else
#define ONNXPORT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The name of the instruction set in use: see library.isa() in Python.
ONNXPORT_EXPORT const char* onnxport_cpu_isa() { return onnxport::active_kernels()->name; }

// 1 if that set multiplies a cache of bfloat16 in the paired layout faster than one of float.
ONNXPORT_EXPORT int onnxport_cpu_prefers_pairs() {
  return onnxport::active_kernels()->prefers_pairs;
}

// 1 if that set converts float16 with instructions.
ONNXPORT_EXPORT int onnxport_cpu_converts_half() {
  return onnxport::active_kernels()->converts_half;
}

// Uses another instruction set from the next call on, or the best one again for null. Returns 0 if
// the name is unknown or this processor lacks it.
ONNXPORT_EXPORT int onnxport_cpu_set_isa(const char* name) { return onnxport::set_isa(name); }

// The instruction set of products with quantized weights, "amx", "avx512vnni", "avxvnni", "avx2",
// "i8mm" or "dotprod"; null if this processor has none, and onnxport.MatMulNBits cannot run.
ONNXPORT_EXPORT const char* onnxport_cpu_matmul_isa() {
  const onnxport::MatMulKernels* kernels = onnxport::active_matmul();
  return kernels ? kernels->name : nullptr;
}

// As onnxport_cpu_set_isa.
ONNXPORT_EXPORT int onnxport_cpu_set_matmul_isa(const char* name) {
  return onnxport::set_matmul_isa(name);
}

// 1 if that set summarizes outputs, see summaries.h.
ONNXPORT_EXPORT int onnxport_cpu_summarizes() {
  const onnxport::MatMulKernels* kernels = onnxport::active_matmul();
  return kernels && kernels->summarize;
}

// Makes one more huge page of the small ones that weights lie on; returns how many are left.
ONNXPORT_EXPORT int64_t onnxport_cpu_settle() { return onnxport::settle(); }

// How many huge pages weights could have instead of small ones.
ONNXPORT_EXPORT int64_t onnxport_cpu_unsettled_pages() { return onnxport::unsettled_pages(); }

// Bytes of weights, packed or made of packed ones, that all sessions together keep.
ONNXPORT_EXPORT int64_t onnxport_cpu_weight_memory_bytes() {
  return onnxport::weight_memory_bytes();
}

// How many panels of 32 outputs were packed to see whether others have the same weights.
ONNXPORT_EXPORT int64_t onnxport_cpu_num_compared_panels() {
  return onnxport::num_compared_panels();
}

// How many parts are missing of the four bits of weights that some products read first, and calls
// have begun to keep; -1: none has begun.
ONNXPORT_EXPORT int64_t onnxport_cpu_plane_parts_left() { return onnxport::plane_parts_left(); }

// Makes one of these parts; 0: there is none to make.
ONNXPORT_EXPORT int onnxport_cpu_make_plane_part() { return onnxport::make_plane_part(); }

// For tests: the time of a huge page that is slow. Returns what it was.
ONNXPORT_EXPORT int64_t onnxport_cpu_set_slow_page_ns(int64_t slow_ns) {
  return onnxport::set_slow_page_ns(slow_ns);
}

// How many threads sessions have; 0: as many as there are processors.
ONNXPORT_EXPORT void onnxport_cpu_set_session_threads(int64_t threads) {
  onnxport::set_session_threads(threads);
}

// For tests: floats of the parts of sequences whose keys are divided. Returns what it was.
ONNXPORT_EXPORT int64_t onnxport_cpu_set_most_state_floats(int64_t floats) {
  return onnxport::set_most_state_floats(floats);
}

// Size of the Problem structure, so that a caller can check its own declaration of it.
ONNXPORT_EXPORT size_t onnxport_cpu_problem_size() { return sizeof(onnxport::Problem); }

// Validates and runs one problem. Returns 0, or writes why not into message and returns 1; a
// failing parallel_for's own result is handed back.
ONNXPORT_EXPORT int onnxport_cpu_paged_attention(const onnxport::Problem* problem, char* message,
                                                 size_t message_size) {
  if (!onnxport::validate(*problem, message, message_size)) return 1;
  try {
    return onnxport::run_attention(*problem);
  } catch (const std::bad_alloc&) {
    std::snprintf(message, message_size, "out of memory");
    return 1;
  }
}

// Adds what adapters do, see add_lora.h, for the operator that OpenVINO runs. Returns 0, or writes
// why not into message and returns 1; a failing parallel_for's own result is handed back.
ONNXPORT_EXPORT int onnxport_cpu_add_lora(const onnxport::AddLoraCall* call, char* message,
                                          size_t message_size) {
  try {
    onnxport::check_node(*call->node);
    return onnxport::add_lora(*call);
  } catch (const std::exception& error) {
    std::snprintf(message, message_size, "%s", error.what());
    return 1;
  }
}
