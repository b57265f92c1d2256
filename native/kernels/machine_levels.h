// The instruction-set levels of this processor family, and which of them this machine can run.
//
// isa.cc chooses from them at run time. CMake runs list_machine_levels.cc to choose which levels to build. Compiled
// without special instructions.
#pragma once
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <string_view>
#include <vector>

namespace tilewise::kernels {

struct MachineLevel {
  std::string_view name;
  bool can_run;
};

/// All levels of the family, weakest first; every machine can run the first one.
inline std::vector<MachineLevel> machine_levels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool dot = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  // A process must request the use of tile registers once, for all its threads.
  constexpr long kRequestFeature = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  const bool amx = dot && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                   syscall(SYS_arch_prctl, kRequestFeature, kTileData) == 0;
  return {{"baseline", true}, {"avx2", avx2}, {"avx512", avx512}, {"avx512_bf16", dot}, {"amx_bf16", amx}};
#elif defined(__aarch64__)
  return {{"neon", true}};
#else
  return {{"baseline", true}};
#endif
}

}  // namespace tilewise::kernels
