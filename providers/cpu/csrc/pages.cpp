#include "pages.h"

#include <atomic>
#include <new>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>
#endif

namespace onnxport {
namespace {

std::atomic<int64_t> memory_bytes{0};

}  // namespace

#if defined(__linux__)
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
// Address space, of which the system gives a huge page when something is written to it.
constexpr uintptr_t kRegion = uintptr_t{256} << 20;
constexpr uintptr_t kLine = 64;

uintptr_t round_up(uintptr_t value, uintptr_t unit) { return (value + unit - 1) / unit * unit; }

#if defined(MADV_COLLAPSE)
constexpr int kCollapse = MADV_COLLAPSE;
#else
constexpr int kCollapse = 25;
#endif

// Whether small pages can be made huge later: since Linux 6.1. An advice that is not known is an
// error even for nothing.
bool can_settle() {
  static const bool can = madvise(nullptr, 0, kCollapse) == 0;
  return can;
}

// To make 2 MiB of zeros takes a quarter of a millisecond, on slow processors one.
constexpr int64_t kSlowPageNs = 2'000'000;
constexpr int kSlowPages = 3;  // in a row: one may have been interrupted
// One in eight is probed, the first of a tensor among them; those that pack it write to the others.
constexpr uintptr_t kProbeStep = 8 * kHugePage;

std::atomic<int64_t> slow_page_ns{kSlowPageNs};

int64_t thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

struct Regions {
  std::mutex mutex;
  std::weak_ptr<Region> last;  // the one with room; it lives as long as what lies in it
  std::vector<std::weak_ptr<Region>> all;
  int slow_in_row = 0;  // the last pages that were probed, in whichever region
};

// Never destroyed: the thread that makes pages huge may outlive static objects.
Regions& regions() {
  static Regions* instance = new Regions;
  return *instance;
}

}  // namespace

class Region {
 public:
  explicit Region(uintptr_t bytes) : mapped_bytes_(round_up(bytes, kHugePage) + kHugePage) {
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    next_ = round_up(reinterpret_cast<uintptr_t>(mapped_), kHugePage);
    end_ = next_ + mapped_bytes_ - kHugePage;
    small_ = end_;
    live_.resize((end_ - next_) / kHugePage);
    madvise(reinterpret_cast<void*>(next_), end_ - next_, MADV_HUGEPAGE);  // a wish
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { munmap(mapped_, mapped_bytes_); }

  // Null where it has no room.
  uint8_t* take(uintptr_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > end_ - next_) return nullptr;
    const uintptr_t taken = next_;
    next_ += round_up(bytes, kLine);  // end_ is at a line, too
    count(taken, next_, [](uintptr_t& live, uintptr_t part) { live += part; });
    if (small_ == end_ && can_settle()) probe(round_up(taken, kHugePage), taken + bytes);
    return reinterpret_cast<uint8_t*>(taken);
  }

  // Others may lie here, and live on: a page goes with the last of what lies on it.
  void give_back(const uint8_t* data, uintptr_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto begin = reinterpret_cast<uintptr_t>(data);
    const uintptr_t end = begin + round_up(bytes, kLine);
    count(begin, end, [](uintptr_t& live, uintptr_t part) { live -= part; });
    uintptr_t page = begin / kHugePage * kHugePage;
    while (page < end) {
      uintptr_t behind = page;
      while (behind < end && !live_[index(behind)]) behind += kHugePage;
      if (page < behind) madvise(reinterpret_cast<void*>(page), behind - page, MADV_DONTNEED);
      page = behind + kHugePage;
    }
  }

  // Whole small pages that are taken: what takes the rest of the last one may come yet.
  int64_t num_small() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return small_ < next_ ? static_cast<int64_t>((next_ - small_) / kHugePage) : 0;
  }

  // Makes the next ones of these huge, and what is taken later, once there are none left.
  void settle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (small_ + kHugePage <= next_ && !live_[index(small_)]) small_ += kHugePage;
    if (small_ + kHugePage <= next_) {
      const auto page = reinterpret_cast<void*>(small_);
      madvise(page, kHugePage, MADV_HUGEPAGE);
      madvise(page, kHugePage, kCollapse);
      small_ += kHugePage;
    }
    if (small_ + kHugePage <= next_) return;
    madvise(reinterpret_cast<void*>(small_), end_ - small_, MADV_HUGEPAGE);
    small_ = end_;
  }

 private:
  size_t index(uintptr_t page) const { return live_.size() - (end_ - page) / kHugePage; }

  // Has the bytes of a range counted, on each page that it lies on.
  template <typename Change>
  void count(uintptr_t begin, uintptr_t end, const Change& change) {
    while (begin < end) {
      const uintptr_t page = begin / kHugePage * kHugePage;
      const uintptr_t until = std::min(end, page + kHugePage);
      change(live_[index(page)], until - begin);
      begin = until;
    }
  }

  // Writes to some pages of a range that is new, and sees how long that takes. With the mutex of all.
  void probe(uintptr_t begin, uintptr_t end) {
    int& slow_in_row = regions().slow_in_row;
    for (uintptr_t page = begin; page < end; page += slow_in_row ? kHugePage : kProbeStep) {
      const int64_t start = thread_ns();
      *reinterpret_cast<volatile uint8_t*>(page) = 0;
      slow_in_row = thread_ns() - start > slow_page_ns ? slow_in_row + 1 : 0;
      if (slow_in_row < kSlowPages) continue;
      small_ = page + kHugePage;
      if (small_ < end_)
        madvise(reinterpret_cast<void*>(small_), end_ - small_, MADV_NOHUGEPAGE);
      return;
    }
  }

  std::mutex mutex_;
  uintptr_t mapped_bytes_;
  void* mapped_;
  uintptr_t next_, end_;
  uintptr_t small_;  // where small pages begin; end_: there are none
  std::vector<uintptr_t> live_;  // bytes of each huge page that are in use
};

WeightMemory::WeightMemory(size_t bytes) : bytes_(bytes), data_(nullptr) {
  Regions& known = regions();
  const std::lock_guard<std::mutex> lock(known.mutex);
  region_ = known.last.lock();
  if (region_) data_ = region_->take(bytes);
  if (!data_) {
    region_ = std::make_shared<Region>(std::max<uintptr_t>(kRegion, bytes));
    data_ = region_->take(bytes);
    known.last = region_;
    const auto is_gone = [](const std::weak_ptr<Region>& one) { return one.expired(); };
    known.all.erase(std::remove_if(known.all.begin(), known.all.end(), is_gone), known.all.end());
    known.all.push_back(region_);
  }
  memory_bytes += static_cast<int64_t>(bytes);
}

int64_t set_slow_page_ns(int64_t slow_ns) { return slow_page_ns.exchange(slow_ns); }

namespace {

// The regions there are.
std::vector<std::shared_ptr<Region>> living_regions() {
  Regions& known = regions();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::vector<std::shared_ptr<Region>> living;
  for (const std::weak_ptr<Region>& one : known.all)
    if (std::shared_ptr<Region> region = one.lock()) living.push_back(std::move(region));
  return living;
}

}  // namespace

int64_t unsettled_pages() {
  int64_t pages = 0;
  for (const auto& region : living_regions()) pages += region->num_small();
  return pages;
}

int64_t settle() {
  for (const auto& region : living_regions())
    if (region->num_small()) {
      region->settle();
      break;
    }
  return unsettled_pages();
}

namespace {

// Whether every page there is, of count pages from this one on, is a file's or shared: what its
// entry in /proc/self/pagemap says. A page that was written to is neither, nor is one in the swap.
bool all_are_files(uintptr_t page, size_t count) {
  constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62,
                     kFile = uint64_t{1} << 61;
  // Whoever asks may have no way to tell that memory is short, and does without.
  const std::unique_ptr<uint64_t[]> entries(new (std::nothrow) uint64_t[count]);
  const int map = entries ? open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC) : -1;
  if (map < 0) return false;
  const size_t bytes = count * sizeof(uint64_t);
  const ssize_t got = pread(map, entries.get(), bytes, static_cast<off_t>(page * sizeof(uint64_t)));
  close(map);
  return got == static_cast<ssize_t>(bytes) &&
         std::all_of(entries.get(), entries.get() + count, [](uint64_t entry) {
           return !(entry & kSwapped) && (!(entry & kPresent) || (entry & kFile));
         });
}

}  // namespace

bool are_file_pages(const void* data, size_t bytes) {
  const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = address / size, last = (address + bytes + size - 1) / size;
  return first < last && all_are_files(first, last - first);
}

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
    : region_(std::make_shared<Region>(bytes)), bytes_(bytes), data_(region_->data()) {
  memory_bytes += static_cast<int64_t>(bytes);
}

bool are_file_pages(const void*, size_t) { return false; }
void forget_file_pages(const void*, size_t) {}

int64_t set_slow_page_ns(int64_t) { return 0; }
int64_t settle() { return 0; }
int64_t unsettled_pages() { return 0; }
#endif

WeightMemory::~WeightMemory() {
  memory_bytes -= static_cast<int64_t>(bytes_);
  region_->give_back(data_, bytes_);
}

int64_t weight_memory_bytes() { return memory_bytes; }

}  // namespace onnxport
