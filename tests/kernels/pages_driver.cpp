// Takes and frees memory of weights; test_pages.py reads what it prints.
// With an argument: of pages that took long to get.
#include <atomic>
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

// MiB of this process that lie on huge pages; -1 where Linux has none to give.
long huge() {
  std::FILE* rollup = std::fopen("/proc/self/smaps_rollup", "r");
  char line[256];
  long found = -1;
  while (rollup && std::fgets(line, sizeof line, rollup))
    std::sscanf(line, "AnonHugePages: %ld", &found);
  if (rollup) std::fclose(rollup);
  return found < 0 ? found : found >> 10;
}

// Tensors on small pages, one of which is freed, that become huge while others read them.
void settle_pages() {
  Tensors tensors;
  for (const size_t bytes : {3 * kMiB, 40 * kMiB, 50 * kMiB, 170 * kMiB, 21 * kMiB + 7})
    tensors.push_back(std::make_unique<Tensor>(bytes, static_cast<int>(tensors.size()) + 1));
  std::printf("small %ld %ld\n", static_cast<long>(onnxport::unsettled_pages()), huge());
  tensors[2].reset();
  print_sizes("unsettled");
  std::atomic<bool> is_done{false};
  std::thread reader([&] {
    do print_whole("read", tensors);
    while (!is_done);
  });
  long pages = 0;
  for (long left = onnxport::unsettled_pages(), now; left; left = now) {
    now = static_cast<long>(onnxport::settle());
    pages++;
    if (now >= left) std::printf("none was settled 1 1 1\n");
  }
  is_done = true;
  reader.join();
  std::printf("settled %ld %ld\n", pages, huge());
  print_sizes("huge");
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {  // each page is slow
    onnxport::set_slow_page_ns(-1);
    settle_pages();
    return 0;
  }
  print_sizes("before");
  {
    Tensors tensors;
    // Odd sizes, several to a page, larger than a region; 404 MiB in all.
    for (const size_t bytes : {size_t{1}, size_t{0}, 3 * kMiB + 5, size_t{63}, 90 * kMiB, 300 * kMiB,
                               size_t{4097}, 11 * kMiB + 1})
      tensors.push_back(std::make_unique<Tensor>(bytes, static_cast<int>(tensors.size()) + 1));
    print_whole("taken", tensors);
    print_sizes("full");
    if (onnxport::set_slow_page_ns(1'000'000'000'000) < 1'000'000) std::printf("hasty 1 1 1\n");
    tensors[4].reset();  // 90 MiB, between others
    print_whole("left", tensors);
    print_sizes("freed");
  }
  print_sizes("after");
  {  // Two models in one region, of tensors smaller than a page, the first of which goes.
    Tensors first, second;
    for (int i = 0; i < 400; i++) first.push_back(std::make_unique<Tensor>(100'000, 1));
    for (int i = 0; i < 400; i++) second.push_back(std::make_unique<Tensor>(50'000, 2));
    print_sizes("both");
    while (first.size() > 3) first.erase(first.begin() + static_cast<long>(first.size() / 2));
    print_whole("few", first);
    first.clear();
    print_whole("second", second);
    print_sizes("one");
    second.push_back(std::make_unique<Tensor>(100'000, 3));
    second.erase(second.begin(), second.end() - 1);
    print_whole("last", second);
    print_sizes("none");
  }
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
