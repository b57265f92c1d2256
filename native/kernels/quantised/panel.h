// Reads panels of quantised weights: whole steps as the words of a product, in bf16.
//
// Numbers are computed in fp32 with the operations of the format's definition, and rounded once to bf16. Where the
// product's instruction treats denormals as zero, rounding may do so, too.
#pragma once
#include <bit>
#include <type_traits>

#include "kernels/quantised/format.h"
#include "kernels/quantised/grouped.h"

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

/// Each half of the lanes is two vectors of 16. Their places alternate, or for codes of 8 bits every four places do, as
/// the instructions leave them that make fp32 numbers of 16 bits.
template <class F>
constexpr int place_of_lane(int lane) {
  const int vector = lane / 16 % 2, i = lane % 16;
  return lane / 32 * 32 + (F::kBits == 8 ? i / 4 * 8 + vector * 4 + i % 4 : 2 * i + vector);
}

/// The planes of a group, in this order: 8 or 4 bits, 2 bits, 1 bit.
template <class F>
struct Planes {
  static constexpr int kAt2 = F::kHas4 ? 4 * 2 * kGroupLanes : 0, kAt1 = kAt2 + (F::kHas2 ? 2 * 2 * kGroupLanes : 0);
  const uint8_t* at;

  TILEWISE_MEMBER Planes(const uint8_t* block, int group) : at(block + F::kHeadBytes + group * F::kGroupBytes) {}

  /// The numbers of a plane of `Bits` bits that have a step, from a place on.
  template <int Bits>
  TILEWISE_MEMBER const uint8_t* numbers(int step, int place) const {
    return at + (Bits == 1 ? kAt1 : Bits == 2 ? kAt2 : 0) + (step / (16 / Bits) * kGroupLanes + place) * 2;
  }
  template <int Bits>
  static constexpr int shift(int step) {
    return step % (16 / Bits) * Bits;
  }
  TILEWISE_MEMBER int code(int step, int place) const {
    if constexpr (F::kBits == 8) return bits<8>(step, place);
    int code = 0;
    if constexpr (F::kHas4) code = bits<4>(step, place);
    if constexpr (F::kHas2) code |= bits<2>(step, place) << F::kShift2;
    if constexpr (F::kHas1) code |= bits<1>(step, place) << F::kShift1;
    return code;
  }

 private:
  template <int Bits>
  TILEWISE_MEMBER int bits(int step, int place) const {
    uint16_t number;
    __builtin_memcpy(&number, numbers<Bits>(step, place), sizeof number);
    return number >> shift<Bits>(step) & ((1 << Bits) - 1);
  }
};

// 8 lanes at a time, which compilers translate well on every level.
typedef float Lanes8 __attribute__((vector_size(32)));
typedef int32_t IntLanes8 __attribute__((vector_size(32)));

/// The codes of a step for 8 neighbouring lanes.
template <class F>
TILEWISE_INLINE IntLanes8 codes_of_lanes(const Planes<F>& planes, int step, int lane) {
  const int vector = lane / 16 % 2, eighth = lane / 8 % 2, place = lane / 32 * 32 + 16 * eighth;
  const auto bits = [&]<int Bits>(std::integral_constant<int, Bits>, int to) TILEWISE_INLINED {
    const uint8_t* from = planes.template numbers<Bits>(step, place);
    IntLanes8 numbers;
    if constexpr (Bits == 8) {
      const uint8_t *first = from + 8 * vector, *second = first + 16;  // 4 places each
#if defined(__AVX2__)
      const __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)),
                                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second)));
      numbers = (IntLanes8)_mm256_cvtepu16_epi32(both);
#else
      uint16_t both[8];
      __builtin_memcpy(both, first, 8);
      __builtin_memcpy(both + 4, second, 8);
      for (int i = 0; i < 8; ++i) numbers[i] = both[i];
#endif
    } else {
      __builtin_memcpy(&numbers, from, sizeof numbers);
      if (vector == 1) numbers >>= 16;
    }
    return (numbers >> Planes<F>::template shift<Bits>(step) & ((1 << Bits) - 1)) << to;
  };
  if constexpr (F::kBits == 8) return bits(std::integral_constant<int, 8>(), 0);
  IntLanes8 codes = {};
  if constexpr (F::kHas4) codes = bits(std::integral_constant<int, 4>(), 0);
  if constexpr (F::kHas2) codes |= bits(std::integral_constant<int, 2>(), F::kShift2);
  if constexpr (F::kHas1) codes |= bits(std::integral_constant<int, 1>(), F::kShift1);
  return codes;
}

/// Numbers without scales: those of a table, or code - Offset.
template <class F, int Offset = F::kOffset>
TILEWISE_INLINE Lanes8 unscaled_numbers(const IntLanes8& codes) {
  if constexpr (F::kMeaning == Meaning::kTable) {
    Lanes8 x;
    for (int i = 0; i < 8; ++i) x[i] = F::kTable[codes[i]];
    return x;
  }
  return __builtin_convertvector(codes - Offset, Lanes8);
}

/// What codes mean, in fp32.
template <class F>
TILEWISE_INLINE Lanes8 numbers_of(const IntLanes8& codes, const Lanes8& d, const Lanes8& m) {
  // A number of 8 bits has the bits of an fp32 number, subnormal ones included, times 2^-120.
  if constexpr (F::kMeaning == Meaning::kFloat8)
    return (Lanes8)((codes & 0x7f) << 20 | codes << 24 & INT32_MIN) * 0x1p120f * d;
  const Lanes8 x = unscaled_numbers<F>(codes);
  if constexpr (F::kMeaning == Meaning::kAffine) return x * d + m;  // the product is exact
  if constexpr (F::kMeaning == Meaning::kZeroPoint) return (x - m) * d;
  return x * d;
}

#if defined(__AVX512BF16__)
/// The numbers of codes of up to 5 bits, without scales, in bf16. All are exact. Codes repeat, so higher bits of an
/// index have no effect.
template <class F, int Offset = F::kOffset>
struct CodeTable {
  alignas(64) uint16_t number[32];

  constexpr CodeTable() : number{} {
    for (int i = 0; i < 32; ++i) {
      const int code = i % (1 << F::kBits);
      float x = static_cast<float>(code - Offset);
      if constexpr (F::kMeaning == Meaning::kTable) x = F::kTable[code];
      number[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
    }
  }
};
template <class F, int Offset = F::kOffset>
inline constexpr CodeTable<F, Offset> kCodeTable;

/// How codes become fp32 numbers: up to 5 bits by a table; 6 and 8 bits in the mantissa of `kBase`, as kBase + code.
template <class F>
struct Insertion {
  static constexpr bool kHasTable = F::kBits < 6;
  static constexpr int kBase = kHasTable ? 0 : F::kBits == 6 ? 128 : 32768;
  /// Whether (code - offset) * d is (kBase + code) * d + m with m = -(kBase + offset) * d. It is the same number,
  /// because m is exact: d has 11 bits (Q8_0) or 19 bits (Q6_K), kBase + offset is 257 * 128 or 5 * 32.
  static constexpr bool kIsFused = !kHasTable && F::kMeaning == Meaning::kCentred;
  static constexpr bool kAdds = kIsFused || F::kMeaning == Meaning::kAffine;
};

/// Two vectors of fp32 numbers from 32 codes of a step: those of half of the lanes.
template <class F>
TILEWISE_INLINE void insert_codes(const Planes<F>& planes, int step, int half, __m512& even, __m512& odd) {
  const auto load = [&]<int Bits>(std::integral_constant<int, Bits>)
                        TILEWISE_INLINED { return _mm512_loadu_si512(planes.template numbers<Bits>(step, 32 * half)); };
  // Moves the step's bits of a plane from their shift to another.
  const auto move = [](__m512i x, int from, int to) TILEWISE_INLINED {
    if (from > to) return _mm512_srli_epi16(x, static_cast<unsigned>(from - to));
    return from < to ? _mm512_slli_epi16(x, static_cast<unsigned>(to - from)) : x;
  };
  using Of = Planes<F>;
  constexpr std::integral_constant<int, 1> k1;
  constexpr std::integral_constant<int, 2> k2;
  constexpr std::integral_constant<int, 4> k4;
  constexpr std::integral_constant<int, 8> k8;
  constexpr int kSelect = 0xCA;  // the second operand where the first has ones, else the third
  if constexpr (F::kBits == 8) {
    constexpr bool kIsFloat8 = F::kMeaning == Meaning::kFloat8;
    __m512i code = load(k8);
    code = step % 2 ? _mm512_and_si512(code, _mm512_set1_epi16(static_cast<int16_t>(0xff00))) : move(code, 0, 8);
    const __m512i other = kIsFloat8 ? _mm512_setzero_si512() : _mm512_set1_epi16(0x4700);
    even = (__m512)(kIsFloat8 ? _mm512_unpacklo_epi16(other, code) : _mm512_unpacklo_epi16(code, other));
    odd = (__m512)(kIsFloat8 ? _mm512_unpackhi_epi16(other, code) : _mm512_unpackhi_epi16(code, other));
    return;
  }
  __m512i code = {};
  if constexpr (F::kHas4) code = move(load(k4), Of::template shift<4>(step), 0);
  if constexpr (F::kHas2) {
    code = F::kHas4 ? _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), code,
                                                move(load(k2), Of::template shift<2>(step), 4), kSelect)
                    : move(load(k2), Of::template shift<2>(step), 0);
  }
  if constexpr (F::kHas1)
    code = _mm512_ternarylogic_epi32(_mm512_set1_epi16((1 << F::kShift1) - 1), code,
                                     move(load(k1), Of::template shift<1>(step), F::kShift1), kSelect);
  if constexpr (Insertion<F>::kHasTable) {
    code = _mm512_permutexvar_epi16(code, _mm512_load_si512(kCodeTable<F>.number));
  } else {
    constexpr int kAndOr = 0xEA;  // the third operand or both others
    code = _mm512_ternarylogic_epi32(code, _mm512_set1_epi16(63), _mm512_set1_epi16(0x4300), kAndOr);
  }
  even = (__m512)_mm512_slli_epi32(code, 16);
  odd = (__m512)_mm512_and_si512(code, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
}

/// Calls use(step, low, high) with the words of every step of a group, for 16 `Parts` rows from row 16 `first` on.
template <class F, int Parts, class Use>
TILEWISE_INLINE void each_step(const uint8_t* block, int group, int first, const Use& use) {
  using Into = Insertion<F>;
  constexpr int N = 2 * Parts;  // vectors of 16 lanes
  const Planes<F> planes(block, group);
  const __m512i pairs[2] = {_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                            _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15)};
  __m512 d[N], m[N];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    if (h == 0 || F::kSpan < kGroup)
      for (int part = 0; part < Parts; ++part) {
        Rows16 of_d, of_m = {};
        Head<F>(block, first + part).scales(span_of<F>(group, h), of_d, of_m);
        if constexpr (Into::kIsFused) of_m = of_d * -static_cast<float>(Into::kBase + F::kOffset);
        if constexpr (F::kMeaning == Meaning::kZeroPoint) of_m = of_m + static_cast<float>(Into::kBase);
        for (int j = 0; j < 2; ++j) {  // each row has two lanes
          d[2 * part + j] = _mm512_permutexvar_ps(pairs[j], (__m512)of_d);
          if constexpr (kHasMinimum<F> || Into::kIsFused)
            m[2 * part + j] = _mm512_permutexvar_ps(pairs[j], (__m512)of_m);
        }
      }
#pragma GCC unroll 8
    for (int t = 0; t < 8; ++t) {
      __m512 x[N];
      for (int part = 0; part < Parts; ++part)
        insert_codes<F>(planes, 8 * h + t, first + part, x[2 * part], x[2 * part + 1]);
      for (int j = 0; j < N; ++j) {
        if constexpr (F::kMeaning == Meaning::kFloat8) {
          const __m512i both = _mm512_set1_epi32(static_cast<int>(0x87f00000));  // the sign, and the other bits
          x[j] = (__m512)_mm512_and_si512(_mm512_srai_epi32((__m512i)x[j], 4), both);
          x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(0x1p120f));
        }
        if constexpr (F::kMeaning == Meaning::kZeroPoint) x[j] = _mm512_sub_ps(x[j], m[j]);
        x[j] = Into::kAdds ? _mm512_fmadd_ps(x[j], d[j], m[j]) : _mm512_mul_ps(x[j], d[j]);
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

#if defined(__AVX512BF16__)
TILEWISE_INLINE void store_step(uint32_t* to, int step, __m512i low, __m512i high) {
  _mm512_storeu_si512(to + step * kPanel, low);
  _mm512_storeu_si512(to + step * kPanel + 16, high);
}
#else
/// The words of a step, from numbers(codes, lane) of 8 lanes at a time.
template <class F, class Numbers>
TILEWISE_INLINE void store_step(uint32_t* to, const Planes<F>& planes, int step, const Numbers& numbers) {
  alignas(64) float x[kGroupLanes];
  for (int lane = 0; lane < kGroupLanes; lane += 8) {
    const Lanes8 eight = numbers(codes_of_lanes(planes, step, lane), lane);
    __builtin_memcpy(x + lane, &eight, sizeof eight);
  }
  for (int lane = 0; lane < kGroupLanes; lane += kLanes)
    store(reinterpret_cast<bf16*>(to + step * kPanel) + lane, load(x + lane));
}
#endif

/// The words of a group's 16 steps.
template <class F>
TILEWISE_INLINE void expand_group(const uint8_t* block, int group, uint32_t* to) {
#if defined(__AVX512BF16__)
  each_step<F, 2>(block, group, 0,
                  [to](int step, __m512i low, __m512i high) TILEWISE_INLINED { store_step(to, step, low, high); });
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
    store_step(to, planes, step, [&](const IntLanes8& codes, int lane) TILEWISE_INLINED {
      Lanes8 d, m;
      __builtin_memcpy(&d, scales[h] + lane, sizeof d);
      __builtin_memcpy(&m, minima[h] + lane, sizeof m);
      return numbers_of<F>(codes, d, m);
    });
  }
#endif
}

/// What grouped products (grouped.h) subtract from codes.
template <class F>
inline constexpr int kMiddle = F::kMeaning == Meaning::kZeroPoint ? 8 : F::kOffset;

/// Scales of 16 rows in a group, for `add_group`.
template <class F>
struct GroupScales {
  Rows16 d, m = {};

  TILEWISE_MEMBER GroupScales(const uint8_t* block, int group, int part) {
    Head<F>(block, part).scales(span_of<F>(group, 0), d, m);
    if constexpr (F::kMeaning == Meaning::kZeroPoint) m = static_cast<float>(kMiddle<F>) - m;
  }
};

#if defined(__AVX512BF16__)
/// Calls use(step, words...) with the codes of every step of a group as words, for 16 `Parts` rows.
template <class F, int Parts, class Use>
TILEWISE_INLINE void each_code_step(const uint8_t* block, int group, int first, const Use& use) {
  static_assert(F::kHas4 && F::kBits == 4);
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                      1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const Planes<F> planes(block, group);
  const __m512i order = _mm512_load_si512(kOrder), table = _mm512_load_si512(kCodeTable<F, kMiddle<F>>.number);
#pragma GCC unroll 4
  for (int step = 0; step < kGroupSteps; step += 4) {
    __m512i numbers[Parts];
    for (int p = 0; p < Parts; ++p)
      numbers[p] =
          _mm512_permutexvar_epi16(order, _mm512_loadu_si512(planes.template numbers<4>(step, 32 * (first + p))));
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      __m512i words[Parts];
      for (int p = 0; p < Parts; ++p)
        words[p] = _mm512_permutexvar_epi16(t == 0 ? numbers[p] : _mm512_srli_epi16(numbers[p], 4u * t), table);
      use(step + t, words[0], words[Parts - 1]);
    }
  }
}
#endif

/// Codes of a group as the words of 16 steps, then the scales and minima of 32 rows: kGroupSteps * kGroupedStep words.
template <class F>
TILEWISE_INLINE void expand_codes(const uint8_t* block, int group, uint32_t* to) {
#if defined(__AVX512BF16__)
  each_code_step<F, 2>(block, group, 0,
                       [to](int step, __m512i low, __m512i high) TILEWISE_INLINED { store_step(to, step, low, high); });
#else
  const Planes<F> planes(block, group);
  for (int step = 0; step < kGroupSteps; ++step)
    store_step(to, planes, step,
               [](const IntLanes8& codes, int) TILEWISE_INLINED { return unscaled_numbers<F, kMiddle<F>>(codes); });
#endif
  auto* scales = reinterpret_cast<float*>(to + kGroupSteps * kPanel);
  for (int part = 0; part < 2; ++part) {
    const GroupScales<F> rows(block, group, part);
    __builtin_memcpy(scales + 16 * part, &rows.d, sizeof rows.d);
    __builtin_memcpy(scales + kPanel + 16 * part, &rows.m, sizeof rows.m);
  }
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
