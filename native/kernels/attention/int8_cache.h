// A KV cache of int8: a scale for each position and head, and the codes of its numbers. A cached number is code *
// scale, in fp32, rounded once to the type of the model.
//
// In a block of positions the words of a head are contiguous: first the codes of every position, then the scales.
#pragma once
#include "kernels/simd.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Words of a position and head: its codes and its scale.
constexpr int64_t int8_words(int64_t dim) { return dim / 4 + 1; }

/// One head's part of a block of positions.
template <class Word, class Code>
struct Int8Head {
  Code* codes;
  Word* scales;

  Int8Head(Word* head, int64_t block_size, int64_t dim)
      : codes(reinterpret_cast<Code*>(head)), scales(head + block_size * dim / 4) {}
};

/// 16 codes as numbers.
TILEWISE_INLINE Lanes load_codes(const int8_t* codes) {
  Lanes x;
#if defined(__AVX512BW__)
  x.part[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
#elif defined(__AVX2__)
  TILEWISE_EACH_PART x.part[p] = _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + p * kNativeLanes))));
#else
  TILEWISE_EACH_PART for (int i = 0; i < kNativeLanes; ++i) x.part[p][i] = codes[p * kNativeLanes + i];
#endif
  return x;
}

/// Stores the codes and the scale of `dim` numbers: the largest magnitude becomes 127. If a number is not finite, all
/// become NaN.
template <class T>
void store_int8(const T* from, int64_t dim, int8_t* codes, float* scale) {
  IntLanes largest = set_int(0);
  for (int64_t c = 0; c < dim; c += kLanes) {
    const IntLanes bits = as_int(magnitude(load(from + c, dim - c)));
    const IntLanes is_larger = greater(bits, largest);
    TILEWISE_EACH_PART largest.part[p] = is_larger.part[p] ? bits.part[p] : largest.part[p];
  }
  int32_t most = 0;
  TILEWISE_EACH_PART for (int i = 0; i < kNativeLanes; ++i) most =
      largest.part[p][i] > most ? largest.part[p][i] : most;
  const bool is_finite = most < 0x7f800000;
  const float step = is_finite ? bits_of<float>(most) / 127.0f : bits_of<float>(0x7fc00000);
  *scale = step;
  // Beyond 2^23 the lowest bit of an fp32 number is 1, so the sum rounds to the nearest integer, in its lowest bits.
  const Lanes magic = set(12582912.0f);
  for (int64_t c = 0; c < dim; c += kLanes) {
    IntLanes rounded = set_int(0);
    if (is_finite && step > 0.0f) rounded = as_int(load(from + c, dim - c) / set(step) + magic);
    int32_t words[kLanes];
    store_int(reinterpret_cast<uint32_t*>(words), rounded);
    for (int64_t i = 0; i < kLanes && c + i < dim; ++i) codes[c + i] = static_cast<int8_t>(words[i]);
  }
}

/// Rows [0, count) of `dim` numbers from their codes and scales.
template <class T>
void expand_int8(const int8_t* codes, const float* scales, int64_t count, int64_t dim, T* to) {
  for (int64_t r = 0; r < count; ++r, codes += dim, to += dim) {
    const Lanes scale = set(scales[r]);
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) store(to + c, load_codes(codes + c) * scale);
    if (c == dim) continue;
    int8_t last[kLanes] = {};
    __builtin_memcpy(last, codes + c, static_cast<size_t>(dim - c));
    store(to + c, load_codes(last) * scale, dim - c);
  }
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
