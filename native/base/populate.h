// Populates memory that is mapped but not yet touched.
//
// Purpose: threads that compute should not wait until the system has found pages and zeroed them, which may take
// seconds per GiB on a virtual machine. Who may call: any thread, also while others use the memory; its content does
// not change. Blocks: until the pages exist. It is a hint; older systems do nothing.
#pragma once
#include <sys/mman.h>

#include <cstdint>

namespace tilewise {

inline void populate([[maybe_unused]] void* begin, [[maybe_unused]] uint64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) & ~(kPage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes + kPage - 1) & ~(kPage - 1);
  madvise(reinterpret_cast<void*>(first), end - first, MADV_POPULATE_WRITE);
#endif
}

}  // namespace tilewise
