// Memory of weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace onnxport {

// Memory that is written once and read by every call, on huge pages where the system has them.
class WeightMemory {
 public:
  explicit WeightMemory(size_t bytes);
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;
  ~WeightMemory() { ::operator delete(data_, alignment_); }

  uint8_t* data() const { return data_; }

 private:
  std::align_val_t alignment_;
  uint8_t* data_;
};

// Takes the whole pages of a range out of this process's memory if they hold a file's contents and
// nothing else, so that they can be read again. Where that is not known, does nothing.
void forget_file_pages(const void* data, size_t bytes);

}  // namespace onnxport
