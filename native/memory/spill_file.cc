// See spill_file.h.
#include "memory/spill_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/check.h"

namespace tilewise::memory {

namespace {

constexpr int64_t kBounceBytes = 1 << 20;

int open_unnamed(const std::string& directory) {
  const int unnamed = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (unnamed >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return unnamed;
  std::string name = directory + "/tilewise-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

/// Returns the error, or 0. Retries after EINTR, because some file systems stop at any signal.
int allocate_blocks(int file, int64_t bytes) {
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file, 0, std::max<int64_t>(bytes, 1));
  return error;
}

/// An aligned buffer for direct transfers, one per thread; nullptr if out of memory.
std::byte* bounce() {
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  thread_local const std::unique_ptr<std::byte, Free> buffer(
      static_cast<std::byte*>(std::aligned_alloc(kFilePage, kBounceBytes)));
  return buffer.get();
}

void move_all(SpillFile::Way way, int file, std::byte* memory, int64_t offset, int64_t bytes) {
  const bool is_read = way == SpillFile::Way::kRead;
  while (bytes > 0) {
    const ssize_t count = is_read ? pread(file, memory, bytes, offset) : pwrite(file, memory, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    check<ResourceError>(count > 0, "[memory.SpillFile] a device's file must be read and written; got '",
                         std::strerror(count < 0 ? errno : EIO), "' when ", is_read ? "reading " : "writing ", bytes,
                         " bytes at ", offset, "; look at the disk");
    memory += count;
    offset += count;
    bytes -= count;
  }
}

/// Moves whole pages past the page cache, which requires page-aligned memory.
void move_pages(SpillFile::Way way, int file, std::byte* memory, int64_t offset, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(memory) % kFilePage == 0) return move_all(way, file, memory, offset, bytes);
  for (int64_t done = 0; done < bytes; done += kBounceBytes) {
    const int64_t count = std::min(kBounceBytes, bytes - done);
    if (way == SpillFile::Way::kWrite) std::memcpy(bounce(), memory + done, count);
    move_all(way, file, bounce(), offset + done, count);
    if (way == SpillFile::Way::kRead) std::memcpy(memory + done, bounce(), count);
  }
}

}  // namespace

int SpillFile::make(const std::string& directory, int64_t bytes) {
  const int file = open_unnamed(directory);
  check<ResourceError>(file >= 0, "[memory.SpillFile] a directory for offloaded tensors must take a file; got '",
                       std::strerror(errno), "' for '", directory, "'; choose another one");
  const int error = allocate_blocks(file, bytes);
  if (error == 0) return file;
  close(file);
  check<ResourceError>(false, "[memory.SpillFile] the disk must have room for offloaded tensors; got '",
                       std::strerror(error), "' for ", ByteCount(static_cast<uint64_t>(bytes)), " in '", directory,
                       "'; free disk space, or choose another directory");
  return -1;
}

SpillFile::SpillFile(int file, int64_t bytes) : cached_(file), bytes_(bytes) {
  struct stat status{};
  const bool is_whole = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size >= bytes;
  // the file has no name, so open it again through its descriptor
  const std::string self = "/proc/self/fd/" + std::to_string(cached_);
  if (is_whole) direct_ = open(self.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  const int error = direct_ < 0 ? errno : 0;
  if (is_whole && (error == 0 || error == EINVAL || error == EOPNOTSUPP)) return;  // no O_DIRECT on this file system
  close(cached_);
  check<ArgumentError>(is_whole,
                       "[memory.SpillFile] a device's file must be a regular file of its full size; got descriptor ",
                       file, " for ", bytes, " bytes; pass what make() returned");
  check<ResourceError>(false, "[memory.SpillFile] a device's file must open a second time, past the page cache; got '",
                       std::strerror(error), "'; close files or raise the limit (ulimit -n)");
}

SpillFile::~SpillFile() {
  close(cached_);
  if (direct_ >= 0) close(direct_);
}

void SpillFile::move(Way way, std::byte* memory, int64_t offset, int64_t bytes) const {
  const int64_t head = std::min(bytes, (kFilePage - offset % kFilePage) % kFilePage);
  const bool is_aligned = reinterpret_cast<uintptr_t>(memory + head) % kFilePage == 0;
  if (direct_ < 0 || (!is_aligned && bounce() == nullptr)) return move_all(way, cached_, memory, offset, bytes);
  const int64_t pages = (bytes - head) / kFilePage * kFilePage;
  move_all(way, cached_, memory, offset, head);
  move_pages(way, direct_, memory + head, offset + head, pages);
  move_all(way, cached_, memory + head + pages, offset + head + pages, bytes - head - pages);
}

}  // namespace tilewise::memory
