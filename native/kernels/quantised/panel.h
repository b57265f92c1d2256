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

/// Rows [16 part, 16 part + 16) of a block's scales.
template <class F>
class Head {
 public:
  TILEWISE_MEMBER Head(const uint8_t* block, int part) : block_(block), part_(part) {}

  TILEWISE_MEMBER Rows16 half(int index) const {
    const uint8_t* from = block_ + 2 * (kPanel * index + 16 * part_);
#if defined(__AVX512F__)
    if constexpr (!F::kHasBf16Scales)
      return (Rows16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    if constexpr (!F::kHasBf16Scales) {
      Rows16 rows;
      for (int r = 0; r < 16; r += 8) {
        const __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * r)));
        __builtin_memcpy(reinterpret_cast<float*>(&rows) + r, &eight, sizeof eight);
      }
      return rows;
    }
#endif
    Rows16 rows;
    for (int r = 0; r < 16; ++r) {
      uint16_t bits;
      __builtin_memcpy(&bits, from + 2 * r, 2);
      rows[r] = F::kHasBf16Scales ? widen(bits) : widen_half(bits);
    }
    return rows;
  }
  TILEWISE_MEMBER IntRows16 byte(int index) const {
    typedef uint8_t Bytes16 __attribute__((vector_size(16)));
    Bytes16 bytes;
    __builtin_memcpy(&bytes, block_ + 2 * kPanel * F::kHalves + kPanel * index + 16 * part_, sizeof bytes);
#if defined(__AVX512F__)
    return (IntRows16)_mm512_cvtepu8_epi32((__m128i)bytes);
#else
    return __builtin_convertvector(bytes, IntRows16);
#endif
  }
  /// Scale and minimum of every row in a span of the block.
  TILEWISE_MEMBER void scales(int span, Rows16& d, Rows16& m) const {
    F::scales([this](int i) TILEWISE_INLINED { return half(i); }, [this](int i) TILEWISE_INLINED { return byte(i); },
              span, d, m);
  }

 private:
  const uint8_t* block_;
  int part_;
};

template <class F>
inline constexpr bool kHasMinimum = F::kMeaning == Meaning::kAffine || F::kMeaning == Meaning::kZeroPoint;

/// The span of a half of a group.
template <class F>
constexpr int span_of(int group, int half) {
  return F::kSpan > kGroup ? 0 : F::kSpan < kGroup ? 2 * group + half : group;
}

/// The planes of a group.
template <class F>
struct Planes {
  const uint8_t *bits4, *bits2, *bits1, *bits8;

  TILEWISE_MEMBER Planes(const uint8_t* block, int group) {
    bits4 = bits8 = bits2 = block + F::kHeadBytes + group * F::kGroupBytes;
    if (F::kHas4) bits2 += 2 * kGroupLanes * 4;
    bits1 = bits2 + (F::kHas2 ? kGroupLanes * 4 : 0);
  }
  /// The code of a lane in a step.
  TILEWISE_MEMBER int code(int step, int lane) const {
    if constexpr (F::kBits == 8) {
      const uint8_t byte = bits8[step * kGroupLanes + lane];
      return F::kMeaning == Meaning::kCentred ? static_cast<int8_t>(byte) : byte;
    }
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

/// A number of 8 bits, times 2^-120: its bits as those of an fp32 number, subnormal ones included.
TILEWISE_INLINE float scaled_float8(int code) {
  return bits_of<float>(static_cast<uint32_t>(code & 0x7f) << 20 | static_cast<uint32_t>(code & 0x80) << 24);
}

/// What a code means, in fp32.
template <class F>
TILEWISE_INLINE float number_of(int code, float d, float m) {
  if constexpr (F::kMeaning == Meaning::kTable) return F::kTable[code & ((1 << F::kBits) - 1)] * d;
  if constexpr (F::kMeaning == Meaning::kFloat8) return scaled_float8(code) * 0x1p120f * d;
  const auto x = static_cast<float>(code - F::kOffset);
  if constexpr (F::kMeaning == Meaning::kAffine) return x * d + m;  // the product is exact
  if constexpr (F::kMeaning == Meaning::kZeroPoint) return (x - m) * d;
  return x * d;
}

#if defined(__AVX512BF16__)
/// Calls use(step, low, high) with the words of every step of a group, for 16 `Parts` rows from row 16 `first` on.
template <class F, int Parts, class Use>
TILEWISE_INLINE void each_step(const uint8_t* block, int group, int first, const Use& use) {
  constexpr int N = 2 * Parts;  // vectors of 16 lanes
  const Planes<F> planes(block, group);
  const int lane = 32 * first;
  const __m512i low4 = _mm512_set1_epi32(15);
  const __m512i pairs[2] = {_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                            _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15)};
  __m512i c4[N] = {}, c2[N] = {}, c1[N] = {};
  __m512 d[N], m[N];
  constexpr bool kHasTable = F::kBits < 6;
  [[maybe_unused]] __m512 table, upper;
  if constexpr (kHasTable && F::kMeaning == Meaning::kTable) table = _mm512_loadu_ps(F::kTable);
  if constexpr (kHasTable && F::kMeaning != Meaning::kTable) {
    // Codes of 2 or 3 bits leave other bits in the index, so that the table repeats.
    constexpr int kPeriod = F::kBits < 4 ? 1 << F::kBits : 16;
    const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_and_si512(count, _mm512_set1_epi32(kPeriod - 1));
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
      for (int part = 0; part < Parts; ++part) {
        Rows16 of_d, of_m;
        Head<F>(block, first + part).scales(span_of<F>(group, h), of_d, of_m);
        for (int j = 0; j < 2; ++j) {  // each row has two lanes
          d[2 * part + j] = _mm512_permutexvar_ps(pairs[j], (__m512)of_d);
          if constexpr (kHasMinimum<F>) m[2 * part + j] = _mm512_permutexvar_ps(pairs[j], (__m512)of_m);
        }
      }
    for (int j = 0; j < N; ++j) {
      const int at = lane + 16 * j;
      if constexpr (F::kHas4) c4[j] = _mm512_loadu_si512(planes.bits4 + (h * kGroupLanes + at) * 4);
      if (h == 1) continue;
      if constexpr (F::kHas2) {
        c2[j] = _mm512_loadu_si512(planes.bits2 + at * 4);
        if constexpr (F::kHas4) c2[j] = _mm512_rol_epi32(c2[j], 4);
      }
      if constexpr (F::kHas1) {
        c1[j] = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes.bits1 + at * 2)));
        c1[j] = _mm512_slli_epi32(c1[j], F::kShift1);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < 8; ++t) {
      __m512 x[N];
      for (int j = 0; j < N; ++j) {
        if constexpr (F::kBits == 8) {
          const __m128i bytes = _mm_loadu_si128(
              reinterpret_cast<const __m128i*>(planes.bits8 + (8 * h + t) * kGroupLanes + lane + 16 * j));
          if constexpr (F::kMeaning == Meaning::kFloat8) {
            const __m512i code = _mm512_cvtepi8_epi32(bytes), sign = _mm512_set1_epi32(INT32_MIN);
            x[j] = (__m512)_mm512_ternarylogic_epi32(sign, code, _mm512_slli_epi32(code, 20), 0xCA);
            x[j] = (__m512)_mm512_and_si512((__m512i)x[j], _mm512_set1_epi32(static_cast<int>(0x87f00000)));
            x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(0x1p120f));
          } else if constexpr (F::kMeaning == Meaning::kZeroPoint) {
            x[j] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
          } else {
            x[j] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
          }
        } else if constexpr (F::kBits == 6) {
          // As the lowest bits of 2^23, which is exact.
          const __m512i code = _mm512_ternarylogic_epi32(low4, c4[j], c2[j], 0xCA);
          const __m512i magic = _mm512_set1_epi32(0x4B000000);
          x[j] = _mm512_sub_ps((__m512)_mm512_ternarylogic_epi32(code, _mm512_set1_epi32(63), magic, 0xEA),
                               _mm512_set1_ps(8388608.0f + F::kOffset));
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
      auto low = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
      auto high = Parts == 1 ? low : (__m512i)_mm512_cvtne2ps_pbh(x[N - 1], x[N - 2]);
      use(8 * h + t, low, high);
    }
  }
}
#endif

/// The scales of one row in a group.
struct RowScales {
  float d[2], m[2];  // of the first and second half of the elements
};

template <class F>
TILEWISE_INLINE RowScales scales_of_row(const uint8_t* block, int group, int row) {
  RowScales scales;
  for (int h = 0; h < 2; ++h) {
    Rows16 d, m = {};
    Head<F>(block, row / 16).scales(span_of<F>(group, h), d, m);
    scales.d[h] = d[row % 16];
    scales.m[h] = m[row % 16];
  }
  return scales;
}

/// The words of a group's 16 steps.
template <class F>
TILEWISE_INLINE void expand_group(const uint8_t* block, int group, uint32_t* to) {
#if defined(__AVX512BF16__)
  each_step<F, 2>(block, group, 0, [to](int step, __m512i low, __m512i high) TILEWISE_INLINED {
    _mm512_storeu_si512(to + step * kPanel, low);
    _mm512_storeu_si512(to + step * kPanel + 16, high);
  });
#else
  const Planes<F> planes(block, group);
  alignas(64) float scales[2][kGroupLanes], minima[2][kGroupLanes];
  for (int h = 0; h < (F::kSpan < kGroup ? 2 : 1); ++h)
    for (int part = 0; part < 2; ++part) {
      Rows16 d, m = {};
      Head<F>(block, part).scales(span_of<F>(group, h), d, m);
      for (int r = 0; r < 16; ++r)
        for (int parity = 0; parity < 2; ++parity) {
          scales[h][32 * part + 2 * r + parity] = d[r];
          minima[h][32 * part + 2 * r + parity] = m[r];
        }
    }
  for (int step = 0; step < kGroupSteps; ++step) {
    const int h = F::kSpan < kGroup ? step / 8 : 0;
    for (int lane = 0; lane < kGroupLanes; lane += kLanes) {
      alignas(64) float x[kLanes];
      for (int l = 0; l < kLanes; ++l)
        x[l] = number_of<F>(planes.code(step, lane + l), scales[h][lane + l], minima[h][lane + l]);
      store(reinterpret_cast<bf16*>(to + step * kPanel) + lane, load(x));
    }
  }
#endif
}

/// Elements of a block, and the bytes of a panel's block.
template <class F>
struct BlockSize {
  int64_t elements, bytes;

  TILEWISE_MEMBER explicit BlockSize(int64_t at_run_time)
      : elements(F::kBlock == 0 ? at_run_time : F::kBlock), bytes(F::kHeadBytes + elements / kGroup * F::kGroupBytes) {}
};

/// Calls body(block, group, first) for every group that has elements in [begin, end) along k.
template <class F, class Body>
TILEWISE_INLINE void each_group(const uint8_t* panel, int64_t block_size, int64_t begin, int64_t end,
                                const Body& body) {
  const BlockSize<F> size(block_size);
  for (int64_t k = begin - begin % kGroup; k < end; k += kGroup) {
    const int64_t block = k / size.elements;
    body(panel + block * size.bytes, static_cast<int>((k - block * size.elements) / kGroup), k);
  }
}

/// Prefetches the memory of a group that follows later.
template <class F>
TILEWISE_INLINE void prefetch_group(const uint8_t* block, int group) {
  constexpr int64_t kPrefetchDistance = 4 << 10,
                    kShare = F::kGroupBytes + F::kHeadBytes * kGroup / (F::kBlock == 0 ? 128 : F::kBlock);
  for (int64_t i = 0; i < kShare; i += 64) __builtin_prefetch(block + kPrefetchDistance + group * kShare + i, 0, 3);
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
