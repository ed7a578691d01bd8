#include "pages.h"

#include <new>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>
#endif

namespace onnxport {

#if defined(__linux__)
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
// Address space, of which the system gives a huge page when something is written to it.
constexpr uintptr_t kRegion = uintptr_t{256} << 20;
constexpr uintptr_t kLine = 64;

uintptr_t round_up(uintptr_t value, uintptr_t unit) { return (value + unit - 1) / unit * unit; }

std::mutex region_mutex;
std::weak_ptr<Region> last_region;  // the one with room; it lives as long as what lies in it

}  // namespace

class Region {
 public:
  explicit Region(uintptr_t bytes) : mapped_bytes_(round_up(bytes, kHugePage) + kHugePage) {
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    next_ = round_up(reinterpret_cast<uintptr_t>(mapped_), kHugePage);
    end_ = next_ + mapped_bytes_ - kHugePage;
    madvise(reinterpret_cast<void*>(next_), end_ - next_, MADV_HUGEPAGE);  // a wish
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { munmap(mapped_, mapped_bytes_); }

  // Null where it has no room.
  uint8_t* take(uintptr_t bytes) {
    if (bytes > end_ - next_) return nullptr;
    const uintptr_t taken = next_;
    next_ += round_up(bytes, kLine);  // end_ is at a line, too
    return reinterpret_cast<uint8_t*>(taken);
  }

  // Others may lie here, and live on. A page at an end may be theirs, too.
  void give_back(const uint8_t* data, uintptr_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t begin = round_up(address, kHugePage);
    const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }

 private:
  uintptr_t mapped_bytes_;
  void* mapped_;
  uintptr_t next_, end_;
};

WeightMemory::WeightMemory(size_t bytes) : bytes_(bytes), data_(nullptr) {
  const std::lock_guard<std::mutex> lock(region_mutex);
  region_ = last_region.lock();
  if (region_) data_ = region_->take(bytes);
  if (data_) return;
  region_ = std::make_shared<Region>(std::max<uintptr_t>(kRegion, bytes));
  data_ = region_->take(bytes);
  last_region = region_;
}

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

class Region {
 public:
  explicit Region(size_t bytes)
      : data_(static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{64}))) {}
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { ::operator delete(data_, std::align_val_t{64}); }

  uint8_t* data() const { return data_; }
  void give_back(const uint8_t*, size_t) {}  // with this

 private:
  uint8_t* data_;
};

WeightMemory::WeightMemory(size_t bytes)
    : region_(std::make_shared<Region>(bytes)), bytes_(bytes), data_(region_->data()) {}

void forget_file_pages(const void*, size_t) {}
#endif

WeightMemory::~WeightMemory() { region_->give_back(data_, bytes_); }

}  // namespace onnxport
