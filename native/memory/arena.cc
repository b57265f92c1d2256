// See arena.h.
#include "memory/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace tilewise::memory {

Arena::Arena(int64_t bytes) : bytes_(bytes) {
  check<ArgumentError>(bytes >= 0, "[memory.Arena] bytes must not be negative; got ", bytes, "; pass 0 or more");
  if (bytes == 0) return;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check<ResourceError>(mapped != MAP_FAILED, "[memory.Arena] the system must map a device's memory; got ",
                       std::strerror(errno), " for ", bytes, " bytes; use more devices or a smaller model");
  madvise(mapped, bytes, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(mapped);
}

Arena::~Arena() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace tilewise::memory
