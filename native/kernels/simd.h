// The portable vector layer of the kernels: 16 virtual fp32 lanes on every instruction set.
//
// `Lanes` is one zmm, two ymm or four 128-bit registers, so the order of every lane-wise sum is the same on every
// level and, with fused multiply-add, so are the bits. Every kernel source is compiled once per level with its own
// TILEWISE_ISA_NS; nothing here or in those sources may come from a std:: template, whose code the linker would share
// between levels. Refuses: reductions in any other order, fast-math, hardware bf16 rounding of denormals (it flushes
// them).
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TILEWISE_INLINE static inline __attribute__((always_inline))

namespace tilewise::kernels::TILEWISE_ISA_NS {

#if defined(__AVX512BW__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
inline constexpr bool kHasFma = true;
#else
inline constexpr bool kHasFma = false;
#endif

typedef float NativeF __attribute__((vector_size(kVectorBytes)));
typedef int32_t NativeI __attribute__((vector_size(kVectorBytes)));
typedef double NativeD __attribute__((vector_size(kVectorBytes)));
typedef float Quad __attribute__((vector_size(16)));

inline constexpr int kNativeLanes = kVectorBytes / 4;
inline constexpr int kLanes = 16;
inline constexpr int kParts = kLanes / kNativeLanes;

/// Storage type of bf16: the upper half of an fp32.
using bf16 = uint16_t;

struct Lanes {
  NativeF part[kParts];
};
struct IntLanes {
  NativeI part[kParts];
};

TILEWISE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
TILEWISE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
TILEWISE_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
TILEWISE_INLINE int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

template <class To, class From>
TILEWISE_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

TILEWISE_INLINE NativeF native_load(const float* p) {
  NativeF v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
TILEWISE_INLINE void native_store(float* p, NativeF v) { __builtin_memcpy(p, &v, sizeof v); }
TILEWISE_INLINE NativeF native_set(float x) { return NativeF{} + x; }

TILEWISE_INLINE float fused(float a, float b, float c) {
  if constexpr (kHasFma) return __builtin_fmaf(a, b, c);
  return a * b + c;
}
TILEWISE_INLINE NativeF fused(NativeF a, NativeF b, NativeF c) {
#if defined(__AVX512BW__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  if constexpr (!kHasFma) return a * b + c;
  NativeF r;
  for (int i = 0; i < kNativeLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}
TILEWISE_INLINE NativeF native_sqrt(NativeF a) {
#if defined(__AVX512BW__)
  return _mm512_sqrt_ps(a);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(a);
#else
  NativeF r;
  for (int i = 0; i < kNativeLanes; ++i) r[i] = __builtin_sqrtf(a[i]);
  return r;
#endif
}

/// The second operand where either is NaN or both are zero, as x86 has it.
TILEWISE_INLINE NativeF native_max(NativeF a, NativeF b) {
#if defined(__AVX512BW__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
TILEWISE_INLINE NativeF native_min(NativeF a, NativeF b) {
#if defined(__AVX512BW__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

#define TILEWISE_EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < kParts; ++p)

#define TILEWISE_LANE_OPERATOR(type, op)                       \
  TILEWISE_INLINE type operator op(type a, const type& b) {    \
    TILEWISE_EACH_PART a.part[p] = a.part[p] op b.part[p];     \
    return a;                                                  \
  }
TILEWISE_LANE_OPERATOR(Lanes, +)
TILEWISE_LANE_OPERATOR(Lanes, -)
TILEWISE_LANE_OPERATOR(Lanes, *)
TILEWISE_LANE_OPERATOR(Lanes, /)
TILEWISE_LANE_OPERATOR(IntLanes, +)
TILEWISE_LANE_OPERATOR(IntLanes, -)
TILEWISE_LANE_OPERATOR(IntLanes, &)
TILEWISE_LANE_OPERATOR(IntLanes, |)

TILEWISE_INLINE Lanes set(float x) {
  Lanes r;
  TILEWISE_EACH_PART r.part[p] = native_set(x);
  return r;
}
TILEWISE_INLINE IntLanes set_int(int32_t x) {
  IntLanes r;
  TILEWISE_EACH_PART r.part[p] = NativeI{} + x;
  return r;
}
TILEWISE_INLINE Lanes fused(Lanes a, const Lanes& b, const Lanes& c) {
  TILEWISE_EACH_PART a.part[p] = fused(a.part[p], b.part[p], c.part[p]);
  return a;
}
TILEWISE_INLINE Lanes negate(Lanes a) {
  TILEWISE_EACH_PART a.part[p] = -a.part[p];
  return a;
}
TILEWISE_INLINE Lanes square_root(Lanes a) {
  TILEWISE_EACH_PART a.part[p] = native_sqrt(a.part[p]);
  return a;
}
TILEWISE_INLINE IntLanes as_int(const Lanes& a) {
  IntLanes r;
  TILEWISE_EACH_PART r.part[p] = (NativeI)a.part[p];
  return r;
}
TILEWISE_INLINE Lanes as_float(const IntLanes& a) {
  Lanes r;
  TILEWISE_EACH_PART r.part[p] = (NativeF)a.part[p];
  return r;
}
template <int N>
TILEWISE_INLINE IntLanes shift_left(IntLanes a) {
  TILEWISE_EACH_PART a.part[p] = a.part[p] << N;
  return a;
}
/// Arithmetic shift: the sign moves in.
template <int N>
TILEWISE_INLINE IntLanes shift_right(IntLanes a) {
  TILEWISE_EACH_PART a.part[p] = a.part[p] >> N;
  return a;
}
/// Comparisons give all ones or all zeros per lane; false where a NaN takes part.
TILEWISE_INLINE IntLanes greater(const Lanes& a, const Lanes& b) {
  IntLanes r;
  TILEWISE_EACH_PART r.part[p] = a.part[p] > b.part[p];
  return r;
}
TILEWISE_INLINE IntLanes greater(IntLanes a, const IntLanes& b) {
  TILEWISE_EACH_PART a.part[p] = a.part[p] > b.part[p];
  return a;
}
TILEWISE_INLINE Lanes select(const IntLanes& mask, const Lanes& yes, const Lanes& no) {
  Lanes r;
  TILEWISE_EACH_PART r.part[p] = mask.part[p] ? yes.part[p] : no.part[p];
  return r;
}
TILEWISE_INLINE Lanes maximum(Lanes a, const Lanes& b) {
  TILEWISE_EACH_PART a.part[p] = native_max(a.part[p], b.part[p]);
  return a;
}
TILEWISE_INLINE Lanes minimum(Lanes a, const Lanes& b) {
  TILEWISE_EACH_PART a.part[p] = native_min(a.part[p], b.part[p]);
  return a;
}
/// Lane indices 0..15.
TILEWISE_INLINE IntLanes lane_index() {
  IntLanes r;
  TILEWISE_EACH_PART for (int i = 0; i < kNativeLanes; ++i) r.part[p][i] = p * kNativeLanes + i;
  return r;
}

TILEWISE_INLINE float widen(bf16 x) { return bits_of<float>(static_cast<uint32_t>(x) << 16); }
TILEWISE_INLINE float widen(float x) { return x; }

/// Round to nearest even in integers on every level; a NaN stays one.
TILEWISE_INLINE bf16 round_to_bf16(float x) {
  const uint32_t u = bits_of<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((u >> 16) | 0x40);
  return static_cast<bf16>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
/// The rounded value in the low half of every lane, the high half zero.
TILEWISE_INLINE IntLanes round_to_bf16(const Lanes& x) {
  const IntLanes u = as_int(x);
  const IntLanes upper = shift_right<16>(u);
  const IntLanes rounded = shift_right<16>(u + set_int(0x7fff) + (upper & set_int(1)));
  IntLanes r;
  TILEWISE_EACH_PART {
    const NativeI nan = x.part[p] != x.part[p];
    r.part[p] = (nan ? (upper.part[p] | 0x40) : rounded.part[p]) & 0xffff;
  }
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

TILEWISE_INLINE Lanes load(const bf16* from) {
  IntLanes r;
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
}
TILEWISE_INLINE void store(float* to, const Lanes& x) {
  TILEWISE_EACH_PART native_store(to + p * kNativeLanes, x.part[p]);
}
#if defined(__AVX512BW__)
/// 16 bf16. Where hardware rounds, it differs from round_to_bf16 on denormals alone; they are rare.
TILEWISE_INLINE __m256i narrow(const Lanes& x) {
#if defined(__AVX512BF16__)
  if (__builtin_expect(_mm512_fpclass_ps_mask(x.part[0], 0x20) == 0, 1)) return (__m256i)_mm512_cvtneps_pbh(x.part[0]);
#endif
  return _mm512_cvtepi32_epi16((__m512i)round_to_bf16(x).part[0]);
}
#endif
TILEWISE_INLINE void store(bf16* to, const Lanes& x) {
#if defined(__AVX512BW__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x));
#else
  const IntLanes r = round_to_bf16(x);
#if defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)r.part[0], (__m256i)r.part[1]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xD8));
#else
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
  TILEWISE_EACH_PART {
    const Half half = __builtin_convertvector(r.part[p], Half);
    __builtin_memcpy(to + p * kNativeLanes, &half, sizeof half);
  }
#endif
#endif
}

/// 32 values that only a dot product reads: it takes denormal bf16 for zero where hardware rounds.
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

/// The first n lanes from memory, `fill` in the others: edges run the same instructions on the neutral element.
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
  T buffer[kLanes];
  store(buffer, x);
  for (int64_t i = 0; i < n; ++i) to[i] = buffer[i];
#endif
}

/// The fixed tree over 16 lanes: i with i+8, then i+4, i+2, i+1.
TILEWISE_INLINE float sum_lanes(const Lanes& x) {
  Quad q[4];
  __builtin_memcpy(q, &x, sizeof q);
  const Quad s = (q[0] + q[2]) + (q[1] + q[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
TILEWISE_INLINE float larger(float a, float b) { return a > b ? a : b; }
TILEWISE_INLINE float max_lanes(const Lanes& x) {
  Quad q[4];
  __builtin_memcpy(q, &x, sizeof q);
  const Quad a = q[0] > q[2] ? q[0] : q[2];
  const Quad b = q[1] > q[3] ? q[1] : q[3];
  const Quad s = a > b ? a : b;
  return larger(larger(s[0], s[2]), larger(s[1], s[3]));
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
