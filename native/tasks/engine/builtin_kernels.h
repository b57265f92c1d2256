// Kernels that every runtime has by name, for reductions and examples.
//
// Each takes (target, source), and the number of bytes as its first scalar; fill takes (target) and (bytes, value of
// each byte). They are plain loops, which the compiler vectorizes. This does not change the order of additions, because
// every element is its own sum. They check nothing; check_builtin (submit/checks.h) does, when a task is submitted.
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
  bool reads_target;  // and writes it
};

/// A kernel flag besides those of pto_api.h: arguments are checked when a task is submitted. The kernels' ids are their
/// indices in this list.
inline constexpr uint32_t kIsBuiltin = 1u << 31;

std::span<const BuiltinKernel> builtin_kernels();

}  // namespace tilewise::tasks
