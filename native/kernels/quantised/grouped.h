// Grouped products of quantised weights (docs/numerics.md, rule 12): codes are multiplied, and the scales are applied
// to the sum of each group.
//
// Formats with codes of 4 bits have them: codes are exact in bf16, and scales hold for whole groups of 32 elements. A
// packed row of activations has, after each 128 steps, the sums of its 8 groups, in the words that keep rows apart. A
// packed panel has the codes of a group as the words of 16 steps, then the scales and the minima of its 32 rows.
#pragma once
#include "kernels/quantised/format.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

template <class F>
inline constexpr bool kHasGroupedProduct = F::kBits == 4 && F::kSpan >= kGroup;
inline constexpr int kGroupedStep = kPanel + 2 * kPanel / kGroupSteps;  // words of a step, with its share of the scales
static_assert(kBlockSteps + kBlockSteps / kGroupSteps <= kRowStride);

/// Where the sum of a group is from the beginning of a packed row block, by a step's word in the first row.
constexpr int64_t word_of_group(int64_t word) {
  return word - word % kRowStride + kBlockSteps + word % kRowStride / kGroupSteps;
}

/// The sum of the bf16 numbers in steps [from, to) of a group: the two of a step, then the tree of 16 lanes over the
/// steps, in which the others are zeros.
TILEWISE_INLINE float sum_of_group(const uint32_t* words, int64_t from, int64_t to) {
  static_assert(kGroupSteps == kLanes);
  uint32_t inside[kGroupSteps];
  if (from > 0 || to < kGroupSteps) {
    for (int i = 0; i < kGroupSteps; ++i) inside[i] = i >= from && i < to ? words[i] : 0;
    words = inside;
  }
  const IntLanes pairs = load_int(words);
  Lanes sums;
  TILEWISE_EACH_PART {
    sums.part[p] = (NativeF)(pairs.part[p] << 16) + (NativeF)(pairs.part[p] & static_cast<int32_t>(0xffff0000u));
  }
  return sum_lanes(sums);
}

/// Adds a group to `total`: `sum` is that of its products with codes, x that of its activations.
template <bool HasMinimum, bool IsZeroPoint, class V>
TILEWISE_INLINE V add_group(const V& total, const V& sum, const V& d, const V& m, const V& x) {
  if constexpr (IsZeroPoint) return fused(d, fused(m, x, sum), total);
  if constexpr (HasMinimum) return fused(m, x, fused(d, sum, total));
  return fused(d, sum, total);
}

/// A segment of a product: groups that are summed in one k split.
struct GroupedSegment {
  const uint32_t* a;  // packed rows
  int64_t word;  // of the segment's first step, in the first row; words may be in two halves (kWordsOf)
  const uint32_t* panel;
  int64_t step, steps;  // in the panel
  float* totals;  // [rows][32]
};
using AddGroups = void (*)(const GroupedSegment& segment);

/// Adds the groups of a segment to the totals of 1 to kMaxRows rows.
AddGroups find_add_groups(bool has_minimum, bool is_zero_point, int64_t rows);

/// A word of packed rows.
TILEWISE_INLINE uint32_t whole_word(const uint32_t* word) {
  if constexpr (kWordsOf<DotBf16> == 1) return word[0];
  return word[0] | word[1] >> 16;
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
