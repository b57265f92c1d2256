// Stores weights in the layout of devices: converted, packed into panels, every value checked.
//
// Purpose: the single pass from a file's bytes to a device's arena. Any thread may call it; several threads may store
// blocks of one part at once if they touch different panels. It never blocks or allocates. Rounding is to nearest even.
// The caller has checked that blocks fit the parts (weights/read.cc).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"

namespace tilewise::kernels {

/// Element types of files.
enum class Stored : int { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3 };

constexpr int64_t size_of(Stored dtype) { return dtype == Stored::kF64 ? 8 : dtype == Stored::kF32 ? 4 : 2; }

/// Rows of a stored tensor in memory, aligned to their elements.
struct StoredBlock {
  const std::byte* data;
  int64_t stride;  // bytes between rows
  int64_t rows;
  int64_t cols;
  Stored dtype;
};

/// A device's part of a weight: row-major, or packed (microkernel.h) with whole panels of 32 rows and an even k.
struct WeightPart {
  std::byte* data;
  DType dtype;  // kF32 or kBF16
  bool packed;
  int64_t rows;
  int64_t cols;
};

/// Writes a block into a part with its first element at [row][col]; if transposed, the block's rows are the part's
/// columns. In a packed part the block must cover whole panels and whole pairs of columns, except at the part's end,
/// whose padding becomes zero. A block that is already in place in a row-major part is not copied. Returns whether all
/// converted numbers are finite.
using StoreFn = bool (*)(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed);

/// The function of the instruction-set level in use.
[[gnu::visibility("default")]] StoreFn find_store();

/// The function of another level, for tests. Throws ArgumentError for a level that this machine lacks.
[[gnu::visibility("default")]] StoreFn find_store_at(std::string_view level);

}  // namespace tilewise::kernels
