// Memory that a computation works in.
#pragma once

#include <cstddef>
#include <new>

namespace onnxport {

// Grows, keeps its memory between calls, and starts at a cache line.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }

  // Room for so many values, not initialized. What was there before is lost if it has to grow.
  template <class T>
  T* reserve(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes > bytes_) {
      release();
      data_ = ::operator new(bytes, kAlignment);
      bytes_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void release() {
    ::operator delete(data_, kAlignment);
    data_ = nullptr;
    bytes_ = 0;
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace onnxport
