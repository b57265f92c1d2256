// See arena.h.
#include "memory/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace tilewise::memory {

namespace {

std::byte* map(void* where, int64_t bytes, int access, int flags) {
  void* const mapped = mmap(where, bytes, access, flags | (where == nullptr ? 0 : MAP_FIXED), -1, 0);
  check<ResourceError>(mapped != MAP_FAILED, "[memory.Arena] the system must map a device's memory; got ",
                       std::strerror(errno), " for ", ByteCount(static_cast<uint64_t>(bytes)),
                       "; use more devices or a smaller model");
  return static_cast<std::byte*>(mapped);
}

}  // namespace

Arena::Arena(int64_t bytes, std::unique_ptr<SpillFile> file) : bytes_(bytes), file_(std::move(file)) {
  check<ArgumentError>(bytes >= 0, "[memory.Arena] bytes must not be negative; got ", bytes, "; pass 0 or more");
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  constexpr int kOwn = MAP_PRIVATE | MAP_ANONYMOUS;
  if (mapped_bytes() == 0) return;
  if (file_ == nullptr) {
    data_ = map(nullptr, bytes, kAccess, kOwn);
  } else {
    data_ = map(nullptr, mapped_bytes(), PROT_NONE, kOwn | MAP_NORESERVE);
    try {
      if (bytes > 0) map(data_, bytes, kAccess, kOwn);
    } catch (...) {
      munmap(data_, mapped_bytes());
      throw;
    }
  }
  if (bytes > 0) madvise(data_, bytes, MADV_HUGEPAGE);
}

Arena::Arena(int shared_file, int64_t bytes, std::unique_ptr<SpillFile> file)
    : bytes_(bytes),
      file_(std::move(file)),
      shared_(std::make_unique<SharedFile>(shared_file, bytes, file_ == nullptr ? 0 : file_->bytes())) {
  data_ = shared_->data();
}

Arena::Arena(Addresses addresses) : bytes_(addresses.bytes), behind_(addresses.file_bytes), is_reserved_(true) {
  if (mapped_bytes() > 0) data_ = map(nullptr, mapped_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
}

Arena::~Arena() {
  if (data_ != nullptr && shared_ == nullptr) munmap(data_, mapped_bytes());
}

void Arena::move(SpillFile::Way way, int64_t offset, std::byte* memory, int64_t bytes) const {
  const int64_t size = file_ == nullptr ? 0 : file_->bytes();
  check<ArgumentError>(bytes >= 0 && offset >= file_begin() && offset - file_begin() <= size - bytes,
                       "[memory.Arena.move] a range must lie in the device's file of ", size, " bytes from ",
                       file_begin(), " on; got offset ", offset, " and ", bytes, " bytes; use the plan's offsets");
  if (bytes > 0) file_->move(way, memory, offset - file_begin(), bytes);
}

}  // namespace tilewise::memory
