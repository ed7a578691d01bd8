// What operators of all devices share: reading inputs, and error reporting by exceptions that end at
// guarded().
#pragma once

#include <exception>
#include <memory>

#include "ort_abi.h"
#include "tensor.h"

// In messages.
#ifndef ONNXPORT_DEVICE
#define ONNXPORT_DEVICE "CPU"
#endif

namespace onnxport::op {

using ort::Api;
using ort::Status;

// Carries an OrtStatus out of nested calls.
struct Failure {
  Status* status;
};

inline void check(Status* status) {
  if (status) throw Failure{status};
}

// Throws a Failure with a formatted message: what was found, what is allowed.
[[noreturn]] void fail(const Api& api, ort::ErrorCode code, const char* format, ...);

// Throws a Failure that calls the value by `name`.
Tensor describe(const Api& api, const char* name, const ort::Value* value);

// An input that may not be there: null.
const ort::Value* optional_input(const Api& api, const ort::KernelContext* context, size_t index);

// Memory of the output 0, which gets the shape of a tensor.
void* open_output(const Api& api, ort::KernelContext* context, const Tensor& shape);

// What all our operators have in common: none of their outputs is an input's memory unless they say
// so. The rest is null.
ort::CustomOp base_operator();

Status* invalid_input(const Api& api, const InvalidInput& error);

// Runs f and turns whatever it throws into a status: no exception crosses the C boundary.
template <class F>
Status* guarded(const Api& api, F f) noexcept {
  try {
    f();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const InvalidInput& invalid) {
    return invalid_input(api, invalid);
  } catch (const std::exception& error) {
    return api.create_status(ort::kFail, error.what());
  } catch (...) {
    return api.create_status(ort::kFail, "onnxport " ONNXPORT_DEVICE " operator: unknown error");
  }
}

// Lets an operator make kernels, whose member `api` is the session's, and run them. Both may throw.
template <class K, std::unique_ptr<K> (*kMake)(const Api&, const ort::KernelInfo*),
          void (*kCompute)(const K&, ort::KernelContext*)>
void set_kernel(ort::CustomOp& op) {
  op.create_kernel = [](const ort::CustomOp*, const void* const* table,
                        const ort::KernelInfo* info, void** out) -> Status* {
    const Api api{table};
    return guarded(api, [&] { *out = kMake(api, info).release(); });
  };
  op.destroy_kernel = [](void* kernel) { delete static_cast<K*>(kernel); };
  op.compute = [](void* state, ort::KernelContext* context) -> Status* {
    const K& kernel = *static_cast<const K*>(state);
    return guarded(kernel.api, [&] { kCompute(kernel, context); });
  };
}

}  // namespace onnxport::op
