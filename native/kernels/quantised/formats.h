// The functions of every format, by its number.
#pragma once
#include "kernels/quantised/grouped.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// The most rows of a product that reads panels and keeps their words in registers; 0 where no level does.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
inline constexpr int kRegisterRows = 16;
#else
inline constexpr int kRegisterRows = 0;
#endif
/// The same of grouped products, which never use tile registers: these would be stored after every group.
#if defined(__AVX512BF16__)
inline constexpr int kGroupedRows = 16;
#else
inline constexpr int kGroupedRows = 0;
#endif

/// A format's functions. Panels are described in format.h; `panel` is the first byte of one. All take the elements of a
/// block, because some formats have blocks of several sizes.
struct QuantisedFormat {
  using FewRows = void (*)(const MicroArgs& call, int64_t block);

  const char* name;  // of src/tilewise/formats
  int64_t block, block_bytes;
  /// Elements [begin, end) along k as words [step][32]; `begin` is even.
  void (*expand)(const uint8_t* panel, int64_t block, int64_t begin, int64_t end, uint32_t* to);
  /// The first `cols` elements of a row.
  void (*read_row)(const uint8_t* panel, int64_t block, int64_t row, int64_t cols, bf16* to);
  /// Makes blocks of a panel from up to 32 rows of a file, `stride` bytes apart. Missing rows become zero. Returns
  /// whether all scales are finite.
  bool (*pack)(const uint8_t* rows, int64_t stride, int64_t num_rows, int64_t block, int64_t num_blocks,
               uint8_t* panel);
  /// Micro-kernels of 1 to kRegisterRows rows, at x.rows - 1.
  FewRows few[kRegisterRows + 1];

  /// For grouped products (grouped.h). `expand_codes` is nullptr where a format has none.
  struct Grouped {
    /// Whole groups that have elements in [begin, end), as words [group][16 * kGroupedStep].
    void (*expand_codes)(const uint8_t* panel, int64_t block, int64_t begin, int64_t end, uint32_t* to);
    bool has_minimum, is_zero_point;
    FewRows few[kGroupedRows + 1];
  } grouped;
};

inline constexpr int64_t kNumFormats = 27;
extern const QuantisedFormat kFormats[kNumFormats];

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
