#include "driver.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace onnxport::cuda {
namespace {

#if defined(_WIN32)
constexpr const char* kName = "nvcuda.dll";
void* open_library(const char* name) { return LoadLibraryA(name); }
std::string why_not_opened() { return "error " + std::to_string(GetLastError()); }
void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}
#else
constexpr const char* kName = "libcuda.so.1";
void* open_library(const char* name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }
std::string why_not_opened() {
  const char* words = dlerror();
  return words ? words : "no reason is given";
}
void* find_symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

const char* stand_in() {
  const char* name = std::getenv("ONNXPORT_CUDA_DRIVER");
  return name && *name ? name : nullptr;
}

// A module in a context.
struct Loaded {
  Context* context;
  std::string image;
  void* module;
};

}  // namespace

bool is_stand_in() { return stand_in() != nullptr; }

const Driver& Driver::get() {
  static const Driver driver;
  return driver;
}

Driver::Driver() {
  const char* name = stand_in() ? stand_in() : kName;
  library_ = open_library(name);
  if (!library_)
    throw std::runtime_error("NVIDIA's driver cannot be loaded: " + why_not_opened());
  context_ = reinterpret_cast<decltype(context_)>(symbol("cuCtxGetCurrent"));
  load_ = reinterpret_cast<decltype(load_)>(symbol("cuModuleLoadData"));
  find_ = reinterpret_cast<decltype(find_)>(symbol("cuModuleGetFunction"));
  launch_ = reinterpret_cast<decltype(launch_)>(symbol("cuLaunchKernel"));
  describe_ = reinterpret_cast<decltype(describe_)>(symbol("cuGetErrorString"));
}

void* Driver::symbol(const char* name) const {
  void* found = find_symbol(library_, name);
  if (!found) throw std::runtime_error(std::string("NVIDIA's driver has no ") + name);
  return found;
}

void Driver::check(int status, const char* doing) const {
  if (!status) return;
  const char* words = nullptr;
  describe_(status, &words);
  throw std::runtime_error(std::string("NVIDIA's driver: ") + doing + ": " +
                           (words ? words : "unknown error") + " (" + std::to_string(status) + ")");
}

Context* Driver::context() const {
  Context* current = nullptr;
  check(context_(&current), "asking for the context");
  return current;
}

Function* Driver::function(const void* image, size_t size, const char* name) const {
  static std::mutex mutex;
  static std::vector<Loaded> all;
  const std::lock_guard<std::mutex> lock(mutex);
  Context* current = context();
  if (!current) throw std::runtime_error("this thread has no CUDA context to load a kernel in");
  void* module = nullptr;
  for (const Loaded& one : all)
    if (one.context == current && one.image.size() == size &&
        std::memcmp(one.image.data(), image, size) == 0)
      module = one.module;
  if (!module) {
    check(load_(&module, image), "loading a compiled kernel");
    all.push_back(Loaded{current, std::string(static_cast<const char*>(image), size), module});
  }
  Function* found = nullptr;
  check(find_(&found, module, name), "looking for a kernel");
  return found;
}

void Driver::launch(Function* function, unsigned int blocks_x, unsigned int blocks_y,
                    unsigned int threads, unsigned int shared_bytes, Stream* stream,
                    void** arguments) const {
  check(launch_(function, blocks_x, blocks_y, 1, threads, 1, 1, shared_bytes, stream, arguments,
                nullptr),
        "starting a kernel");
}

}  // namespace onnxport::cuda
