// Memory that is mapped but has never been touched, had from the system beforehand.
//
// Purpose: no thread that computes waits for the system to find pages and fill them with zeros; where a virtual
// machine's host has to find them first, that takes seconds per GiB. Who may call: any thread, on memory that others
// use meanwhile: what it holds stays. Blocks: until the pages are there. A hint: older systems do nothing.
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
