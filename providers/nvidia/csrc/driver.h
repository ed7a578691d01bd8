// NVIDIA's driver, as much of it as starts a kernel: loaded when it is first needed, for a machine
// without a GPU has none. Free of ONNX Runtime.
#pragma once

#include <cstddef>

namespace onnxport::cuda {

// Opaque to us.
struct Context;
struct Function;
struct Stream;

// Throws std::runtime_error with the driver's own words where it refuses something, or is not there.
// The context is that of the calling thread.
class Driver {
 public:
  // The one of this process. The environment variable ONNXPORT_CUDA_DRIVER names another library, with
  // which tests stand in for it.
  static const Driver& get();

  // The calling thread's; null: it has none.
  Context* context() const;

  // A function of a compiled module, which is loaded once for each context and is never unloaded.
  Function* function(const void* image, size_t size, const char* name) const;

  void launch(Function* function, unsigned int blocks_x, unsigned int blocks_y, unsigned int threads,
              unsigned int shared_bytes, Stream* stream, void** arguments) const;

 private:
  Driver();
  void* symbol(const char* name) const;
  void check(int status, const char* doing) const;

  void* library_;
  int (*context_)(Context**);
  int (*load_)(void**, const void*);
  int (*find_)(Function**, void*, const char*);
  int (*launch_)(Function*, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                 unsigned int, unsigned int, Stream*, void**, void**);
  int (*describe_)(int, const char**);
};

// Whether something stands in for the driver, and host memory for a device's.
bool is_stand_in();

}  // namespace onnxport::cuda
