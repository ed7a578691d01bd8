// The part of ONNX Runtime's C ABI that a custom operator needs, by slot number: its header is in
// no wheel, and the function table only ever grows at its end. Slots are those of OrtApi in
// onnxruntime_c_api.h; kApiVersion is the oldest release that has all of them, and kLayoutVersion
// the one whose OrtCustomOp is declared here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxport::ort {

#if defined(_WIN32)
#define ONNXPORT_ORT_CALL __stdcall
#else
#define ONNXPORT_ORT_CALL
#endif

constexpr uint32_t kApiVersion = 24, kLayoutVersion = 18;

// Opaque to us.
struct Status;
struct Value;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct CustomOpDomain;
struct ShapeInferContext;

enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kDouble = 11,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kBFloat16 = 16,
  kFloat8E4M3FN = 17,
};

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

struct Api {
  const void* const* table;

  template <class Function>
  Function slot(int index) const {
    return reinterpret_cast<Function>(const_cast<void*>(table[index]));
  }

  Status* create_status(ErrorCode code, const char* message) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(int, const char*)>(0)(code, message);
  }
  Status* create_domain(const char* name, CustomOpDomain** out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const char*, CustomOpDomain**)>(26)(name, out);
  }
  Status* add_operator(CustomOpDomain* domain, const struct CustomOp* op) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(CustomOpDomain*, const CustomOp*)>(27)(domain, op);
  }
  Status* add_domain(SessionOptions* options, CustomOpDomain* domain) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(SessionOptions*, CustomOpDomain*)>(28)(options, domain);
  }
  Status* mutable_data(Value* value, void** out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(Value*, void**)>(51)(value, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, float* out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelInfo*, const char*, float*)>(85)(info, name,
                                                                                         out);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelInfo*, const char*, int64_t*)>(86)(
        info, name, out);
  }
  // size counts the terminating zero: capacity on entry, length on return.
  Status* attribute(const KernelInfo* info, const char* name, char* out, size_t* size) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelInfo*, const char*, char*, size_t*)>(87)(
        info, name, out, size);
  }
  Status* input_count(const KernelContext* context, size_t* out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelContext*, size_t*)>(88)(context, out);
  }
  Status* output_count(const KernelContext* context, size_t* out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelContext*, size_t*)>(89)(context, out);
  }
  Status* input(const KernelContext* context, size_t index, const Value** out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelContext*, size_t, const Value**)>(90)(
        context, index, out);
  }
  Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t rank,
                 Value** out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(KernelContext*, size_t, const int64_t*, size_t,
                                            Value**)>(91)(context, index, dims, rank, out);
  }
  void release(Status* status) const { slot<void(ONNXPORT_ORT_CALL*)(Status*)>(93)(status); }
  // What a device runs the node on: a cudaStream_t of the CUDA execution provider, null on the CPU.
  Status* compute_stream(const KernelContext* context, void** out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelContext*, void**)>(193)(context, out);
  }
  // constant is 0, and out null, unless the input is an initializer that cannot change.
  Status* constant_input(const KernelInfo* info, size_t index, int* constant,
                         const Value** out) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelInfo*, size_t, int*, const Value**)>(249)(
        info, index, constant, out);
  }
  // Runs on the session's own threads; batches = 0 lets it divide the work.
  Status* parallel_for(const KernelContext* context, void(ONNXPORT_ORT_CALL* task)(void*, size_t),
                       size_t count, size_t batches, void* argument) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const KernelContext*,
                                            void(ONNXPORT_ORT_CALL*)(void*, size_t), size_t, size_t,
                                            void*)>(274)(context, task, count, batches, argument);
  }
  // A tensor's type and its own dimensions: nothing to release, and nothing is allocated.
  Status* shape(const Value* value, int* type, const int64_t** dims, size_t* rank) const {
    return slot<Status*(ONNXPORT_ORT_CALL*)(const Value*, int*, const int64_t**, size_t*)>(414)(
        value, type, dims, rank);
  }
};

// The first member of OrtApiBase; returns null for a version newer than the runtime.
struct ApiBase {
  const void* const*(ONNXPORT_ORT_CALL* get_api)(uint32_t version);
};

// OrtCustomOp, in its members' order.
struct CustomOp {
  uint32_t version;
  void*(ONNXPORT_ORT_CALL* create_kernel_v1)(const CustomOp*, const void*, const KernelInfo*);
  const char*(ONNXPORT_ORT_CALL* name)(const CustomOp*);
  const char*(ONNXPORT_ORT_CALL* execution_provider)(const CustomOp*);
  int(ONNXPORT_ORT_CALL* input_type)(const CustomOp*, size_t);
  size_t(ONNXPORT_ORT_CALL* input_type_count)(const CustomOp*);
  int(ONNXPORT_ORT_CALL* output_type)(const CustomOp*, size_t);
  size_t(ONNXPORT_ORT_CALL* output_type_count)(const CustomOp*);
  void(ONNXPORT_ORT_CALL* compute_v1)(void*, KernelContext*);
  void(ONNXPORT_ORT_CALL* destroy_kernel)(void*);
  int(ONNXPORT_ORT_CALL* input_characteristic)(const CustomOp*, size_t);
  int(ONNXPORT_ORT_CALL* output_characteristic)(const CustomOp*, size_t);
  int(ONNXPORT_ORT_CALL* input_memory_type)(const CustomOp*, size_t);
  int(ONNXPORT_ORT_CALL* variadic_input_min_arity)(const CustomOp*);
  int(ONNXPORT_ORT_CALL* variadic_input_homogeneity)(const CustomOp*);
  int(ONNXPORT_ORT_CALL* variadic_output_min_arity)(const CustomOp*);
  int(ONNXPORT_ORT_CALL* variadic_output_homogeneity)(const CustomOp*);
  Status*(ONNXPORT_ORT_CALL* create_kernel)(const CustomOp*, const void* const*, const KernelInfo*,
                                            void**);
  Status*(ONNXPORT_ORT_CALL* compute)(void*, KernelContext*);
  Status*(ONNXPORT_ORT_CALL* infer_output_shape)(const CustomOp*, ShapeInferContext*);
  int(ONNXPORT_ORT_CALL* start_version)(const CustomOp*);
  int(ONNXPORT_ORT_CALL* end_version)(const CustomOp*);
  size_t(ONNXPORT_ORT_CALL* may_inplace)(int** inputs, int** outputs);
  void(ONNXPORT_ORT_CALL* release_may_inplace)(int* inputs, int* outputs);
  size_t(ONNXPORT_ORT_CALL* alias_map)(int** inputs, int** outputs);
  void(ONNXPORT_ORT_CALL* release_alias_map)(int* inputs, int* outputs);
};

}  // namespace onnxport::ort
