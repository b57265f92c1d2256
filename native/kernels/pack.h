// Packs operands for the micro-kernels: words (one fp32, or a pair of bf16 along the contraction) in the order in which
// they are read. Everything outside of the range is written as zero, so edges need no other code.
#pragma once
#include "kernels/kernel.h"
#include "kernels/microkernel.h"
#include "kernels/transpose.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

TILEWISE_INLINE void copy_words(uint32_t* to, const void* from, int64_t words) {
  const auto* source = static_cast<const char*>(from);
  int64_t i = 0;
  for (; i + kLanes <= words; i += kLanes) store_int(to + i, load_int(source + 4 * i));
  for (; i < words; ++i) __builtin_memcpy(to + i, source + 4 * i, 4);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/// Widens each word of a pack of A to two words: the odd element, then the even one. `words` is a multiple of 8. In
/// row-major packs the two are neighbours; in step-major packs the odd words of a step precede its even words.
template <ALayout L>
TILEWISE_INLINE void widen_words(uint32_t* to, const uint32_t* from, int64_t words) {
  static_assert(L != ALayout::kSteps || kStepWords == 8);
  for (int64_t i = 0; i < words; i += 8, to += 16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    __m256i odd = _mm256_and_si256(x, _mm256_set1_epi32(-0x10000)), even = _mm256_slli_epi32(x, 16);
    if constexpr (L != ALayout::kSteps) {
      const __m256i low = _mm256_unpacklo_epi32(odd, even), high = _mm256_unpackhi_epi32(odd, even);
      odd = _mm256_permute2x128_si256(low, high, 0x20);
      even = _mm256_permute2x128_si256(low, high, 0x31);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), odd);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), even);
  }
}
#else
template <ALayout L>
void widen_words(uint32_t* to, const uint32_t* from, int64_t words) = delete;  // a step is one word
#endif

/// Elements [begin, end) of a row as words; an odd last bf16 element is paired with zero.
template <class D>
TILEWISE_INLINE void pack_row(uint32_t* to, const typename D::T* row, int64_t begin, int64_t end) {
  const int64_t whole = (end - begin) / D::kPerStep;
  copy_words(to, row + begin, whole);
  if (begin + whole * D::kPerStep < end) to[whole] = bits_of<uint32_t>(widen(row[end - 1])) >> 16;
}

/// Rows of [n][k] become lanes: to[step][32] from up to 32 rows, elements [begin, end). Unless
/// IsCleared, a half panel without rows is left as it is.
template <class D, bool IsCleared = true>
TILEWISE_INLINE void pack_panel_across(uint32_t* to, const typename D::T* from, int64_t stride, int64_t rows,
                                       int64_t begin, int64_t end) {
  const int64_t whole = (end - begin) / D::kPerStep;
  const auto bytes = static_cast<int64_t>(stride * sizeof(typename D::T));
  for (int64_t half = 0; half < kPanel; half += 16) {
    const int64_t count = larger(int64_t{0}, smaller(16, rows - half));
    if (!IsCleared && count == 0) break;
    const auto* base = reinterpret_cast<const char*>(from + (count > 0 ? half * stride : 0) + begin);
    for (int64_t s = 0; s < whole; s += 16) {
      for (int64_t r = 0; r < count; ++r) __builtin_prefetch(base + (16 + r) * bytes + 4 * s, 0, 2);
      transpose_words(to + s * kPanel + half, kPanel, base + 4 * s, bytes, count, smaller(16, whole - s));
    }
  }
  if (begin + whole * D::kPerStep == end) return;
  for (int64_t r = 0; r < kPanel; ++r)
    to[whole * kPanel + r] = r < rows ? bits_of<uint32_t>(widen(from[r * stride + end - 1])) >> 16 : 0;
}

/// 16 columns of one step: the row itself (fp32), or two rows interleaved (bf16; `second` nullptr: zero).
TILEWISE_INLINE IntLanes step_words(const float* first, const float*, int64_t columns) {
  return as_int(load(first, columns));
}
TILEWISE_INLINE IntLanes step_words(const bf16* first, const bf16* second, int64_t columns) {
  const IntLanes even = as_int(load(first, columns));
  IntLanes low;
  TILEWISE_EACH_PART low.part[p] = (even.part[p] >> 16) & 0xffff;
  return second ? (low | as_int(load(second, columns))) : low;
}

/// Width columns of one complete step.
template <int Width>
TILEWISE_INLINE void whole_step(uint32_t* to, const float* first, const float*) {
  __builtin_memcpy(to, first, Width * 4);
}
template <int Width>
TILEWISE_INLINE void whole_step(uint32_t* to, const bf16* first, const bf16* second) {
#if defined(__AVX512BW__)
  if constexpr (Width == 2 * kLanes) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    _mm512_storeu_si512(to, interleave<0>(a, b));
    _mm512_storeu_si512(to + kLanes, interleave<1>(a, b));
    return;
  }
  const auto half = [](const bf16* from) {
    return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  };
  for (int c = 0; c < Width; c += kLanes) _mm512_storeu_si512(to + c, interleave<0>(half(first + c), half(second + c)));
#else
  if constexpr (Width < kLanes) {
    for (int c = 0; c < Width; ++c) to[c] = first[c] | static_cast<uint32_t>(second[c]) << 16;
  } else {
    for (int c = 0; c < Width; c += kLanes) store_int(to + c, step_words(first + c, second + c, kLanes));
  }
#endif
}

/// The same with zeros for missing columns or a missing second row.
template <int Width, class T>
TILEWISE_INLINE void partial_step(uint32_t* to, const T* first, const T* second, int64_t columns) {
  for (int64_t c = 0; c < Width; c += kLanes) {
    const int64_t count = smaller(kLanes, columns - c);
    const IntLanes words = count <= 0 ? set_int(0) : step_words(first + c, second ? second + c : nullptr, count);
    __builtin_memcpy(to + c, &words, smaller(kLanes, Width) * 4);
  }
}

/// Prefetches the rows that are packed `Steps` steps later. They are too far apart for the hardware prefetcher.
template <class D, int Steps>
TILEWISE_INLINE void prefetch_step(const typename D::T* first, int64_t stride) {
  for (int j = 0; j < D::kPerStep; ++j) __builtin_prefetch(first + (Steps * D::kPerStep + j) * stride);
}

/// Columns of [t][n] remain lanes: to[step][Width] from `columns` columns, rows [begin, end).
template <class D, int Width>
TILEWISE_INLINE void pack_panel_along(uint32_t* to, const typename D::T* from, int64_t stride, int64_t columns,
                                      int64_t begin, int64_t end) {
  int64_t t = begin;
  if (columns >= Width)
    for (; t + D::kPerStep <= end; t += D::kPerStep, to += Width) {
      prefetch_step<D, 12>(from + t * stride, stride);
      whole_step<Width>(to, from + t * stride, from + (t + D::kPerStep - 1) * stride);
    }
  for (; t < end; t += D::kPerStep, to += Width)
    partial_step<Width>(to, from + t * stride, t + 1 < end ? from + (t + 1) * stride : nullptr, columns);
}

/// Steps written to a block before the next block. If a step is shorter than a cache line, several steps fill it.
inline constexpr int64_t kStepsAtOnce = kMaxRows > 6 ? 1 : 4;

/// Columns of x from start(block) on become the rows of blocks [block, end): to[block][step][kStepWords], rows [begin,
/// end_row). Whole vectors are written: no row of a block reads the columns beyond it. All blocks of a row are
/// packed before the next row, so that memory is read in runs.
template <class D, class Start>
TILEWISE_INLINE void pack_columns(uint32_t* to, int64_t words, int64_t block, int64_t end, const Start& start,
                                  const TileView& x, int64_t begin, int64_t end_row) {
  using T = typename D::T;
  const auto* data = static_cast<const T*>(x.data);
  const int64_t paired = end_row - (end_row - begin) % D::kPerStep;
  int64_t whole = block;  // end of the blocks whose vectors are complete
  while (whole < end && start(whole) + kStepWords <= x.cols) ++whole;
  const int64_t first_column = start(block), columns = start(whole) - first_column;
  for (int64_t t = begin, step = 0; t < paired;) {
    const int64_t steps = smaller(kStepsAtOnce, (paired - t) / D::kPerStep);
    for (int64_t i = 0; i < steps * D::kPerStep; ++i) {
      const auto* ahead = reinterpret_cast<const char*>(data + (t + 4 * D::kPerStep + i) * x.stride + first_column);
      for (int64_t at = 0; at < static_cast<int64_t>(columns * sizeof(T)); at += 64) __builtin_prefetch(ahead + at);
    }
    for (int64_t b = block; b < whole; ++b) {
      const T* from = data + t * x.stride + start(b);
      uint32_t* own = to + (b - block) * words + step;
      for (int64_t i = 0; i < steps; ++i, from += D::kPerStep * x.stride, own += kStepWords)
        whole_step<kStepWords>(own, from, from + (D::kPerStep - 1) * x.stride);
    }
    t += steps * D::kPerStep;
    step += steps * kStepWords;
  }
  for (int64_t b = block; b < end; ++b) {
    const int64_t from = b < whole ? paired : begin, column = start(b);
    pack_panel_along<D, kStepWords>(to + (b - block) * words + (from - begin) / D::kPerStep * kStepWords, data + column,
                                    x.stride, x.cols - column, from, end_row);
  }
}

/// The same as rows of words, kRowStride apart: to[block][column][step].
template <class D, class Start>
TILEWISE_INLINE void pack_transposed_columns(uint32_t* to, int64_t words, int64_t block, int64_t end,
                                             const Start& start, const TileView& x, int64_t begin, int64_t end_row) {
  using T = typename D::T;
  const auto* data = static_cast<const T*>(x.data);
  uint32_t square[kLanes * kLanes];  // [step][column]
  for (int64_t t = begin, step = 0; t < end_row; t += kLanes * D::kPerStep, step += kLanes) {
    const int64_t last = smaller(end_row, t + kLanes * D::kPerStep), steps = divide_up(last - t, D::kPerStep);
    for (int64_t b = block; b < end; ++b)
      for (int64_t column = start(b), r = 0; column < start(b + 1); column += kLanes, r += kLanes) {
        pack_panel_along<D, kLanes>(square, data + column, x.stride, x.cols - column, t, last);
        transpose_words(to + (b - block) * words + r * kRowStride + step, kRowStride,
                        reinterpret_cast<const char*>(square), kLanes * 4, steps,
                        smaller(kLanes, start(b + 1) - column));
      }
  }
}

/// Packs packed weights for transposed use: columns [column, column + count) of the packed rows [begin, end) of one
/// panel become rows of words, kRowStride apart. `panels` is the packed operand (fp32: [k][32 rows]; bf16: [k / 2][32
/// rows][2]), k_pad its padded row length.
TILEWISE_INLINE void pack_weight_columns(uint32_t* to, const float* panels, int64_t k_pad, int64_t column,
                                         int64_t count, int64_t begin, int64_t end) {
  const int64_t lane = begin % kPanel, words = end - begin;
  const float* from = panels + (begin - lane) * k_pad + column * kPanel + lane;
  if (words == kPanel) {
    for (int64_t c = 0; c < count; ++c, to += kRowStride, from += kPanel) {
      store_int(to, load_int(from));
      store_int(to + kLanes, load_int(from + kLanes));
    }
    return;
  }
  for (int64_t c = 0; c < count; ++c, to += kRowStride, from += kPanel) copy_words(to, from, words);
}

TILEWISE_INLINE void pack_weight_columns(uint32_t* to, const bf16* panels, int64_t k_pad, int64_t column, int64_t count,
                                         int64_t begin, int64_t end) {
  const int64_t lane = begin % kPanel, values = end - begin;
  const bf16* panel = panels + (begin - lane) * k_pad + lane * 2;
  int64_t c = 0;
#if defined(__AVX512BW__)
  if (values == kPanel) {
    const auto put = [&](int64_t which, int64_t first) {
      const bf16* from = panel + (column + which - first) * kPanel;
      _mm512_storeu_si512(to + which * kRowStride,
                          every_second(_mm512_loadu_si512(from), _mm512_loadu_si512(from + kPanel), first));
    };
    if (column % 2 != 0) put(c++, 1);
    for (; c + 2 <= count; c += 2) {
      put(c, 0);
      put(c + 1, 1);
    }
    if (c < count) put(c, 0);
    return;
  }
#else
  if (values == kPanel) {
    for (; c < count; ++c) {
      const bf16* from = panel + ((column + c) & ~int64_t{1}) * kPanel + ((column + c) & 1);
      bf16 row[kPanel];
      for (int64_t i = 0; i < kPanel; ++i) row[i] = from[2 * i];
      __builtin_memcpy(to + c * kRowStride, row, sizeof row);
    }
    return;
  }
#endif
  for (; c < count; ++c) {
    const bf16* from = panel + ((column + c) & ~int64_t{1}) * kPanel + ((column + c) & 1);
    bf16 row[kPanel];
    for (int64_t i = 0; i < values; ++i) row[i] = from[2 * i];
    if (values % 2 != 0) row[values] = 0;
    __builtin_memcpy(to + c * kRowStride, row, divide_up(values, 2) * 4);
  }
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
