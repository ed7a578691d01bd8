#include "pages.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>
#endif

namespace onnxport {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

WeightMemory::WeightMemory(size_t bytes)
    : alignment_{bytes >= kHugePage ? kHugePage : 64},
      data_(static_cast<uint8_t*>(::operator new(bytes, alignment_))) {
#if defined(__linux__)
  if (bytes >= kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);  // a wish
#endif
}

#if defined(__linux__)
namespace {

// Whether every page there is, of count pages from this one on, is a file's or shared: what its
// entry in /proc/self/pagemap says. A page that was written to is neither, nor is one in the swap.
bool all_are_files(uintptr_t page, size_t count) {
  constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62,
                     kFile = uint64_t{1} << 61;
  const int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (map < 0) return false;
  std::vector<uint64_t> entries(count);
  const size_t bytes = count * sizeof(uint64_t);
  const ssize_t got =
      pread(map, entries.data(), bytes, static_cast<off_t>(page * sizeof(uint64_t)));
  close(map);
  return got == static_cast<ssize_t>(bytes) &&
         std::all_of(entries.begin(), entries.end(), [](uint64_t entry) {
           return !(entry & kSwapped) && (!(entry & kPresent) || (entry & kFile));
         });
}

}  // namespace

void forget_file_pages(const void* data, size_t bytes) {
  const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (address + size - 1) / size, last = (address + bytes) / size;
  if (first >= last || !all_are_files(first, last - first)) return;
  madvise(reinterpret_cast<void*>(first * size), (last - first) * size, MADV_DONTNEED);
}
#else
void forget_file_pages(const void*, size_t) {}
#endif

}  // namespace onnxport
