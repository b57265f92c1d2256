// Stores weights in the layout of devices: converted, packed into panels, every value checked.
//
// Purpose: the one pass from a file's bytes to a device's arena. Who may call: any thread; several threads may store
// blocks of one part at once if they touch different panels. Blocks: never. Allocates nothing. Rounding is to nearest
// even. The caller has checked that blocks fit the parts (weights/read.cc).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"

namespace tilewise::kernels {

/// Element types of files.
enum class Stored : int { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3 };

constexpr int64_t size_of(Stored dtype) { return dtype == Stored::kF64 ? 8 : dtype == Stored::kF32 ? 4 : 2; }

/// Rows of a stored tensor as they lie in memory, aligned to their elements.
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

/// Writes a block into a part, its first element at [row][col]; transposed: the block's rows are the part's columns.
/// Of a packed part it covers whole panels and whole pairs of columns, but at the part's end, whose padding becomes
/// zero. A block that lies in a row-major part already stays. Returns whether all numbers are finite as the part has
/// them.
using StoreFn = bool (*)(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed);

/// For the instruction set in use.
StoreFn find_store();

/// Of a given level, for tests. Throws ArgumentError for a level that this machine lacks.
StoreFn find_store_at(std::string_view level);

}  // namespace tilewise::kernels
