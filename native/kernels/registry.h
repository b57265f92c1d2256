// Entries that the kernel sources contribute, one list per source and instruction-set level.
#pragma once
#include "kernels/kernel.h"

namespace tilewise::kernels {

struct Entry {
  const char* name;
  KernelFn fn;
};

struct EntryList {
  const Entry* entries;
  int64_t count;
};

}  // namespace tilewise::kernels
