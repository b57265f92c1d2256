// Transfers between memory and `Lanes`: fp32 and bf16, whole vectors, pairs, edges, and the words of bf16 steps.
//
// bf16 is rounded to nearest even on every level, including denormals. Factors of a dot product are the exception:
// the instruction treats denormals as zero anyway. Lanes beyond the requested ones are never read or written.
#pragma once
#include "kernels/simd.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

TILEWISE_INLINE float widen(bf16 x) { return bits_of<float>(static_cast<uint32_t>(x) << 16); }
TILEWISE_INLINE float widen(float x) { return x; }

/// Round to nearest even in integers on every level; a NaN stays one.
TILEWISE_INLINE bf16 round_to_bf16(float x) {
  const uint32_t u = bits_of<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((u >> 16) | 0x40);
  return static_cast<bf16>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
/// The rounded value in the low half of every lane, the high half zero. A NaN may become a number.
TILEWISE_INLINE IntLanes round_number_to_bf16(const Lanes& x) {
  const IntLanes u = as_int(x);
  return shift_right_zeros<16>(u + set_int(0x7fff) + (shift_right_zeros<16>(u) & set_int(1)));
}
/// The same, and a NaN stays one.
TILEWISE_INLINE IntLanes round_to_bf16(const Lanes& x) {
  IntLanes r = round_number_to_bf16(x);
  const IntLanes upper = shift_right_zeros<16>(as_int(x));
  TILEWISE_EACH_PART r.part[p] = x.part[p] != x.part[p] ? (upper.part[p] | 0x40) : r.part[p];
  return r;
}
TILEWISE_INLINE void narrow(float x, float* to) { *to = x; }
TILEWISE_INLINE void narrow(float x, bf16* to) { *to = round_to_bf16(x); }

TILEWISE_INLINE Lanes load(const float* from) {
  Lanes r;
  TILEWISE_EACH_PART r.part[p] = native_load(from + p * kNativeLanes);
  return r;
}
TILEWISE_INLINE IntLanes load_int(const void* from) {
  IntLanes r;
  __builtin_memcpy(&r, from, sizeof r);
  return r;
}
TILEWISE_INLINE void store_int(void* to, const IntLanes& x) { __builtin_memcpy(to, &x, sizeof x); }

/// Stores 16 lanes past the caches if they fill a cache line: for memory that is written whole and read much later. The
/// line is not loaded first, and it evicts no other.
TILEWISE_INLINE void stream(void* to, const IntLanes& x) {
#if defined(__x86_64__)
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    TILEWISE_EACH_PART {
      auto* part = static_cast<char*>(to) + p * kVectorBytes;
#if defined(__AVX512BW__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(part), (__m512i)x.part[p]);
#elif defined(__AVX2__)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(part), (__m256i)x.part[p]);
#else
      _mm_stream_si128(reinterpret_cast<__m128i*>(part), (__m128i)x.part[p]);
#endif
    }
    return;
  }
#endif
  store_int(to, x);
}

/// Ends a kernel that streams: a thread that sees the task's end also sees the streamed stores.
TILEWISE_INLINE void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

TILEWISE_INLINE Lanes load(const bf16* from) {
  IntLanes r;
#if defined(__aarch64__)
  for (int p = 0; p < kParts; p += 2) {  // interleaving with zeros widens and shifts at once
    const uint16x8_t eight = vld1q_u16(from + p * kNativeLanes);
    r.part[p] = (NativeI)vzip1q_u16(vdupq_n_u16(0), eight);
    r.part[p + 1] = (NativeI)vzip2q_u16(vdupq_n_u16(0), eight);
  }
  return as_float(r);
#else
#if defined(__AVX512BW__)
  r.part[0] = (NativeI)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  TILEWISE_EACH_PART r.part[p] =
      (NativeI)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8 * p)));
#else
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
  TILEWISE_EACH_PART {
    Half half;
    __builtin_memcpy(&half, from + p * kNativeLanes, sizeof half);
    r.part[p] = __builtin_convertvector(half, NativeI);
  }
#endif
  return as_float(shift_left<16>(r));
#endif
}
TILEWISE_INLINE void store(float* to, const Lanes& x) {
  TILEWISE_EACH_PART native_store(to + p * kNativeLanes, x.part[p]);
}
#if defined(__AVX512BW__)
/// 16 bf16. Hardware rounding differs from round_to_bf16 only for denormals, which are rare.
TILEWISE_INLINE __m256i narrow(const Lanes& x) {
#if defined(__AVX512BF16__)
  if (__builtin_expect(_mm512_fpclass_ps_mask(x.part[0], 0x20) == 0, 1)) return (__m256i)_mm512_cvtneps_pbh(x.part[0]);
#endif
  return _mm512_cvtepi32_epi16((__m512i)round_to_bf16(x).part[0]);
}
#elif defined(__AVX2__)
/// 16 bf16. One comparison checks both parts of a lane for NaN, which is rare.
TILEWISE_INLINE __m256i narrow(const Lanes& x) {
  IntLanes r = round_number_to_bf16(x);
  const int nan = _mm256_movemask_ps(_mm256_cmp_ps(x.part[0], x.part[1], _CMP_UNORD_Q));
  if (__builtin_expect(nan != 0, 0)) r = round_to_bf16(x);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)r.part[0], (__m256i)r.part[1]), 0xD8);
}
#endif
TILEWISE_INLINE void store(bf16* to, const Lanes& x) {
#if defined(__AVX2__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x));
#else
  const IntLanes r = round_to_bf16(x);
#if defined(__aarch64__)
  for (int p = 0; p < kParts; p += 2)
    vst1q_u16(to + p * kNativeLanes, vuzp1q_u16((uint16x8_t)r.part[p], (uint16x8_t)r.part[p + 1]));
#else
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
  TILEWISE_EACH_PART {
    const Half half = __builtin_convertvector(r.part[p], Half);
    __builtin_memcpy(to + p * kNativeLanes, &half, sizeof half);
  }
#endif
#endif
}

/// 32 values that only a dot product reads: the instruction treats denormal bf16 as zero, as hardware rounding does.
TILEWISE_INLINE void store_factors(bf16* to, const Lanes& low, const Lanes& high) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high.part[0], low.part[0]));
#else
  store(to, low);
  store(to + kLanes, high);
#endif
}
TILEWISE_INLINE void store_factors(float* to, const Lanes& low, const Lanes& high) {
  store(to, low);
  store(to + kLanes, high);
}

/// Two neighbouring vectors.
TILEWISE_INLINE void store_pair(bf16* to, const Lanes& low, const Lanes& high) {
#if defined(__AVX512BF16__)
  const auto denormal = _mm512_fpclass_ps_mask(low.part[0], 0x20) | _mm512_fpclass_ps_mask(high.part[0], 0x20);
  if (__builtin_expect(denormal == 0, 1)) return store_factors(to, low, high);
#endif
  store(to, low);
  store(to + kLanes, high);
}
TILEWISE_INLINE void store_pair(float* to, const Lanes& low, const Lanes& high) { store_factors(to, low, high); }

/// N neighbouring vectors. With hardware rounding, one check for denormals covers all of them.
template <int N, class T>
TILEWISE_INLINE void store_row(T* to, const Lanes (&x)[N]) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    unsigned denormal = 0;
    for (int i = 0; i < N; ++i) denormal |= _mm512_fpclass_ps_mask(x[i].part[0], 0x20);
    if (__builtin_expect(denormal == 0, 1)) {
      for (int i = 0; i < N; i += 2) store_factors(to + i * kLanes, x[i], x[i + 1]);
      return;
    }
  }
#endif
  for (int i = 0; i < N; ++i) store(to + i * kLanes, x[i]);
}

#if defined(__AVX512BW__)
/// Words (a[i], b[i]) of the first or the second 16 of 32 values each.
template <int Half>
TILEWISE_INLINE __m512i interleave(__m512i a, __m512i b) {
  alignas(64) static constexpr uint16_t kOrder[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  return _mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder[Half]), b);
}

/// Values `first`, `first` + 2, ... of the 64 of a and b; `first` is 0 or 1.
TILEWISE_INLINE __m512i every_second(__m512i a, __m512i b, int64_t first) {
  const __m512i ascending = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                                             24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  return _mm512_permutex2var_epi16(a, _mm512_add_epi16(ascending, _mm512_set1_epi16(static_cast<int16_t>(first))), b);
}
#endif

/// Lane i becomes the word (even[i], odd[i]) of a step; see store_factors.
TILEWISE_INLINE void store_step(bf16* to, const Lanes& even, const Lanes& odd) {
#if defined(__AVX512BF16__)
  const auto a = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(even.part[0]));
  const auto b = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(odd.part[0]));
  _mm512_storeu_si512(to, interleave<0>(a, b));
#else
  store_int(to, round_to_bf16(even) | shift_left<16>(round_to_bf16(odd)));
#endif
}

/// Loads the first n lanes and sets the others to `fill`, the neutral element: edges run the same instructions.
template <class T>
TILEWISE_INLINE Lanes load(const T* from, int64_t n, float fill = 0.0f) {
  if (n >= kLanes) return load(from);
#if defined(__AVX512BW__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1u);
  Lanes r;
  if constexpr (sizeof(T) == 4) {
    r.part[0] = _mm512_mask_loadu_ps(native_set(fill), mask, from);
  } else {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    r.part[0] = _mm512_mask_mov_ps(native_set(fill), mask, (NativeF)_mm512_slli_epi32(wide, 16));
  }
  return r;
#else
  float buffer[kLanes];
  for (int i = 0; i < kLanes; ++i) buffer[i] = fill;
  for (int64_t i = 0; i < n; ++i) buffer[i] = widen(from[i]);
  return load(buffer);
#endif
}
template <class T>
TILEWISE_INLINE void store(T* to, const Lanes& x, int64_t n) {
  if (n >= kLanes) return store(to, x);
#if defined(__AVX512BW__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1u);
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(to, mask, x.part[0]);
  } else {
    _mm256_mask_storeu_epi16(to, mask, narrow(x));
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    if ((n & 8) != 0) _mm256_storeu_ps(to, (__m256)x.part[0]);
    const auto rest = (__m256)((n & 8) != 0 ? x.part[1] : x.part[0]);
    to += n & 8;
    __m128 four = _mm256_castps256_ps128(rest);
    if ((n & 4) != 0) {
      _mm_storeu_ps(to, four);
      four = _mm256_extractf128_ps(rest, 1);
      to += 4;
    }
    if ((n & 2) != 0) {
      _mm_storel_pi(reinterpret_cast<__m64*>(to), four);
      four = _mm_movehl_ps(four, four);
      to += 2;
    }
    if ((n & 1) != 0) _mm_store_ss(to, four);
    return;
  }
#endif
  T buffer[kLanes];
  store(buffer, x);
  const T* from = buffer;
  const auto copy = [&]<int kCount>() __attribute__((always_inline)) {
    if ((n & kCount) == 0) return;
    __builtin_memcpy(to, from, kCount * sizeof(T));
    to += kCount;
    from += kCount;
  };
  copy.template operator()<8>();
  copy.template operator()<4>();
  copy.template operator()<2>();
  copy.template operator()<1>();
#endif
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
