// Quantised weights outside of kernels: from the blocks of files to panels, and back to numbers.
//
// Purpose: loading and reading of weights. Any thread may call these functions; several threads may write different
// panels. They never block or allocate. Callers check sizes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tilewise::kernels {

/// A format's blocks: `block` elements along k in `bytes` bytes.
struct QuantisedBlock {
  const char* name;
  int64_t block, bytes;
};

/// The functions of an instruction-set level. Formats have numbers from 0 to num_formats - 1.
struct QuantisedFns {
  int64_t num_formats;
  QuantisedBlock (*format)(int64_t number);
  /// Makes blocks of a panel from up to 32 rows of blocks, `stride` bytes apart; missing rows become zero. Returns
  /// whether all scales are finite.
  bool (*pack)(int64_t number, const std::byte* rows, int64_t stride, int64_t num_rows, int64_t num_blocks,
               std::byte* panel);
  /// The first `cols` numbers of a row of a panel, in bf16.
  void (*read_row)(int64_t number, const std::byte* panel, int64_t row, int64_t cols, uint16_t* to);
};

/// The functions of the instruction-set level in use.
[[gnu::visibility("default")]] QuantisedFns find_quantised();

/// Those of another level, for tests. Throws ArgumentError for a level that this machine lacks.
[[gnu::visibility("default")]] QuantisedFns find_quantised_at(std::string_view level);

}  // namespace tilewise::kernels
