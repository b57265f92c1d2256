// Kernels that every runtime knows by name: what reductions and examples need.
//
// Each takes (target, source) and the number of bytes as its first scalar; fill takes (target) and (bytes, value of
// each byte). Plain loops: the compiler makes vectors of them. No order of additions is changed by that, because every
// element is its own sum.
#pragma once
#include <span>

#include "tilewise/pto_api.h"

namespace tilewise::tasks {

struct BuiltinKernel {
  const char* name;
  pto_kernel_fn function;
};

std::span<const BuiltinKernel> builtin_kernels();

}  // namespace tilewise::tasks
