// Arrays that a caller hands over, and what is thrown where they do not fit. Free of ONNX Runtime.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>

namespace onnxport {

constexpr size_t kMaxRank = 4;

// An array in host memory.
struct Tensor {
  void* data = nullptr;  // null: not given
  int64_t dims[kMaxRank] = {};
  size_t rank = 0;

  explicit operator bool() const { return rank != 0; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A call that cannot be computed, or would read or write elsewhere.
class InvalidInput : public std::exception {
 public:
  // Formats a message: what was found, what is allowed.
  InvalidInput(const char* format, va_list arguments) {
    std::vsnprintf(text_, sizeof text_, format, arguments);
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[512];
};

// Throws an InvalidInput with a formatted message.
[[noreturn]] inline void refuse(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const InvalidInput error(format, arguments);
  va_end(arguments);
  throw error;
}

}  // namespace onnxport
