// See grouped.h.
#include "kernels/quantised/grouped.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// So many rows at a time have their totals in registers, next to the sums of the current group.
inline constexpr int kRowsAtATime = kMaxRows / 2;

/// Rows [first, first + R).
template <int R, bool HasMinimum, bool IsZeroPoint>
TILEWISE_INLINE void add_to_rows(const GroupedSegment& x, int first) {
  using Dot = DotBf16;
  constexpr int kVectors = 2;  // of a row at a time
  constexpr int kWords = kWordsOf<Dot>, kRow = kRowStride * kWords;
  const uint32_t* rows = x.a + first * kRow;
  for (int lane = 0; lane < kPanel; lane += kVectors * kNativeLanes) {
    NativeF totals[R][kVectors];
    float* const memory = x.totals + first * kPanel + lane;
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kVectors; ++j) totals[r][j] = native_load(memory + r * kPanel + j * kNativeLanes);
    for (int64_t step = x.step, end = x.step + x.steps; step < end;) {
      const int64_t in_group = step % kGroupSteps, count = smaller(kGroupSteps - in_group, end - step);
      const uint32_t* group = x.panel + (step - in_group) * kGroupedStep;
      const int64_t word = x.word + step - x.step;
      const uint32_t* a = rows + word * kWords;
      const auto* b = reinterpret_cast<const float*>(group + in_group * kPanel) + lane;
      NativeF sums[R][kVectors];
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < kVectors; ++j) sums[r][j] = NativeF{};
      for (int64_t i = 0; i < count; ++i, a += kWords, b += kPanel)
        Dot::block(
            sums, [&](int r, int half) TILEWISE_INLINED { return a[r * kRow + half]; },
            [&](int j) TILEWISE_INLINED { return native_load(b + j * kNativeLanes); });
      const auto* scales = reinterpret_cast<const float*>(group + kGroupSteps * kPanel) + lane;
      const uint32_t* of_rows = rows + word_of_group(word) * kWords;
      NativeF d[kVectors], m[kVectors] = {};
      for (int j = 0; j < kVectors; ++j) {
        d[j] = native_load(scales + j * kNativeLanes);
        if constexpr (HasMinimum) m[j] = native_load(scales + kPanel + j * kNativeLanes);
      }
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        const NativeF sum = HasMinimum ? native_set(bits_of<float>(whole_word(of_rows + r * kRow))) : NativeF{};
        for (int j = 0; j < kVectors; ++j)
          totals[r][j] = add_group<HasMinimum, IsZeroPoint>(totals[r][j], sums[r][j], d[j], m[j], sum);
      }
      step += count;
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kVectors; ++j) native_store(memory + r * kPanel + j * kNativeLanes, totals[r][j]);
  }
}

template <int R, bool HasMinimum, bool IsZeroPoint>
void add_groups(const GroupedSegment& x) {
  constexpr int kFirst = R < kRowsAtATime ? R : kRowsAtATime;
  add_to_rows<kFirst, HasMinimum, IsZeroPoint>(x, 0);
  if constexpr (R > kRowsAtATime) add_to_rows<R - kRowsAtATime, HasMinimum, IsZeroPoint>(x, kRowsAtATime);
}

template <bool HasMinimum, bool IsZeroPoint>
constexpr AddGroups of_rows(int rows) {
  constexpr AddGroups kFns[] = {
      add_groups<1, HasMinimum, IsZeroPoint>,  add_groups<2, HasMinimum, IsZeroPoint>,
      add_groups<3, HasMinimum, IsZeroPoint>,  add_groups<4, HasMinimum, IsZeroPoint>,
      add_groups<5, HasMinimum, IsZeroPoint>,  add_groups<6, HasMinimum, IsZeroPoint>,
#if defined(__AVX512BW__) || defined(__aarch64__)
      add_groups<7, HasMinimum, IsZeroPoint>,  add_groups<8, HasMinimum, IsZeroPoint>,
      add_groups<9, HasMinimum, IsZeroPoint>,  add_groups<10, HasMinimum, IsZeroPoint>,
      add_groups<11, HasMinimum, IsZeroPoint>, add_groups<12, HasMinimum, IsZeroPoint>,
#endif
#if defined(__AVX512BW__)
      add_groups<13, HasMinimum, IsZeroPoint>, add_groups<14, HasMinimum, IsZeroPoint>,
#endif
  };
  static_assert(sizeof kFns / sizeof kFns[0] == kMaxRows);
  return kFns[rows - 1];
}

}  // namespace

AddGroups find_add_groups(bool has_minimum, bool is_zero_point, int64_t rows) {
  const auto count = static_cast<int>(rows);
  if (!has_minimum) return of_rows<false, false>(count);
  return is_zero_point ? of_rows<true, true>(count) : of_rows<true, false>(count);
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
