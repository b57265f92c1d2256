// See formats.h.
#include "kernels/quantised/formats.h"

#include "kernels/quantised/blocks.h"
#include "kernels/quantised/panel.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

template <class F>
void expand(const uint8_t* panel, int64_t begin, int64_t end, uint32_t* to) {
  each_group<F>(panel, begin, end, [&](const uint8_t* block, int group, int64_t k) TILEWISE_INLINED {
    prefetch_ahead<F>(block, group);
    if (k >= begin && k + kGroup <= end) return expand_group<F>(block, group, to + (k - begin) / 2 * kPanel);
    alignas(64) uint32_t words[kGroupSteps * kPanel];
    expand_group<F>(block, group, words);
    const int64_t first = larger(begin, k), last = smaller(end, k + kGroup);
    __builtin_memcpy(to + (first - begin) / 2 * kPanel, words + (first - k) / 2 * kPanel,
                     divide_up(last - first, 2) * kPanel * 4);
  });
}

template <class F>
void read_row(const uint8_t* panel, int64_t row, int64_t cols, bf16* to) {
  each_group<F>(panel, 0, cols, [&](const uint8_t* block, int group, int64_t k) TILEWISE_INLINED {
    const Planes<F> planes(block, group);
    const RowScales scales = scales_of_row<F>(block, group, static_cast<int>(row));
    for (int i = 0; i < smaller(kGroup, cols - k); ++i) {
      const int code = planes.code(i / 2, static_cast<int>(2 * row) + i % 2);
      to[k + i] = round_to_bf16(number_of<F>(code, scales.d[i / 16], scales.m[i / 16]));
    }
  });
}

/// The codes of one row in the planes of a group.
template <class F>
TILEWISE_INLINE void store_codes(const uint8_t* codes, int row, uint8_t* group) {
  if constexpr (F::kBits == 8) {
    for (int step = 0; step < kGroupSteps; ++step)
      __builtin_memcpy(group + step * kGroupLanes + 2 * row, codes + 2 * step, 2);
    return;
  }
  const auto put = [row](uint8_t* plane, int parity, auto word) TILEWISE_INLINED {
    __builtin_memcpy(plane + (2 * row + parity) * sizeof word, &word, sizeof word);
  };
  if constexpr (F::kHas4) {
    for (int h = 0; h < 2; ++h, group += kGroupLanes * 4)
      for (int parity = 0; parity < 2; ++parity) {
        uint32_t word = 0;
        for (int t = 0; t < 8; ++t) word |= static_cast<uint32_t>(codes[16 * h + 2 * t + parity] & 15) << 4 * t;
        put(group, parity, word);
      }
  }
  if constexpr (F::kHas2) {
    for (int parity = 0; parity < 2; ++parity) {
      uint32_t word = 0;
      for (int s = 0; s < 16; ++s) word |= static_cast<uint32_t>(codes[2 * s + parity] >> F::kShift2 & 3) << 2 * s;
      put(group, parity, word);
    }
    group += kGroupLanes * 4;
  }
  if constexpr (F::kHas1) {
    for (int parity = 0; parity < 2; ++parity) {
      uint32_t word = 0;
      for (int s = 0; s < 16; ++s) word |= static_cast<uint32_t>(codes[2 * s + parity] >> F::kShift1 & 1) << s;
      put(group, parity, static_cast<uint16_t>(word));
    }
  }
}

template <class F>
bool pack(const uint8_t* rows, int64_t stride, int64_t num_rows, int64_t num_blocks, uint8_t* panel) {
  constexpr uint16_t kExponent = F::kHasBf16Scales ? 0x7f80 : 0x7c00;
  bool is_finite = true;
  for (int64_t b = 0; b < num_blocks; ++b, panel += F::kPanelBytes) {
    if (num_rows < kPanel) __builtin_memset(panel, 0, F::kPanelBytes);
    for (int row = 0; row < static_cast<int>(num_rows); ++row) {
      uint8_t codes[F::kBlock], halves[2 * F::kHalves + 1], bytes[F::kBytes + 1];
      F::unpack(rows + row * stride + b * F::kFileBytes, codes, halves, bytes);
      for (int h = 0; h < F::kHalves; ++h) {
        uint16_t half;
        __builtin_memcpy(&half, halves + 2 * h, 2);
        is_finite = is_finite && (half & kExponent) != kExponent;
        __builtin_memcpy(panel + 2 * (kPanel * h + row), &half, 2);
      }
      uint8_t* const byte_rows = panel + 2 * kPanel * F::kHalves;
      for (int i = 0; i < F::kBytes; ++i) byte_rows[kPanel * i + row] = bytes[i];
      for (int g = 0; g < F::kBlock / kGroup; ++g)
        store_codes<F>(codes + kGroup * g, row, panel + F::kHeadBytes + g * F::kGroupBytes);
    }
  }
  return is_finite;
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
/// A product of R rows that reads a panel and keeps its words in registers. The same sums in the same order as those of
/// the micro-kernels in microkernels.cc.
template <class F, int R>
void few_rows(const MicroArgs& x) {
  __m512 acc[R][2];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2; ++j)
      acc[r][j] = x.init ? _mm512_loadu_ps(x.init + r * kPanel + 16 * j) : _mm512_setzero_ps();
  float* stack = x.stack;
  for (const Segment* s = x.segments; s != x.segments + x.num_segments; ++s) {
    const uint32_t* a = x.a + s->a;
    const bool is_last = s + 1 == x.segments + x.num_segments;
    if (is_last) expect(x.expected);
    const int64_t begin = s->b / kPanel * 2, end = begin + 2 * s->steps;
    const auto multiply = [&](int64_t step, __m512i low, __m512i high) TILEWISE_INLINED {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512bh factor = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r * kRowStride + step]));
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], factor, (__m512bh)low);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], factor, (__m512bh)high);
      }
    };
    each_group<F>(reinterpret_cast<const uint8_t*>(x.b[s->term]), begin, end,
                  [&](const uint8_t* block, int group, int64_t k) TILEWISE_INLINED {
                    prefetch_ahead<F>(block, group);
                    const int64_t first = (k - begin) / 2;
                    if (k >= begin && k + kGroup <= end) {
                      each_step<F>(block, group, [&](int step, __m512i low, __m512i high) TILEWISE_INLINED {
                        multiply(first + step, low, high);
                      });
                      return;
                    }
                    alignas(64) uint32_t words[kGroupSteps * kPanel];
                    expand_group<F>(block, group, words);
                    for (int64_t step = larger(first, 0); step < smaller(first + kGroupSteps, s->steps); ++step) {
                      const uint32_t* at = words + (step - first) * kPanel;
                      multiply(step, _mm512_load_si512(at), _mm512_load_si512(at + 16));
                    }
                  });
    if (!s->ends && !(is_last && x.out)) continue;
    const float* addend = s->ends && s->addend >= 0 ? x.addend + s->addend : nullptr;
    const int pops = s->ends ? s->pops : 0;
    const bool pushes = s->ends && s->push;
    const float* const top = stack;
    stack -= pops * R * kPanel;
    float* const to = pushes ? stack : is_last ? x.out : nullptr;
    const int64_t pitch = pushes ? kPanel : x.out_pitch;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 2; ++j) {
        __m512 v = acc[r][j];
        const int64_t at = r * kPanel + 16 * j;
        if (addend) v = v + _mm512_loadu_ps(addend + at);
        for (int pop = 1; pop <= pops; ++pop) v = _mm512_loadu_ps(top - pop * R * kPanel + at) + v;
        if (to) _mm512_storeu_ps(to + r * pitch + 16 * j, v);
        acc[r][j] = pushes ? _mm512_setzero_ps() : v;
      }
    if (pushes) stack += R * kPanel;
  }
  if (x.num_segments > 0 || !x.out) return;
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2; ++j) _mm512_storeu_ps(x.out + r * x.out_pitch + 16 * j, acc[r][j]);
}
#define TILEWISE_FEW(F) {few_rows<F, 1>, few_rows<F, 2>, few_rows<F, 3>, few_rows<F, 4>}
#else
#define TILEWISE_FEW(F) \
  {                     \
  }
#endif

#define TILEWISE_FORMAT(F, name) {name, F::kBlock, F::kFileBytes, expand<F>, read_row<F>, pack<F>, TILEWISE_FEW(F)}

}  // namespace

const QuantisedFormat kFormats[kNumFormats] = {
    TILEWISE_FORMAT(Q8_0, "q8_0"),   TILEWISE_FORMAT(Q4_0, "q4_0"),    TILEWISE_FORMAT(Q4_1, "q4_1"),
    TILEWISE_FORMAT(Q5_0, "q5_0"),   TILEWISE_FORMAT(Q5_1, "q5_1"),    TILEWISE_FORMAT(Q2K, "q2_k"),
    TILEWISE_FORMAT(Q3K, "q3_k"),    TILEWISE_FORMAT(Q4K, "q4_k"),     TILEWISE_FORMAT(Q5K, "q5_k"),
    TILEWISE_FORMAT(Q6K, "q6_k"),    TILEWISE_FORMAT(IQ4NL, "iq4_nl"), TILEWISE_FORMAT(IQ4XS, "iq4_xs"),
    TILEWISE_FORMAT(MXFP4, "mxfp4"),
};

QuantisedFns quantised_fns() {
  QuantisedFns fns;
  fns.num_formats = kNumFormats;
  fns.format = [](int64_t number) {
    return QuantisedBlock{kFormats[number].name, kFormats[number].block, kFormats[number].block_bytes};
  };
  fns.pack = [](int64_t number, const std::byte* rows, int64_t stride, int64_t num_rows, int64_t num_blocks,
                std::byte* panel) {
    return kFormats[number].pack(reinterpret_cast<const uint8_t*>(rows), stride, num_rows, num_blocks,
                                 reinterpret_cast<uint8_t*>(panel));
  };
  fns.read_row = [](int64_t number, const std::byte* panel, int64_t row, int64_t cols, uint16_t* to) {
    kFormats[number].read_row(reinterpret_cast<const uint8_t*>(panel), row, cols, to);
  };
  return fns;
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
