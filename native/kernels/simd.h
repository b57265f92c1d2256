// The portable vector layer of the kernels: 16 virtual fp32 lanes on every instruction set.
//
// `Lanes` is one zmm, two ymm or four 128-bit registers, so the order of every lane-wise sum is the same on every level
// and, with fused multiply-add, so are the bits. Every kernel source is compiled once per level with its own
// TILEWISE_ISA_NS. Neither this header nor those sources may use std:: templates, because the linker would share their
// code between levels. Reductions in other orders, fast-math and hardware rounding to bf16 (it flushes denormals) are
// not used.
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TILEWISE_INLINE static inline __attribute__((always_inline))
#define TILEWISE_MEMBER inline __attribute__((always_inline))
/// Inlines a lambda; placed between its parameters and its body. A call would pass vectors through memory.
#define TILEWISE_INLINED __attribute__((always_inline))

namespace tilewise::kernels::TILEWISE_ISA_NS {

#if defined(__AVX512BW__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
#if defined(__FMA__) || defined(__aarch64__)
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
TILEWISE_INLINE NativeF native_set(float x) {
#if defined(__AVX512BW__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#elif defined(__aarch64__)
  return vdupq_n_f32(x);
#else
  return NativeF{x, x, x, x};
#endif
}

TILEWISE_INLINE float fused(float a, float b, float c) {
  if constexpr (kHasFma) return __builtin_fmaf(a, b, c);
  return a * b + c;
}
TILEWISE_INLINE NativeF fused(NativeF a, NativeF b, NativeF c) {
#if defined(__AVX512BW__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
TILEWISE_INLINE NativeF native_sqrt(NativeF a) {
#if defined(__AVX512BW__)
  return _mm512_sqrt_ps(a);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(a);
#elif defined(__aarch64__)
  return vsqrtq_f32(a);
#else
  NativeF r;
  for (int i = 0; i < kNativeLanes; ++i) r[i] = __builtin_sqrtf(a[i]);
  return r;
#endif
}

/// As on x86, gives the second operand if either is NaN or both are zero. NEON's own maximum would give NaN and +0, so
/// NEON compares and selects.
TILEWISE_INLINE NativeF native_max(NativeF a, NativeF b) {
#if defined(__AVX512BW__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__aarch64__)
  return vbslq_f32(vcgtq_f32(a, b), a, b);
#else
  return a > b ? a : b;
#endif
}
TILEWISE_INLINE NativeF native_min(NativeF a, NativeF b) {
#if defined(__AVX512BW__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__aarch64__)
  return vbslq_f32(vcltq_f32(a, b), a, b);
#else
  return a < b ? a : b;
#endif
}

#define TILEWISE_EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < kParts; ++p)

#define TILEWISE_LANE_OPERATOR(type, op)                    \
  TILEWISE_INLINE type operator op(type a, const type& b) { \
    TILEWISE_EACH_PART a.part[p] = a.part[p] op b.part[p];  \
    return a;                                               \
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
/// Logical shift: zeros move in.
template <int N>
TILEWISE_INLINE IntLanes shift_right_zeros(IntLanes a) {
  typedef uint32_t NativeU __attribute__((vector_size(kVectorBytes)));
  TILEWISE_EACH_PART a.part[p] = (NativeI)((NativeU)a.part[p] >> N);
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
/// `yes` where a > limit, `no` elsewhere and where a is NaN.
TILEWISE_INLINE Lanes select_above(const Lanes& a, float limit, const Lanes& yes, const Lanes& no) {
  return select(greater(a, set(limit)), yes, no);
}
TILEWISE_INLINE Lanes magnitude(const Lanes& a) { return as_float(as_int(a) & set_int(0x7fffffff)); }
/// a, which is not negative, with the sign of b.
TILEWISE_INLINE Lanes with_sign_of(const Lanes& a, const Lanes& b) {
  return as_float(as_int(a) | (as_int(b) & set_int(INT32_MIN)));
}
TILEWISE_INLINE Lanes maximum(Lanes a, const Lanes& b) {
  TILEWISE_EACH_PART a.part[p] = native_max(a.part[p], b.part[p]);
  return a;
}
TILEWISE_INLINE Lanes minimum(Lanes a, const Lanes& b) {
  TILEWISE_EACH_PART a.part[p] = native_min(a.part[p], b.part[p]);
  return a;
}
/// Magnitudes as integers, in the same order, with NaN above infinity.
TILEWISE_INLINE NativeI magnitude_bits(NativeF x) { return (NativeI)x & 0x7fffffff; }
/// Whether all magnitudes in `bits` are at most `limit`.
TILEWISE_INLINE bool all_at_most(NativeI bits, float limit) {
  const NativeI beyond = bits > bits_of<int32_t>(limit);
#if defined(__AVX512BW__)
  return _mm512_movepi32_mask((__m512i)beyond) == 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)beyond) == 0;
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)beyond) == 0;
#else
  NativeI any = beyond | __builtin_shufflevector(beyond, beyond, 2, 3, 0, 1);
  return (any[0] | any[1]) == 0;
#endif
}
/// Lane indices 0..15.
TILEWISE_INLINE IntLanes lane_index() {
  IntLanes r;
  TILEWISE_EACH_PART for (int i = 0; i < kNativeLanes; ++i) r.part[p][i] = p * kNativeLanes + i;
  return r;
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
