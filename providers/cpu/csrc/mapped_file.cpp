#include "mapped_file.h"

#include "pages.h"

#if defined(__linux__)
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#endif

namespace onnxport {

#if defined(__linux__)
namespace {

// What a line of /proc/self/maps says of memory.
struct Mapping {
  std::string path;
  long long begin = 0;  // in the file
};

// The mapping that all of this memory is in; without a path where it is in none of a file.
Mapping find_mapping(uintptr_t first, uintptr_t last) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    unsigned long long offset = 0;
    int path = 0;
    constexpr const char* kFormat = "%" SCNxPTR "-%" SCNxPTR " %*4s %llx %*s %*s %n";
    if (std::sscanf(line.c_str(), kFormat, &begin, &end, &offset, &path) < 3) continue;
    if (first < begin || first >= end) continue;
    if (last > end || path == 0 || line[static_cast<size_t>(path)] != '/') return {};
    return {line.substr(static_cast<size_t>(path)),
            static_cast<long long>(offset + (first - begin))};
  }
  return {};
}

}  // namespace

MappedFile::MappedFile(const void* data, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(data);
  if (bytes == 0 || !are_file_pages(data, bytes)) return;
  const Mapping mapping = find_mapping(first, first + bytes);
  if (mapping.path.empty()) return;
  file_ = open(mapping.path.c_str(), O_RDONLY | O_CLOEXEC);
  begin_ = mapping.begin;
  // Another file may have got the name meanwhile.
  if (file_ >= 0 && !same(data, bytes)) {
    close(file_);
    file_ = -1;
  }
}

MappedFile::~MappedFile() {
  if (file_ >= 0) close(file_);
}

bool MappedFile::read(size_t offset, size_t bytes, void* out) const {
  auto* at = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = pread(file_, at, bytes, begin_ + static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    offset += static_cast<size_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

// Whether some places of the file, the first and the last among them, are what memory has.
bool MappedFile::same(const void* data, size_t bytes) const {
  constexpr size_t kPlaces = 16, kBytes = 1024;
  const size_t length = std::min(kBytes, bytes);
  char found[kBytes];
  for (size_t place = 0; place < kPlaces; place++) {
    const size_t offset = place * (bytes - length) / (kPlaces - 1);
    if (!read(offset, length, found)) return false;
    if (std::memcmp(found, static_cast<const char*>(data) + offset, length) != 0) return false;
  }
  return true;
}
#else
MappedFile::MappedFile(const void*, size_t) {}
MappedFile::~MappedFile() = default;
bool MappedFile::read(size_t, size_t, void*) const { return false; }
#endif

}  // namespace onnxport
