// Instruction-set levels: those of this build, those of this machine, and the one in use.
//
// The level is chosen at the first lookup: the best one that the processor and the build have, or the one that
// TILEWISE_ISA names. The functions with default visibility are those that libtilewise_tile.so, which has the kernels,
// offers to the Python module.
#pragma once
#include <string_view>
#include <vector>

#include "kernels/kernel.h"

namespace tilewise::kernels {

/// Levels that this build has and this machine can run, weakest first. x86-64 has baseline, avx2, avx512, avx512_bf16
/// and amx_bf16; aarch64 has neon.
[[gnu::visibility("default")]] std::vector<std::string_view> available_levels();

/// Levels of this machine that are better than every level of this build (TILEWISE_LEVELS in CMakeLists.txt), weakest
/// first.
[[gnu::visibility("default")]] std::vector<std::string_view> missing_levels();

/// The level in use. Throws ArgumentError when TILEWISE_ISA names one that the machine or the build lacks.
[[gnu::visibility("default")]] std::string_view level_in_use();

/// A kernel of a given level, for tests; nullptr for an unknown name.
/// Throws ArgumentError for a level that the machine or the build lacks.
[[gnu::visibility("default")]] const Entry* find_kernel_at(std::string_view level, std::string_view name);

/// All kernel names, sorted.
[[gnu::visibility("default")]] std::vector<std::string_view> kernel_names();

}  // namespace tilewise::kernels
