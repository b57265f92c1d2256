// Products by group of quantised weights (docs/numerics.md, rule 12): codes are multiplied, and the scales are applied
// to the sum of each group.
//
// Formats with codes of 4 bits have them: codes are exact in bf16, and scales hold for whole groups of 32 elements. A
// packed row of activations has, after each 128 steps, the sums of its 8 groups, in the words that keep rows apart. A
// packed panel has the codes of a group as the words of 16 steps, then the scales and the minima of its 32 rows.
#pragma once
#include "kernels/quantised/format.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

template <class F>
inline constexpr bool kHasGroupedProduct = F::kBits == 4;
inline constexpr int kGroupedStep = kPanel + 2 * kPanel / kGroupSteps;  // words of a step, with its share of the scales
static_assert(kBlockSteps + kBlockSteps / kGroupSteps <= kRowStride);

/// Where the sum of a group is from the beginning of a packed row block, by a step's word in the first row.
constexpr int64_t word_of_group(int64_t word) {
  return word - word % kRowStride + kBlockSteps + word % kRowStride / kGroupSteps;
}

/// The sum of the bf16 numbers in steps [from, to) of a group: those of a step, then a tree over the steps, in which
/// the others are zeros.
TILEWISE_INLINE float sum_of_group(const uint32_t* words, int64_t from, int64_t to) {
  float sums[kGroupSteps];
  for (int i = 0; i < kGroupSteps; ++i) {
    const uint32_t word = i >= from && i < to ? words[i] : 0;
    sums[i] = bits_of<float>(word << 16) + bits_of<float>(word & 0xffff0000u);
  }
  for (int width = kGroupSteps / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] = sums[i] + sums[width + i];
  return sums[0];
}

/// Adds a group to `total`: `sum` is that of its products with codes, x that of its activations.
template <bool HasMinimum, bool IsZeroPoint, class V>
TILEWISE_INLINE V add_group(const V& total, const V& sum, const V& d, const V& m, const V& x) {
  if constexpr (IsZeroPoint) return fused(d, fused(m, x, sum), total);
  if constexpr (HasMinimum) return fused(m, x, fused(d, sum, total));
  return fused(d, sum, total);
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
