// The file behind memory that it was mapped into.
#pragma once

#include <cstddef>

namespace onnxport {

// Reads parts of a large mapped file that few are needed of, without their becoming this process's
// memory: where a page is looked at in a mapping, Linux maps all that it holds around it, half a
// megabyte and more for a row of a table, and so by and by the table.
class MappedFile {
 public:
  // Finds the file whose contents this memory is. There is none where the memory was not mapped, was
  // written to, or where the system has no way to tell: it is to be read itself then.
  MappedFile(const void* data, size_t bytes);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  explicit operator bool() const { return file_ >= 0; }

  // Copies bytes that lie so far behind data. False where the system could not read them. From any
  // thread.
  bool read(size_t offset, size_t bytes, void* out) const;

 private:
  bool same(const void* data, size_t bytes) const;

  int file_ = -1;
  long long begin_ = 0;  // of data, in the file
};

}  // namespace onnxport
