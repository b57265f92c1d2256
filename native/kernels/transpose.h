// Transposes squares of words: elements along a row become elements along the lanes. Missing rows and words are zero.
#pragma once
#include "kernels/transfer.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

#if defined(__AVX512BW__)
TILEWISE_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}
#endif

#if !defined(__AVX512BW__)
typedef int32_t Four __attribute__((vector_size(16)));
#endif

#if defined(__AVX2__) && !defined(__AVX512BW__)
TILEWISE_INLINE void transpose8(__m256i (&r)[8]) {
  __m256i t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

/// The first `words` of eight words.
TILEWISE_INLINE __m256i load8(const char* from, int64_t words) {
  if (words >= 8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(words)), numbers);
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(from), mask);
}
#endif

#if !defined(__AVX512BW__)

/// Of the eight values of a and b, those numbered A to D.
template <int A, int B, int C, int D>
TILEWISE_INLINE Four pick(Four a, Four b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, A, B, C, D);
#else
  return __builtin_shuffle(a, b, Four{A, B, C, D});
#endif
}

/// to[c * to_stride + r] = word c of row r for four rows and four words.
TILEWISE_INLINE void transpose4(uint32_t* to, int64_t to_stride, const char* from, int64_t from_bytes) {
  Four r[4];
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&r[i], from + i * from_bytes, 16);
  const Four low01 = pick<0, 4, 1, 5>(r[0], r[1]), low23 = pick<0, 4, 1, 5>(r[2], r[3]);
  const Four high01 = pick<2, 6, 3, 7>(r[0], r[1]), high23 = pick<2, 6, 3, 7>(r[2], r[3]);
  const Four transposed[4] = {pick<0, 1, 4, 5>(low01, low23), pick<2, 3, 6, 7>(low01, low23),
                              pick<0, 1, 4, 5>(high01, high23), pick<2, 3, 6, 7>(high01, high23)};
  for (int i = 0; i < 4; ++i) __builtin_memcpy(to + i * to_stride, &transposed[i], 16);
}
#endif

/// to[c * to_stride + r] = word c of row r for up to 16 rows and 16 words; rows and words beyond are zero.
TILEWISE_INLINE void transpose_words(uint32_t* to, int64_t to_stride, const char* from, int64_t from_bytes,
                                     int64_t rows, int64_t words) {
#if defined(__AVX512BW__)
  __m512i r[16];
  const __mmask16 mask = static_cast<__mmask16>(0xffffu >> (16 - words));
  for (int i = 0; i < 16; ++i)
    r[i] = i < rows ? _mm512_maskz_loadu_epi32(mask, from + i * from_bytes) : _mm512_setzero_si512();
  transpose16(r);
  for (int i = 0; i < 16; ++i)
    if (i < words) _mm512_storeu_si512(to + i * to_stride, r[i]);
#elif defined(__AVX2__)
  for (int64_t c = 0; c < words; c += 8)
    for (int64_t i = 0; i < 16; i += 8) {
      __m256i r[8];
      if (i + 8 <= rows && c + 8 <= words) {
        const char* at = from + i * from_bytes + 4 * c;
        for (int64_t j = 0; j < 8; ++j) r[j] = load8(at + j * from_bytes, 8);
        transpose8(r);
        for (int64_t j = 0; j < 8; ++j)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (c + j) * to_stride + i), r[j]);
        continue;
      }
      for (int64_t j = 0; j < 8; ++j)
        r[j] = i + j < rows ? load8(from + (i + j) * from_bytes + 4 * c, words - c) : _mm256_setzero_si256();
      transpose8(r);
      for (int64_t j = 0; j < 8; ++j)
        if (c + j < words) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (c + j) * to_stride + i), r[j]);
    }
#else
  for (int64_t c = 0; c < words; c += 4)
    for (int64_t i = 0; i < 16; i += 4) {
      if (c + 4 <= words && i + 4 <= rows) {
        transpose4(to + c * to_stride + i, to_stride, from + i * from_bytes + 4 * c, from_bytes);
        continue;
      }
      for (int64_t j = c; j < smaller(c + 4, words); ++j)
        for (int64_t r = i; r < i + 4; ++r) {
          uint32_t word = 0;
          if (r < rows) __builtin_memcpy(&word, from + r * from_bytes + 4 * j, 4);
          to[j * to_stride + r] = word;
        }
    }
#endif
}

/// transposed[c] = lanes of column c of 16 rows, `stride` apart; rows from `count` on are zero.
TILEWISE_INLINE void transpose_rows(Lanes (&transposed)[kLanes], const float* rows, int64_t stride, int64_t count) {
#if defined(__AVX512BW__)
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = i < count ? _mm512_loadu_si512(rows + i * stride) : _mm512_setzero_si512();
  transpose16(r);
  for (int i = 0; i < 16; ++i) transposed[i].part[0] = (NativeF)r[i];
#elif defined(__AVX2__)
  for (int64_t i = 0; i < 16; i += 8)
    for (int64_t c = 0; c < 16; c += 8) {
      __m256i r[8];
      for (int64_t j = 0; j < 8; ++j)
        r[j] = i + j < count ? load8(reinterpret_cast<const char*>(rows + (i + j) * stride + c), 8)
                             : _mm256_setzero_si256();
      if (i < count) transpose8(r);
      for (int64_t j = 0; j < 8; ++j) transposed[c + j].part[i / 8] = (NativeF)r[j];
    }
#else
  float words[kLanes * kLanes];
  transpose_words(reinterpret_cast<uint32_t*>(words), kLanes, reinterpret_cast<const char*>(rows), stride * 4, count,
                  kLanes);
  for (int i = 0; i < kLanes; ++i) transposed[i] = load(words + i * kLanes);
#endif
}

inline constexpr int64_t kAhead = 2;  // panels prefetched while one is transposed; they are far apart

/// Transposes packed weights: columns [column, column + Width) of packed rows [begin, end) become lanes,
/// to[step along n][Width]. `panels` is the packed operand of panels of Width rows (fp32: [k][Width]; bf16: [k /
/// 2][Width][2]), k_pad its padded row length.
template <int Width>
TILEWISE_INLINE void transpose_panels(uint32_t* to, const float* panels, int64_t k_pad, int64_t column, int64_t begin,
                                      int64_t end) {
  for (int64_t n = begin; n < end;) {
    const int64_t lane = n % Width, count = smaller(smaller(kLanes, end - n), Width - lane);
    const float* base = panels + (n - lane) * k_pad + lane;
    for (int64_t half = 0; half < Width; half += kLanes) {
      const int64_t columns = larger(int64_t{0}, smaller(kLanes, k_pad - column - half));
      const auto* from = reinterpret_cast<const char*>(base + (columns > 0 ? (column + half) * Width : 0));
      for (int64_t c = 0; c < columns; ++c) __builtin_prefetch(from + (c + kAhead * k_pad) * Width * 4, 0, 2);
      transpose_words(to + (n - begin) * Width + half, Width, from, Width * 4, columns, count);
    }
    n += count;
  }
}
template <int Width>
TILEWISE_INLINE void transpose_panels(uint32_t* to, const bf16* panels, int64_t k_pad, int64_t column, int64_t begin,
                                      int64_t end) {
  static_assert(Width == 2 * kLanes);
  uint32_t transposed[kLanes * kLanes];  // [n][pair of columns]; steps have pairs along n
  for (int64_t n = begin; n < end;) {
    const int64_t lane = n % Width, count = smaller(smaller(kLanes, end - n), Width - lane);
    const int64_t pairs = larger(int64_t{0}, smaller(kLanes, (k_pad - column) / 2));
    const bf16* from = panels + (n - lane) * k_pad + column * Width + 2 * lane;
    for (int64_t c = 0; c < pairs; ++c) __builtin_prefetch(from + (2 * c + kAhead * k_pad) * Width, 0, 2);
    transpose_words(transposed, kLanes, reinterpret_cast<const char*>(from), Width * 4, pairs, count);
    for (int64_t i = 0; i < count; i += 2) {
      const IntLanes first = load_int(transposed + i * kLanes);
      const IntLanes second = i + 1 < count ? load_int(transposed + (i + 1) * kLanes) : set_int(0);
      uint32_t* row = to + (n - begin + i) / 2 * Width;
#if defined(__AVX512BW__)
      _mm512_storeu_si512(row, interleave<0>((__m512i)first.part[0], (__m512i)second.part[0]));
      _mm512_storeu_si512(row + kLanes, interleave<1>((__m512i)first.part[0], (__m512i)second.part[0]));
#else
      const IntLanes low = (first & set_int(0xffff)) | shift_left<16>(second);
      const IntLanes high = (shift_right<16>(first) & set_int(0xffff)) | (second & set_int(-0x10000));
      for (int q = 0; q < kLanes; q += 4, row += 8) {
        Four l, h;
        __builtin_memcpy(&l, reinterpret_cast<const int32_t*>(&low) + q, 16);
        __builtin_memcpy(&h, reinterpret_cast<const int32_t*>(&high) + q, 16);
        const Four mixed[2] = {pick<0, 4, 1, 5>(l, h), pick<2, 6, 3, 7>(l, h)};
        __builtin_memcpy(row, mixed, sizeof mixed);
      }
#endif
    }
    n += count;
  }
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
