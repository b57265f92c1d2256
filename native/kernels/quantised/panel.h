// Reads panels of quantised weights: whole steps as the words of a product, in bf16.
//
// Numbers are computed in fp32 with the operations of the format's definition, and rounded once to bf16. Where the
// product's instruction treats denormals as zero, rounding may do so, too.
#pragma once
#include "kernels/quantised/format.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Exact. Denormals are computed by a subtraction of normal numbers, so that flush-to-zero modes do not affect them.
TILEWISE_INLINE float widen_half(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu, shifted = magnitude << 13;
  const float small = bits_of<float>(shifted + 0x38800000u) - bits_of<float>(0x38800000u);
  const uint32_t normal = shifted + 0x38000000u, huge = shifted | 0x7f800000u;
  const uint32_t value = magnitude < 0x400u ? bits_of<uint32_t>(small) : magnitude < 0x7c00u ? normal : huge;
  return bits_of<float>(value | static_cast<uint32_t>(bits & 0x8000u) << 16);
}

/// The scales of a block: those of its halves in fp32, and its bytes.
template <class F>
struct Head {
  alignas(64) float halves[F::kHalves + 1][kPanel];
  const uint8_t (*bytes)[kPanel];

  TILEWISE_MEMBER explicit Head(const uint8_t* block) {
    for (int h = 0; h < F::kHalves; ++h) {
      const uint8_t* from = block + 2 * kPanel * h;
#if defined(__AVX512F__)
      if constexpr (!F::kHasBf16Scales) {
        for (int r = 0; r < kPanel; r += 16)
          _mm512_store_ps(halves[h] + r,
                          _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * r))));
        continue;
      }
#elif defined(__F16C__)
      if constexpr (!F::kHasBf16Scales) {
        for (int r = 0; r < kPanel; r += 8)
          _mm256_store_ps(halves[h] + r,
                          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * r))));
        continue;
      }
#endif
      for (int r = 0; r < kPanel; ++r) {
        uint16_t bits;
        __builtin_memcpy(&bits, from + 2 * r, 2);
        halves[h][r] = F::kHasBf16Scales ? widen(bits) : widen_half(bits);
      }
    }
    bytes = reinterpret_cast<const uint8_t (*)[kPanel]>(block + 2 * kPanel * F::kHalves);
  }
};

/// Scale and minimum of each of the 64 lanes, for the spans of a group.
struct GroupScales {
  alignas(64) float d[2][kGroupLanes];
  alignas(64) float m[2][kGroupLanes];
};

TILEWISE_INLINE void spread(const float* rows, float* lanes) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int half = 0; half < 2; ++half) {
    const __m512 x = _mm512_load_ps(rows + 16 * half);
    _mm512_store_ps(lanes + 32 * half, _mm512_permutexvar_ps(low, x));
    _mm512_store_ps(lanes + 32 * half + 16, _mm512_permutexvar_ps(high, x));
  }
#else
  for (int r = 0; r < kPanel; ++r) lanes[2 * r] = lanes[2 * r + 1] = rows[r];
#endif
}

template <class F>
inline constexpr bool kHasMinimum = F::kMeaning == Meaning::kAffine || F::kMeaning == Meaning::kZeroPoint;

/// Of group `group` of a block.
template <class F>
TILEWISE_INLINE void find_scales(const Head<F>& head, int group, GroupScales& scales) {
  constexpr int kSpans = F::kSpan < kGroup ? 2 : 1;
  for (int s = 0; s < kSpans; ++s) {
    alignas(64) float d[kPanel], m[kPanel];
    F::scales(head.halves, head.bytes, F::kSpan > kGroup ? 0 : group * kSpans + s, d, m);
    spread(d, scales.d[s]);
    if constexpr (kHasMinimum<F>) spread(m, scales.m[s]);
  }
}

/// The planes of a group.
template <class F>
struct Planes {
  const uint8_t *bits4, *bits2, *bits1, *bits8;

  TILEWISE_MEMBER explicit Planes(const uint8_t* group) {
    bits4 = bits8 = bits2 = group;
    if (F::kHas4) bits2 = group + 2 * kGroupLanes * 4;
    bits1 = bits2 + (F::kHas2 ? kGroupLanes * 4 : 0);
  }
  /// The code of a lane in a step.
  TILEWISE_MEMBER int code(int step, int lane) const {
    if constexpr (F::kBits == 8) return static_cast<int8_t>(bits8[step * kGroupLanes + lane]);
    int code = 0;
    if constexpr (F::kHas4)
      code = static_cast<int>(word<uint32_t>(bits4, step / 8 * kGroupLanes + lane) >> 4 * (step % 8) & 15);
    if constexpr (F::kHas2) code |= static_cast<int>(word<uint32_t>(bits2, lane) >> 2 * step & 3) << F::kShift2;
    if constexpr (F::kHas1) code |= (word<uint16_t>(bits1, lane) >> step & 1) << F::kShift1;
    return code;
  }

 private:
  template <class T>
  TILEWISE_MEMBER static T word(const uint8_t* plane, int index) {
    T value;
    __builtin_memcpy(&value, plane + index * sizeof(T), sizeof value);
    return value;
  }
};

/// What a code means, in fp32.
template <class F>
TILEWISE_INLINE float number_of(int code, float d, float m) {
  if constexpr (F::kMeaning == Meaning::kTable) return F::kTable[code & ((1 << F::kBits) - 1)] * d;
  const auto x = static_cast<float>(code - F::kOffset);
  if constexpr (F::kMeaning == Meaning::kAffine) return x * d + m;  // the product is exact
  if constexpr (F::kMeaning == Meaning::kZeroPoint) return (x - m) * d;
  return x * d;
}

#if defined(__AVX512BF16__)
/// Calls use(step, low, high) with the words of every step of a group: rows 0 to 15, then 16 to 31.
template <class F, class Use>
TILEWISE_INLINE void each_step(const uint8_t* group, const GroupScales& scales, const Use& use) {
  const Planes<F> planes(group);
  const __m512i low4 = _mm512_set1_epi32(15);
  __m512i c4[4] = {}, c2[4] = {}, c1[4] = {};
  __m512 d[4], m[4];
  [[maybe_unused]] __m512 table, upper;
  if constexpr (F::kMeaning == Meaning::kTable && F::kBits == 4) table = _mm512_loadu_ps(F::kTable);
  const __m512 count = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  constexpr bool kIsLookup = F::kBits < 6 && F::kMeaning != Meaning::kTable;
  if constexpr (kIsLookup) {
    // Codes of 2 or 3 bits leave other bits in the index, so that the table repeats.
    constexpr int kPeriod = F::kBits < 4 ? 1 << F::kBits : 16;
    const __m512i index = _mm512_and_si512(_mm512_cvtps_epi32(count), _mm512_set1_epi32(kPeriod - 1));
    table = _mm512_sub_ps(_mm512_cvtepi32_ps(index), _mm512_set1_ps(F::kOffset));
    upper = _mm512_add_ps(table, _mm512_set1_ps(16));
  }
  const auto lookup = [&](__m512i index) TILEWISE_INLINED {
    if constexpr (F::kBits == 5) return _mm512_permutex2var_ps(table, index, upper);
    return _mm512_permutexvar_ps(index, table);
  };
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    if (h == 0 || F::kSpan < kGroup)
      for (int j = 0; j < 4; ++j) {
        d[j] = _mm512_load_ps(scales.d[h] + 16 * j);
        if constexpr (kHasMinimum<F>) m[j] = _mm512_load_ps(scales.m[h] + 16 * j);
      }
    for (int j = 0; j < 4; ++j) {
      if constexpr (F::kHas4) c4[j] = _mm512_loadu_si512(planes.bits4 + (h * kGroupLanes + 16 * j) * 4);
      if (h == 1) continue;
      if constexpr (F::kHas2) {
        c2[j] = _mm512_loadu_si512(planes.bits2 + 16 * j * 4);
        if constexpr (F::kHas4) c2[j] = _mm512_rol_epi32(c2[j], 4);
      }
      if constexpr (F::kHas1) {
        c1[j] = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes.bits1 + 16 * j * 2)));
        c1[j] = _mm512_slli_epi32(c1[j], F::kShift1);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < 8; ++t) {
      __m512 x[4];
      for (int j = 0; j < 4; ++j) {
        if constexpr (F::kBits == 8) {
          const __m128i bytes =
              _mm_loadu_si128(reinterpret_cast<const __m128i*>(planes.bits8 + (8 * h + t) * kGroupLanes + 16 * j));
          if constexpr (F::kMeaning == Meaning::kTable) {
            x[j] = _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), F::kTable, 4);
          } else {
            x[j] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
          }
        } else if constexpr (F::kBits == 6) {
          const __m512i code =
              _mm512_or_si512(_mm512_and_si512(c4[j], low4), _mm512_and_si512(c2[j], _mm512_set1_epi32(48)));
          x[j] = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(F::kOffset)));
        } else if constexpr (F::kBits == 5) {
          x[j] = lookup(_mm512_ternarylogic_epi32(low4, c4[j], c1[j], 0xCA));
        } else if constexpr (F::kBits == 3) {
          x[j] = lookup(_mm512_ternarylogic_epi32(_mm512_set1_epi32(3), c2[j], c1[j], 0xCA));
        } else {
          x[j] = lookup(F::kBits == 4 ? c4[j] : c2[j]);
        }
        if constexpr (F::kHas4) c4[j] = _mm512_srli_epi32(c4[j], 4);
        if constexpr (F::kHas2) c2[j] = F::kHas4 ? _mm512_ror_epi32(c2[j], 2) : _mm512_srli_epi32(c2[j], 2);
        if constexpr (F::kHas1) c1[j] = _mm512_srli_epi32(c1[j], 1);
        if constexpr (F::kMeaning == Meaning::kAffine) {
          x[j] = _mm512_fmadd_ps(x[j], d[j], m[j]);
        } else if constexpr (F::kMeaning == Meaning::kZeroPoint) {
          x[j] = _mm512_mul_ps(_mm512_sub_ps(x[j], m[j]), d[j]);
        } else {
          x[j] = _mm512_mul_ps(x[j], d[j]);
        }
      }
      use(8 * h + t, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]), (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
    }
  }
}
#endif

/// The words of a group's 16 steps.
template <class F>
TILEWISE_INLINE void expand_group(const uint8_t* group, const GroupScales& scales, uint32_t* to) {
#if defined(__AVX512BF16__)
  each_step<F>(group, scales, [to](int step, __m512i low, __m512i high) TILEWISE_INLINED {
    _mm512_storeu_si512(to + step * kPanel, low);
    _mm512_storeu_si512(to + step * kPanel + 16, high);
  });
#else
  const Planes<F> planes(group);
#pragma GCC unroll 16
  for (int step = 0; step < kGroupSteps; ++step) {
    const int span = F::kSpan < kGroup ? step / 8 : 0;
    const float *d = scales.d[span], *m = scales.m[span];
    for (int lane = 0; lane < kGroupLanes; lane += kLanes) {
      alignas(64) float x[kLanes];
      for (int l = 0; l < kLanes; ++l) x[l] = number_of<F>(planes.code(step, lane + l), d[lane + l], m[lane + l]);
      store(reinterpret_cast<bf16*>(to + step * kPanel) + lane, load(x));
    }
  }
#endif
}

/// Calls body(group, first, scales) for every group that has elements in [begin, end) along k.
template <class F, class Body>
TILEWISE_INLINE void each_group(const uint8_t* panel, int64_t begin, int64_t end, const Body& body) {
  GroupScales scales;
  for (int64_t block = begin / F::kBlock; block * F::kBlock < end; ++block) {
    const uint8_t* at = panel + block * F::kPanelBytes;
    const Head<F> head(at);
    const int64_t first = block * F::kBlock, last = smaller(end, first + F::kBlock);
    if (F::kSpan > kGroup) find_scales(head, 0, scales);
    for (int64_t k = larger(first, begin - begin % kGroup); k < last; k += kGroup) {
      const auto group = static_cast<int>((k - first) / kGroup);
      if (F::kSpan <= kGroup) find_scales(head, group, scales);
      body(at + F::kHeadBytes + group * F::kGroupBytes, k, scales);
    }
  }
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
