// Takes and frees memory of weights; test_pages.py reads what it prints.
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "pages.h"

namespace {

using onnxport::WeightMemory;

constexpr size_t kMiB = size_t{1} << 20;

struct Tensor {
  WeightMemory memory;
  size_t bytes;
  int fill;

  Tensor(size_t size, int value) : memory(size), bytes(size), fill(value) {
    std::memset(memory.data(), fill, bytes);
  }
  bool whole() const {
    for (size_t i = 0; i < bytes; i++)
      if (memory.data()[i] != fill) return false;
    return reinterpret_cast<uintptr_t>(memory.data()) % 64 == 0;
  }
};

using Tensors = std::vector<std::unique_ptr<Tensor>>;

// MiB of this process: anonymous memory there is, and address space.
void print_sizes(const char* when) {
  std::FILE* status = std::fopen("/proc/self/status", "r");
  char line[256];
  long anonymous = 0, space = 0;
  while (std::fgets(line, sizeof line, status)) {
    std::sscanf(line, "RssAnon: %ld", &anonymous);
    std::sscanf(line, "VmSize: %ld", &space);
  }
  std::fclose(status);
  std::printf("%s %ld %ld\n", when, anonymous >> 10, space >> 10);
}

void print_whole(const char* when, const Tensors& tensors) {
  bool whole = true;
  for (const auto& tensor : tensors) whole = whole && (!tensor || tensor->whole());
  std::printf("%s %d\n", when, whole);
}

}  // namespace

int main() {
  print_sizes("before");
  {
    Tensors tensors;
    // Odd sizes, several to a page, larger than a region; 404 MiB in all.
    for (const size_t bytes : {size_t{1}, size_t{0}, 3 * kMiB + 5, size_t{63}, 90 * kMiB, 300 * kMiB,
                               size_t{4097}, 11 * kMiB + 1})
      tensors.push_back(std::make_unique<Tensor>(bytes, static_cast<int>(tensors.size()) + 1));
    print_whole("taken", tensors);
    print_sizes("full");
    tensors[4].reset();  // 90 MiB, between others
    print_whole("left", tensors);
    print_sizes("freed");
  }
  print_sizes("after");
  // Sessions may be made at once.
  std::vector<Tensors> each(8);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < each.size(); i++)
    threads.emplace_back([&each, i] {
      for (int j = 0; j < 200; j++)
        each[i].push_back(std::make_unique<Tensor>(1000 + 37 * j, static_cast<int>(i)));
    });
  for (std::thread& thread : threads) thread.join();
  for (const Tensors& tensors : each) print_whole("threads", tensors);
  return 0;
}
