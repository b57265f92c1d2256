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

SharedFile::SharedFile(int file, int64_t bytes) : bytes_(bytes) {
  struct stat found{};
  const int seals = fcntl(file, F_GET_SEALS);
  check<ArgumentError>(seals >= 0 && (seals & (F_SEAL_SHRINK | F_SEAL_SEAL)) == (F_SEAL_SHRINK | F_SEAL_SEAL) &&
                           fstat(file, &found) == 0,
                       "[memory.SharedFile] memory that processes share must be a memfd sealed against shrinking; got "
                       "descriptor ",
                       file, " with seals ", seals, "; seal it");
  const int64_t size = found.st_size;
  check<ArgumentError>(bytes >= 0 && size >= bytes && size - bytes < 2 * kPage,
                       "[memory.SharedFile] a file must have the size that is used of it, in whole pages; got ", size,
                       " bytes for ", bytes, "; make it with the plan's sizes");
  if (bytes == 0) return;
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  check<ResourceError>(mapped != MAP_FAILED, "[memory.SharedFile] the system must map what processes share; got ",
                       std::strerror(errno), " for ", bytes, " bytes; use more devices or a smaller model");
  data_ = static_cast<std::byte*>(mapped);
  madvise(data_, bytes, MADV_HUGEPAGE);
}

SharedFile::~SharedFile() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace tilewise::memory
