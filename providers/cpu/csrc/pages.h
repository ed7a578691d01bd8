// Memory of weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace onnxport {

class Region;

// Memory that is written once and read by every call. Where the system has huge pages, tensors lie
// side by side on them: most of a model's tensors are no multiple of one, and what is left of each
// would be thousands of small pages, to be made one by one and looked up by every step.
class WeightMemory {
 public:
  explicit WeightMemory(size_t bytes);
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;
  ~WeightMemory();

  uint8_t* data() const { return data_; }  // at a cache line

 private:
  std::shared_ptr<Region> region_;
  size_t bytes_;
  uint8_t* data_;
};

// Takes the whole pages of a range out of this process's memory if they hold a file's contents and
// nothing else, so that they can be read again. Where that is not known, does nothing.
void forget_file_pages(const void* data, size_t bytes);

}  // namespace onnxport
