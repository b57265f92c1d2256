// Kernels that every runtime knows by name: what reductions and examples need.
//
// Each takes (target, source) and the number of bytes as its first scalar; fill takes (target) and (bytes, value of
// each byte). Plain loops: the compiler makes vectors of them. No order of additions is changed by that, because every
// element is its own sum. They check nothing: check_builtin (submit/checks.h) does, when a task is submitted.
#pragma once
#include <span>

#include "tilewise/pto_api.h"

namespace tilewise::tasks {

struct BuiltinKernel {
  const char* name;
  pto_kernel_fn function;
  uint32_t num_params;
  uint32_t num_scalars;
  uint32_t item_bytes;
  bool reads_target;  // next to writing it
};

/// A flag of kernels next to those of pto_api.h: its arguments are checked when a task is submitted. The kernels' ids
/// are their places in this list.
inline constexpr uint32_t kIsBuiltin = 1u << 31;

std::span<const BuiltinKernel> builtin_kernels();

}  // namespace tilewise::tasks
