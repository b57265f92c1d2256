// See shared_file.h.
#include "memory/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace tilewise::memory {

namespace {

constexpr int64_t kPage = 4096;

}  // namespace

SharedFile::SharedFile(int file, int64_t bytes, int64_t behind) : bytes_(bytes) {
  struct stat status{};
  const int seals = fcntl(file, F_GET_SEALS);
  check<ArgumentError>(seals >= 0 && (seals & (F_SEAL_SHRINK | F_SEAL_SEAL)) == (F_SEAL_SHRINK | F_SEAL_SEAL) &&
                           fstat(file, &status) == 0,
                       "[memory.SharedFile] shared memory must be a memfd sealed against shrinking; got "
                       "descriptor ",
                       file, " with seals ", seals, "; seal it");
  const int64_t size = status.st_size;
  check<ArgumentError>(bytes >= 0 && size >= bytes && size - bytes < 2 * kPage,
                       "[memory.SharedFile] a file must have the used size, in whole pages; got ", size, " bytes for ",
                       bytes, "; make it with the plan's sizes");
  mapped_ = (bytes + kPage - 1) / kPage * kPage + behind;
  if (mapped_ == 0) return;
  const auto map = [&](void* where, int64_t size, int access, int flags, int from) {
    void* const mapped = mmap(where, size, access, flags, from, 0);
    if (mapped != MAP_FAILED) return static_cast<std::byte*>(mapped);
    const int error = errno;
    if (data_ != nullptr) munmap(data_, mapped_);
    check<ResourceError>(false, "[memory.SharedFile] the system must map shared memory; got ", std::strerror(error),
                         " for ", ByteCount(static_cast<uint64_t>(size)), "; use more devices or a smaller model");
    return data_;
  };
  data_ = map(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  if (bytes == 0) return;
  map(data_, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file);
  madvise(data_, bytes, MADV_HUGEPAGE);
}

SharedFile::~SharedFile() {
  if (data_ != nullptr) munmap(data_, mapped_);
}

}  // namespace tilewise::memory
