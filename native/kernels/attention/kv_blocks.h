// Shared by attention forward and backward: the KV block, its packed shapes and its masked scores.
#pragma once
#include "kernels/amx.h"
#include "kernels/operands.h"
#include "kernels/pack.h"
#include "kernels/register_block.h"
#include "kernels/tree.h"

// For the scratch memory of attention, in words: panels of a head, and a block of rows that is packed along it with one
// word per element, or one per two elements.
// define head_panels(dim) = -(-dim // 32)
// define row_block_words(dim, rows) = 2 * -(-dim // (2 * 128)) * rows * 144

namespace tilewise::kernels::TILEWISE_ISA_NS {

inline constexpr int64_t kKvBlock = 64;

/// The maximum number of rows of a product.
template <class D>
inline constexpr int64_t kRunRows = kRowsOf<typename D::Dot> < kLanes ? kRowsOf<typename D::Dot> : kLanes;

/// The maximum number of rows of a block: the state of each is one lane. A block is several runs of products, which
/// read a panel one after the other, the later ones from L1.
template <class D>
inline constexpr int64_t kAttentionRows = kLanes / kRunRows<D> * kRunRows<D>;

/// Words between packed rows.
template <class D>
inline constexpr int64_t kRowWords = kRowStride * kWordsOf<typename D::Dot>;

/// Values rounded to bf16, as fp32 words.
TILEWISE_INLINE IntLanes rounded_words(const Lanes& x) { return shift_left<16>(round_to_bf16(x)); }

#if defined(__AVX2__) && !defined(__AVX512F__)
/// Stores 16 neighbouring values in a packed row whose steps are two words.
TILEWISE_INLINE void store_widened(uint32_t* to, const Lanes& x) {
  constexpr int kOddFirst = 0xb1;
  TILEWISE_EACH_PART native_store(reinterpret_cast<float*>(to) + p * kNativeLanes,
                                  _mm256_permute_ps(x.part[p], kOddFirst));
}
#endif

/// Stores 32 factors in a packed row, from element `at` on.
template <class D>
TILEWISE_INLINE void store_row_factors(uint32_t* row, int64_t at, const Lanes& low, const Lanes& high) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (kWordsOf<typename D::Dot> > 1) {
    store_widened(row + at, as_float(rounded_words(low)));
    store_widened(row + at + kLanes, as_float(rounded_words(high)));
    return;
  }
#endif
  store_factors(reinterpret_cast<typename D::T*>(row) + at, low, high);
}

/// Calls run(first, count) for rows [0, rows) in runs of nearly equal length.
template <class D, class Run>
TILEWISE_INLINE void each_run(int64_t rows, const Run& run) {
  const int64_t runs = divide_up(rows, kRunRows<D>);
  for (int64_t i = 0; i < runs; ++i) run(rows * i / runs, rows * (i + 1) / runs - rows * i / runs);
}

/// Lanes beyond `limit` (index of the last visible lane) become `fill`.
TILEWISE_INLINE Lanes mask_scores(const Lanes& s, int64_t limit, float fill) {
  if (limit >= kLanes - 1) return s;
  const int32_t bound = limit < -1 ? -1 : static_cast<int32_t>(limit);
  return select(greater(lane_index(), set_int(bound)), set(fill), s);
}

/// Lanes before `begin` become `fill`.
TILEWISE_INLINE Lanes mask_before(const Lanes& s, int64_t begin, float fill) {
  if (begin <= 0) return s;
  const int32_t bound = static_cast<int32_t>(smaller(begin, kLanes));
  return select(greater(set_int(bound), lane_index()), set(fill), s);
}

/// Sum of the lanes of up to 16 vectors, each by sum_lanes' tree; lane r belongs to vector r.
struct SumOfLanes {
  static TILEWISE_MEMBER NativeF of(NativeF a, NativeF b) { return a + b; }
  static TILEWISE_MEMBER float reduce(const Lanes& x) { return sum_lanes(x); }
};
struct MaxOfLanes {
  static TILEWISE_MEMBER NativeF of(NativeF a, NativeF b) { return native_max(a, b); }
  static TILEWISE_MEMBER float reduce(const Lanes& x) { return max_lanes(x); }
};
template <class Op>
TILEWISE_INLINE Lanes reduce_rows(const Lanes (&x)[kLanes], int64_t rows) {
#if defined(__AVX512BW__)
  // Every level of the tree merges pairs of vectors; in this order the last level leaves the lanes sorted.
  (void)rows;
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 even = x[i % 2 * 8 + i / 2].part[0], odd = x[i % 2 * 8 + i / 2 + 4].part[0];
    a[i] = Op::of(_mm512_shuffle_f32x4(even, odd, 0x44), _mm512_shuffle_f32x4(even, odd, 0xee));
  }
  for (int i = 0; i < 4; ++i)
    b[i] =
        Op::of(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88), _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
  for (int i = 0; i < 2; ++i)
    c[i] = Op::of(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44), _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xee));
  return {Op::of(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd))};
#elif defined(__AVX2__)
  // The same for rows 0 to 7 and 8 to 15; row i + 4 is next to row i in the other half of a register.
  Lanes all = set(0.0f);
  for (int half = 0; half < 2 && half * 8 < rows; ++half) {
    __m256 a[4], b[2];
    for (int i = 0; i < 4; ++i) {
      const Lanes *low = x + half * 8 + i, *high = low + 4;
      const __m256 even = Op::of(low->part[0], low->part[1]), odd = Op::of(high->part[0], high->part[1]);
      a[i] = Op::of(_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31));
    }
    for (int i = 0; i < 2; ++i)
      b[i] = Op::of(_mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44), _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    all.part[half] = Op::of(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xdd));
  }
  return all;
#else
  float of[kLanes] = {};
  for (int64_t r = 0; r < rows; ++r) of[r] = Op::reduce(x[r]);
  return load(of);
#endif
}

/// Clears `count` columns of rows [first, end), which lie beyond the length of a sequence.
template <class T>
void clear_rows(const Tile<T>& tile, int64_t first, int64_t end, int64_t column, int64_t count) {
  for (int64_t r = first; r < end; ++r)
    __builtin_memset(tile.row(r) + column, 0, static_cast<size_t>(count) * sizeof(T));
}

/// Memory outside L2 that a later product reads. The current product prefetches a part of it.
struct Later {
  const void* data = nullptr;
  int64_t bytes = 0, part = 0, parts = 1;

  /// Lets a product of this many steps prefetch, two lines at a time.
  void prefetch(MicroArgs& call, int64_t steps) const {
    const int64_t lines = divide_up(divide_up(bytes, 64), parts), times = divide_up(lines, 2);
    if (!data || times == 0 || times > steps) return;
    call.ahead = static_cast<const char*>(data) + part * lines * 64;
    call.second = 64;
    call.pace = 128;
    int32_t every = 1;
    while (2 * every * times <= steps) every *= 2;
    call.every_ahead = every - 1;
  }
};

/// Packed sizes for one head dimension and blocks of kRows rows.
template <class D, int64_t kRows = kAttentionRows<D>>
struct KvBlockShape {
  using T = typename D::T;
  static constexpr int64_t kv_block_steps = kKvBlock / D::kPerStep;
  static constexpr int64_t block_words = kRows * kRowStride;
  int64_t dim_steps = 0, dim_panels = 0, dim_pad = 0, dim_blocks = 0;
  Segment dim_segments[16];  // segments of a product over the head dimension

  KvBlockShape() = default;
  explicit KvBlockShape(int64_t dim)
      : dim_steps(divide_up(dim, D::kPerStep)),
        dim_panels(divide_up(dim, kPanel)),
        dim_pad(dim_panels * kPanel),
        dim_blocks(divide_up(dim_steps, kBlockSteps)) {
    for (int64_t b = 0; b < dim_blocks; ++b) {
      const int64_t steps = smaller(dim_steps - b * kBlockSteps, kBlockSteps);
      dim_segments[b] = {b * block_words, b * kBlockSteps * kPanel, -1, 0, static_cast<int32_t>(steps), 0, 0, 0};
    }
  }

  /// Packs one row along the head dimension into the blocks of a row-major pack.
  void pack_row_blocks(uint32_t* to, const T* row, int64_t dim) const {
    constexpr int64_t kLength = kBlockSteps * D::kPerStep;
    for (int64_t b = 0; b < dim_blocks; ++b, to += block_words * kWordsOf<typename D::Dot>) {
      const int64_t begin = b * kLength, end = smaller(dim, begin + kLength);
#if defined(__AVX2__) && !defined(__AVX512F__)
      if constexpr (kWordsOf<typename D::Dot> > 1) {
        for (int64_t i = begin; i < end; i += kLanes) store_widened(to + i - begin, load(row + i, end - i));
        continue;
      }
#endif
      pack_row<D>(to, row, begin, end);
    }
  }

  /// Packs `count` rows of a KV block with the head dimension on lanes: [panel][KV block step][32]. Rows beyond `count`
  /// become zero, or stay unchanged unless IsCleared.
  template <bool IsCleared = true>
  void pack_along(uint32_t* to, const T* from, int64_t stride, int64_t dim, int64_t count) const {
    const int64_t steps = divide_up(count, D::kPerStep);
    for (int64_t p = 0; p < dim_panels; ++p, to += kv_block_steps * kPanel) {
      pack_panel_along<D, kPanel>(to, from + p * kPanel, stride, dim - p * kPanel, 0, count);
      if constexpr (!IsCleared) continue;
      for (int64_t i = steps * kPanel; i < kv_block_steps * kPanel; i += kLanes) store_int(to + i, set_int(0));
    }
  }

  /// out[rows][32] = a run of rows (packed by pack_row_blocks) times one panel, over the head dimension.
  void across_dim(int64_t rows, const uint32_t* a, const uint32_t* panel, float* out, const Later& later = {}) const {
    MicroArgs call = {dim_segments, dim_blocks, a, &panel, nullptr, nullptr, nullptr, nullptr, out};
    call.rows = rows;
    later.prefetch(call, dim_steps);
    micro_for<typename D::Dot, ALayout::kRows>(rows)(call);
  }
};

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
