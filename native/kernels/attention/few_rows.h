// Attention of few query rows over one KV block, with keys and values read in place, for decoding.
//
// Packing a KV block takes several times as long as its products with few rows. So squares of 16 positions by 16 words
// of keys are transposed in registers and used there, and so are pairs of rows of values. Every product is the same as
// with packing, in the same order, so the bits are the same. It is used only if a vector has 16 lanes and products use
// whole vectors; otherwise KV blocks are packed.
#pragma once
#include "kernels/attention/kv_blocks.h"
#include "kernels/transpose.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// The maximum number of rows for this path: their accumulators and a transposed square must fit the registers. With
/// tile registers KV blocks are packed anyway, so it is a whole block.
#if defined(__AMX_BF16__)
template <class D>
inline constexpr int kFewQueries = kGroupOf<typename D::Dot> == 1 ? 8 : kAttentionRows<D>;
#elif defined(__AVX512BW__)
template <class D>
inline constexpr int kFewQueries = 8;
#else
template <class D>
inline constexpr int kFewQueries = 0;
#endif

/// Contiguous cache lines to prefetch, a few at a time: more at once would stall the computation.
struct Lines {
  const char* next = nullptr;
  int64_t count = 0;

  TILEWISE_MEMBER void prefetch(int64_t at_a_time) {
    const int64_t now = smaller(at_a_time, count);
    for (int64_t i = 0; i < now; ++i, next += 64) __builtin_prefetch(next, 0, 2);
    count -= now;
  }
  /// Lines per call, so that `times` calls prefetch all of them.
  int64_t share(int64_t times) const { return divide_up(count, times); }
};

/// Keys and values to prefetch while those of another head are read.
struct Upcoming {
  Lines k, v;

  template <class T>
  static Upcoming of(const T* k, const T* v, int64_t elements) {
    const int64_t lines = divide_up(elements * static_cast<int64_t>(sizeof(T)), 64);
    return {{reinterpret_cast<const char*>(k), lines}, {reinterpret_cast<const char*>(v), lines}};
  }
  void prefetch_all() {
    k.prefetch(k.count);
    v.prefetch(v.count);
  }
};

#if defined(__AVX512BW__)

/// scores[panel][R][32] = R rows q (packed by pack_row_blocks) times `count` rows of keys, each of `steps` words, a
/// multiple of 16.
template <class D, int R>
void score_few(const uint32_t* q, const typename D::T* k, int64_t stride, int64_t count, int64_t steps, float* scores,
               Lines& upcoming) {
  const auto pitch = stride * static_cast<int64_t>(sizeof(typename D::T));
  const int64_t at_a_time = upcoming.share(divide_up(count, 16) * steps / 16);
  for (int64_t first = 0; first < count; first += 16) {
    NativeF acc[R][1] = {};
    const int64_t rows = smaller(16, count - first);
    const auto* base = reinterpret_cast<const char*>(k + first * stride);
    for (int64_t s = 0; s < steps; s += 16) {
      __m512i words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        words[i] = i < rows ? _mm512_loadu_si512(base + i * pitch + 4 * s) : _mm512_setzero_si512();
      upcoming.prefetch(at_a_time);
      transpose16(words);
      const uint32_t* a = q + s / kBlockSteps * KvBlockShape<D>::block_words + s % kBlockSteps;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const NativeF b[1] = {(NativeF)words[i]};
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) D::Dot::step(acc[r], a[r * kRowStride + i], b);
      }
    }
    for (int r = 0; r < R; ++r)
      native_store(scores + (first / kPanel * kAttentionRows<D> + r) * kPanel + first % kPanel, acc[r][0]);
  }
}

/// Loads 32 columns of one step of values; `second` nullptr: zeros.
TILEWISE_INLINE void load_step(NativeF (&words)[2], const float* first, const float*) {
  words[0] = native_load(first);
  words[1] = native_load(first + kLanes);
}
TILEWISE_INLINE void load_step(NativeF (&words)[2], const bf16* first, const bf16* second) {
  const __m512i a = _mm512_loadu_si512(first);
  const __m512i b = second ? _mm512_loadu_si512(second) : _mm512_setzero_si512();
  words[0] = (NativeF)interleave<0>(a, b);
  words[1] = (NativeF)interleave<1>(a, b);
}

/// P panels of sums[panel][R][32] = sums * `scale` + R rows p of `used` factors times `count` rows of values.
template <class D, int R, int P>
TILEWISE_INLINE void add_panels(const uint32_t* p, const typename D::T* v, int64_t stride, int64_t count, int64_t used,
                                const float* scale, float* sums, Lines& upcoming, int64_t at_a_time) {
  NativeF acc[R][P][2];
  const auto at = [sums](int r, int b, int j) { return sums + (b * kAttentionRows<D> + r) * kPanel + j * kLanes; };
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < P; ++b)  // + 0 turns -0 into +0
      for (int j = 0; j < 2; ++j) acc[r][b][j] = fused(native_set(scale[r]), native_load(at(r, b, j)), NativeF{});
  const int64_t steps = divide_up(used, D::kPerStep);
  for (int64_t s = 0; s < steps; ++s) {
    if (s % 4 == 0) upcoming.prefetch(at_a_time);
    const auto* first = v + s * D::kPerStep * stride;
    const auto* second = s * D::kPerStep + D::kPerStep <= count ? first + (D::kPerStep - 1) * stride : nullptr;
#pragma GCC unroll 2
    for (int b = 0; b < P; ++b) {
      NativeF words[2];
      load_step(words, first + b * kPanel, second ? second + b * kPanel : nullptr);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) D::Dot::step(acc[r][b], p[r * kRowStride + s], words);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < P; ++b)
      for (int j = 0; j < 2; ++j) native_store(at(r, b, j), acc[r][b][j]);
}

/// The same for all of a head's panels.
template <class D, int R>
void add_few(const uint32_t* p, const typename D::T* v, int64_t stride, int64_t count, int64_t used, int64_t panels,
             const float* scale, float* sums, Lines& upcoming) {
  constexpr int kTogether = R <= 4 ? 2 : 1;  // more independent additions, as registers permit
  const int64_t at_a_time = upcoming.share(divide_up(divide_up(used, D::kPerStep), 4) * divide_up(panels, kTogether));
  int64_t b = 0;
  for (; b + kTogether <= panels; b += kTogether)
    add_panels<D, R, kTogether>(p, v + b * kPanel, stride, count, used, scale, sums + b * kAttentionRows<D> * kPanel,
                                upcoming, at_a_time);
  for (; b < panels; ++b)
    add_panels<D, R, 1>(p, v + b * kPanel, stride, count, used, scale, sums + b * kAttentionRows<D> * kPanel, upcoming,
                        at_a_time);
}

/// For tile registers: packs a KV block of one head; its rows are a multiple of 16 words.
template <class D>
void pack_few(const KvBlockShape<D>& shape, uint32_t* keys, uint32_t* values, const typename D::T* k, int64_t k_stride,
              const typename D::T* v, int64_t v_stride, int64_t count, Upcoming& upcoming) {
  const auto pitch = k_stride * static_cast<int64_t>(sizeof(typename D::T));
  const int64_t keys_at_a_time = upcoming.k.share(divide_up(count, kLanes) * shape.dim_steps / kLanes);
  const int64_t values_at_a_time = upcoming.v.share(divide_up(count, 4 * D::kPerStep));
  for (int64_t first = 0; first < count; first += kLanes) {
    const auto* base = reinterpret_cast<const char*>(k + first * k_stride);
    uint32_t* to = keys + first / kPanel * kPanel * shape.dim_steps + first % kPanel;
    for (int64_t s = 0; s < shape.dim_steps; s += kLanes) {
      upcoming.k.prefetch(keys_at_a_time);
      transpose_words(to + s * kPanel, kPanel, base + 4 * s, pitch, smaller(kLanes, count - first), kLanes);
    }
  }
  for (int64_t t = 0; t < count; t += D::kPerStep, values += kPanel) {
    if (t % (4 * D::kPerStep) == 0) upcoming.v.prefetch(values_at_a_time);
    const auto* first = v + t * v_stride;
    const auto* second = t + 1 < count ? first + v_stride : nullptr;
    for (int64_t p = 0; p < shape.dim_panels; ++p) {
      uint32_t* to = values + p * shape.kv_block_steps * kPanel;
      if (second) {
        whole_step<kPanel>(to, first + p * kPanel, second + p * kPanel);
      } else {
        partial_step<kPanel>(to, first + p * kPanel, second, kPanel);
      }
    }
  }
}

template <class D, int... R>
struct FewTable {
  static constexpr decltype(&score_few<D, 1>) kScore[] = {score_few<D, R + 1>...};
  static constexpr decltype(&add_few<D, 1>) kAdd[] = {add_few<D, R + 1>...};
};
template <class D>
using Few = FewTable<D, 0, 1, 2, 3, 4, 5, 6, 7>;

#endif

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
