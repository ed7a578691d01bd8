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

// Bytes of all weight memory that there is. From any thread.
int64_t weight_memory_bytes();

// Where a huge page takes longer to get than so much of a thread's time, three times in a row, what
// follows in its region has small pages at first: on a virtual machine whose host took free memory
// back, which it does in large pieces, each huge page is made anew there, while small ones come from
// what is left over. Reading small pages is slower, so settle() makes them huge later.
// The time is for tests to change; returns what it was.
int64_t set_slow_page_ns(int64_t slow_ns);

// Makes one huge page of small ones, which are in use meanwhile: some milliseconds, in which who
// reads them waits. Returns how many there are left. From any thread.
int64_t settle();

// What settle() would find. From any thread.
int64_t unsettled_pages();

// Whether all of a range that is in memory are a file's contents, as they are there. False where that
// is not known.
bool are_file_pages(const void* data, size_t bytes);

// Takes the whole pages of a range out of this process's memory if they hold a file's contents and
// nothing else, so that they can be read again. Where that is not known, does nothing.
void forget_file_pages(const void* data, size_t bytes);

}  // namespace onnxport
