// See formats.h.
#include "kernels/quantised/formats.h"

#include "kernels/quantised/blocks.h"
#include "kernels/quantised/panel.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

template <class F>
void expand(const uint8_t* panel, int64_t size, int64_t begin, int64_t end, uint32_t* to) {
  each_group<F>(panel, size, begin, end, [&](const uint8_t* block, int group, int64_t k) TILEWISE_INLINED {
    prefetch_group<F>(block, group);
    if (k >= begin && k + kGroup <= end) return expand_group<F>(block, group, to + (k - begin) / 2 * kPanel);
    alignas(64) uint32_t words[kGroupSteps * kPanel];
    expand_group<F>(block, group, words);
    const int64_t first = larger(begin, k), last = smaller(end, k + kGroup);
    __builtin_memcpy(to + (first - begin) / 2 * kPanel, words + (first - k) / 2 * kPanel,
                     divide_up(last - first, 2) * kPanel * 4);
  });
}

template <class F>
void read_row(const uint8_t* panel, int64_t size, int64_t row, int64_t cols, bf16* to) {
  each_group<F>(panel, size, 0, cols, [&](const uint8_t* block, int group, int64_t k) TILEWISE_INLINED {
    const Planes<F> planes(block, group);
    const RowScales scales = scales_of_row<F>(block, group, static_cast<int>(row));
    for (int first = 0; first < smaller(kGroup, cols - k); first += 8) {
      IntLanes8 codes;
      for (int i = 0; i < 8; ++i)
        codes[i] = planes.code((first + i) / 2, place_of_lane<F>(static_cast<int>(2 * row) + i % 2));
      const int h = first / 16;
      const Lanes8 d = scales.d[h] - Lanes8{}, m = scales.m[h] - Lanes8{};  // subtracting 0 keeps the sign of 0
      const Lanes8 numbers = numbers_of<F>(codes, d, m);
      for (int i = 0; i < smaller(8, cols - k - first); ++i) to[k + first + i] = round_to_bf16(numbers[i]);
    }
  });
}

/// The codes of one row in the planes of a group.
template <class F>
TILEWISE_INLINE void store_codes(const uint8_t* codes, int row, uint8_t* group) {
  using Of = Planes<F>;
  for (int parity = 0; parity < 2; ++parity) {
    const int place = place_of_lane<F>(2 * row + parity);
    const auto store = [&]<int Bits>(std::integral_constant<int, Bits>, int at, int shift) TILEWISE_INLINED {
      constexpr int kSteps = 16 / Bits;
      for (int i = 0; i < Bits; ++i) {
        unsigned number = 0;
        for (int t = 0; t < kSteps; ++t)
          number |= (codes[2 * (kSteps * i + t) + parity] >> shift & ((1u << Bits) - 1)) << Bits * t;
        const auto stored = static_cast<uint16_t>(number);
        __builtin_memcpy(group + at + (i * kGroupLanes + place) * 2, &stored, sizeof stored);
      }
    };
    if constexpr (F::kBits == 8) store(std::integral_constant<int, 8>(), 0, 0);
    if constexpr (F::kHas4) store(std::integral_constant<int, 4>(), 0, 0);
    if constexpr (F::kHas2) store(std::integral_constant<int, 2>(), Of::kAt2, F::kShift2);
    if constexpr (F::kHas1) store(std::integral_constant<int, 1>(), Of::kAt1, F::kShift1);
  }
}

/// Whether products of a block's scales and codes are finite numbers of bf16. Scales in bf16 and fp32 have a limit.
template <class F>
bool is_finite_block(const uint8_t* halves, const uint8_t* bytes, const uint8_t* codes, int64_t size) {
  constexpr float kMost = F::kHasBf16Scales || F::kHasF32Scales ? 1e30f : 65504.0f;
  bool is_finite = true;
  const auto check = [&](float scale) { is_finite = is_finite && scale >= -kMost && scale <= kMost; };
  for (int h = 0; h < F::kHalves; ++h) {
    uint16_t half;
    __builtin_memcpy(&half, halves + 2 * h, 2);
    check(F::kHasBf16Scales ? widen(half) : widen_half(half));
  }
  if constexpr (F::kHasF32Scales) {
    float scale;
    __builtin_memcpy(&scale, bytes, 4);
    check(scale);
  }
  if constexpr (F::kMeaning == Meaning::kFloat8) {
    uint8_t is_nan = 0;
    for (int64_t i = 0; i < size; ++i) is_nan |= (codes[i] & 0x7f) == 0x7f;
    is_finite = is_finite && !is_nan;
  }
  return is_finite;
}

template <class F>
bool pack(const uint8_t* rows, int64_t stride, int64_t num_rows, int64_t at_run_time, int64_t num_blocks,
          uint8_t* panel) {
  const BlockSize<F> size(at_run_time);
  bool is_finite = true;
  for (int64_t b = 0; b < num_blocks; ++b, panel += size.bytes) {
    if (num_rows < kPanel) __builtin_memset(panel, 0, size.bytes);
    for (int row = 0; row < static_cast<int>(num_rows); ++row) {
      uint8_t codes[F::kBlock == 0 ? kMostBlock : F::kBlock], halves[2 * F::kHalves + 1], bytes[F::kBytes + 1];
      F::unpack(rows + row * stride + b * (size.bytes / kPanel), codes, halves, bytes, static_cast<int>(size.elements));
      is_finite &= is_finite_block<F>(halves, bytes, codes, size.elements);
      for (int h = 0; h < F::kHalves; ++h) __builtin_memcpy(panel + 2 * (kPanel * h + row), halves + 2 * h, 2);
      uint8_t* const byte_rows = panel + 2 * kPanel * F::kHalves;
      for (int i = 0; i < F::kBytes; ++i) byte_rows[kPanel * i + row] = bytes[i];
      for (int g = 0; g < size.elements / kGroup; ++g)
        store_codes<F>(codes + kGroup * g, row, panel + F::kHeadBytes + g * F::kGroupBytes);
    }
  }
  return is_finite;
}

/// See QuantisedFormat::expand_codes.
template <class F>
void expand_all_codes(const uint8_t* panel, int64_t size, int64_t begin, int64_t end, uint32_t* to) {
  each_group<F>(panel, size, begin, end, [&](const uint8_t* block, int group, int64_t) TILEWISE_INLINED {
    prefetch_group<F>(block, group);
    expand_codes<F>(block, group, to);
    to += kGroupSteps * kGroupedStep;
  });
}

#if defined(__AVX512BF16__)
/// Adds the products of a step, whose words of 16 `Parts` lanes are `low` and `high`, to the sums of R rows.
template <int R, int Parts>
TILEWISE_INLINE void add_step(__m512 (&sums)[R][Parts], const uint32_t* words, __m512i low, __m512i high) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const __m512bh factor = (__m512bh)_mm512_set1_epi32(static_cast<int>(words[r * kRowStride]));
    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], factor, (__m512bh)low);
    if constexpr (Parts == 2) sums[r][1] = _mm512_dpbf16_ps(sums[r][1], factor, (__m512bh)high);
  }
}

/// Adds the products of a group, from `words` of the first row on, to the totals of R rows. Steps [from, to) count. `x`
/// is the sum of the activations of the first row.
template <class F, int R, int Parts>
TILEWISE_INLINE void add_group_of_rows(const uint8_t* block, int group, int half, const uint32_t* words, int64_t from,
                                       int64_t to, const uint32_t* x, __m512 (&totals)[R][Parts]) {
  __m512 sums[R][Parts] = {};
  const auto multiply = [&](int64_t step, __m512i low, __m512i high)
                            TILEWISE_INLINED { add_step(sums, words + step, low, high); };
  if (to - from == kGroupSteps) {
    each_code_step<F, Parts>(block, group, half, multiply);
  } else {
    alignas(64) uint32_t expanded[kGroupSteps * kGroupedStep];
    expand_codes<F>(block, group, expanded);
    for (int64_t i = from; i < to; ++i) {
      const uint32_t* lanes = expanded + i * kPanel + 16 * half;
      multiply(i, _mm512_loadu_si512(lanes), _mm512_loadu_si512(lanes + (Parts == 1 ? 0 : 16)));
    }
  }
  for (int p = 0; p < Parts; ++p) {
    const GroupScales<F> scales(block, group, half + p);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      totals[r][p] = add_group<kHasMinimum<F>, F::kMeaning == Meaning::kZeroPoint>(
          totals[r][p], sums[r][p], (__m512)scales.d, (__m512)scales.m,
          _mm512_set1_ps(bits_of<float>(x[r * kRowStride])));
  }
}

/// A product of up to R rows that reads a panel and keeps its words in registers: the same sums in the same order as
/// those of microkernels.cc. Many rows take half of the panel's lanes at a time, so that sums stay in registers, too.
template <class F, int R, int Parts, bool IsGrouped>
void few_rows(const MicroArgs& x, int64_t size) {
  const auto rows = static_cast<int>(x.rows);
  for (int half = 0; half < 2; half += Parts) {
    __m512 acc[R][Parts];
    const auto at = [half](auto* block, int r, int part)
                        TILEWISE_INLINED { return block + r * kPanel + 16 * (half + part); };
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < Parts; ++p)
        acc[r][p] = x.init && r < rows ? _mm512_loadu_ps(at(x.init, r, p)) : _mm512_setzero_ps();
    float* stack = x.stack;
    for (const Segment* s = x.segments; s != x.segments + x.num_segments; ++s) {
      const uint32_t* a = x.a + s->a;
      const bool is_last = s + 1 == x.segments + x.num_segments;
      if (is_last) expect(x.expected);
      const int64_t begin = s->b / kPanel * 2, end = begin + 2 * s->steps;
      const auto multiply = [&](int64_t step, __m512i low, __m512i high)
                                TILEWISE_INLINED { add_step(acc, a + step, low, high); };
      each_group<F>(reinterpret_cast<const uint8_t*>(x.b[s->term]), size, begin, end,
                    [&](const uint8_t* block, int group, int64_t k) TILEWISE_INLINED {
                      if (half == 0) prefetch_group<F>(block, group);
                      const int64_t first = (k - begin) / 2;
                      if constexpr (IsGrouped) {
                        const uint32_t* sum = x.a + word_of_group(s->a + larger(first, 0));
                        return add_group_of_rows<F>(block, group, half, a + first, larger(-first, 0),
                                                    smaller(kGroupSteps, s->steps - first), sum, acc);
                      }
                      if (k >= begin && k + kGroup <= end)
                        return each_step<F, Parts>(block, group, half,
                                                   [&](int step, __m512i low, __m512i high)
                                                       TILEWISE_INLINED { multiply(first + step, low, high); });
                      alignas(64) uint32_t expanded[kGroupSteps * kPanel];
                      expand_group<F>(block, group, expanded);
                      for (int64_t i = larger(first, 0); i < smaller(first + kGroupSteps, s->steps); ++i) {
                        const uint32_t* words = expanded + (i - first) * kPanel + 16 * half;
                        multiply(i, _mm512_loadu_si512(words), _mm512_loadu_si512(words + (Parts == 1 ? 0 : 16)));
                      }
                    });
      if (!s->ends && !(is_last && x.out)) continue;
      const float* addend = s->ends && s->addend >= 0 ? x.addend + s->addend : nullptr;
      const int pops = s->ends ? s->pops : 0;
      const bool pushes = s->ends && s->push;
      const float* const top = stack;
      stack -= static_cast<int64_t>(pops) * rows * kPanel;
      float* const to = pushes ? stack : is_last ? x.out : nullptr;
      const int64_t pitch = pushes ? kPanel : x.out_pitch;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < Parts; ++p) {
          __m512 v = acc[r][p];
          if (r < rows) {
            if (addend) v = v + _mm512_loadu_ps(at(addend, r, p));
            for (int64_t pop = 1; pop <= pops; ++pop) v = _mm512_loadu_ps(at(top - pop * rows * kPanel, r, p)) + v;
            if (to) _mm512_storeu_ps(to + r * pitch + 16 * (half + p), v);
          }
          acc[r][p] = pushes ? _mm512_setzero_ps() : v;
        }
      if (pushes) stack += rows * kPanel;
    }
    if (x.num_segments > 0 || !x.out) continue;
    for (int r = 0; r < rows; ++r)
      for (int p = 0; p < Parts; ++p) _mm512_storeu_ps(x.out + r * x.out_pitch + 16 * (half + p), acc[r][p]);
  }
}
template <class F, bool IsGrouped>
constexpr QuantisedFormat::FewRows few_rows_of(int rows) {
  return rows == 1   ? few_rows<F, 1, 2, IsGrouped>
         : rows == 2 ? few_rows<F, 2, 2, IsGrouped>
         : rows <= 4 ? few_rows<F, 4, 2, IsGrouped>
         : rows <= 8 ? few_rows<F, 8, 1, IsGrouped>
                     : few_rows<F, 16, 1, IsGrouped>;
}
#endif

/// `block` is for formats with blocks of several sizes.
template <class F>
constexpr QuantisedFormat entry(const char* name, int64_t block = F::kBlock) {
  const int64_t bytes = (F::kHeadBytes + block / kGroup * F::kGroupBytes) / kPanel;
  QuantisedFormat format = {name, block, bytes, expand<F>, read_row<F>, pack<F>, {}, {}};
  if constexpr (kHasGroupedProduct<F>)
    format.grouped = {expand_all_codes<F>, kHasMinimum<F>, F::kMeaning == Meaning::kZeroPoint, {}};
#if defined(__AVX512BF16__)
  for (int rows = 1; rows <= kGroupedRows; ++rows) {
    if constexpr (kRegisterRows > 0) format.few[rows - 1] = few_rows_of<F, false>(rows);
    if constexpr (kHasGroupedProduct<F>) format.grouped.few[rows - 1] = few_rows_of<F, true>(rows);
  }
#endif
  return format;
}

}  // namespace

const QuantisedFormat kFormats[kNumFormats] = {
    entry<Q8_0>("q8_0"),
    entry<Q4_0>("q4_0"),
    entry<Q4_1>("q4_1"),
    entry<Q5_0>("q5_0"),
    entry<Q5_1>("q5_1"),
    entry<Q2K>("q2_k"),
    entry<Q3K>("q3_k"),
    entry<Q4K>("q4_k"),
    entry<Q5K>("q5_k"),
    entry<Q6K>("q6_k"),
    entry<IQ4NL>("iq4_nl"),
    entry<IQ4XS>("iq4_xs"),
    entry<MXFP4>("mxfp4"),
    entry<Integers<4, false>>("int4_g32", 32),
    entry<Integers<4, true>>("int4_g32_bf16", 32),
    entry<Integers<4, false>>("int4_g64", 64),
    entry<Integers<4, true>>("int4_g64_bf16", 64),
    entry<Integers<4, false>>("int4_g128", 128),
    entry<Integers<4, true>>("int4_g128_bf16", 128),
    entry<Integers<8, false>>("int8_g128", 128),
    entry<Integers<8, true>>("int8_g128_bf16", 128),
    entry<Integers<8, false>>("int8_g512", 512),
    entry<Integers<8, true>>("int8_g512_bf16", 512),
    entry<Float8<false>>("fp8_e4m3_g128_bf16", 128),
    entry<Float8<true>>("fp8_e4m3_g128_f32", 128),
    entry<Float8<false>>("fp8_e4m3_g512_bf16", 512),
    entry<Float8<true>>("fp8_e4m3_g512_f32", 512),
};

QuantisedFns quantised_fns() {
  QuantisedFns fns;
  fns.num_formats = kNumFormats;
  fns.format = [](int64_t number) {
    return QuantisedBlock{kFormats[number].name, kFormats[number].block, kFormats[number].block_bytes};
  };
  fns.pack = [](int64_t number, const std::byte* rows, int64_t stride, int64_t num_rows, int64_t num_blocks,
                std::byte* panel) {
    const QuantisedFormat& format = kFormats[number];
    return format.pack(reinterpret_cast<const uint8_t*>(rows), stride, num_rows, format.block, num_blocks,
                       reinterpret_cast<uint8_t*>(panel));
  };
  fns.read_row = [](int64_t number, const std::byte* panel, int64_t row, int64_t cols, uint16_t* to) {
    const QuantisedFormat& format = kFormats[number];
    format.read_row(reinterpret_cast<const uint8_t*>(panel), format.block, row, cols, to);
  };
  return fns;
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
