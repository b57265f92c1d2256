// One step of a register block: rows of broadcast words times lanes of a panel, in fp32 and bf16.
//
// A step is one 32-bit word along the contraction: one fp32 value, or a pair of adjacent bf16 values. On processors
// without bf16 products and with few registers, the rows' side of a pair is two words of fp32 (kWordsOf).
#pragma once
#include "kernels/transfer.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Keeps x in one register: the compiler may not load it again for every use.
template <class Vector>
TILEWISE_INLINE void hold(Vector& x) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
}

/// The same, and not earlier: a constant that is needed once must not occupy a register in the loops around.
template <class Vector>
TILEWISE_INLINE void hold_here(Vector& x) {
#if defined(__AVX512F__)
  __asm__ volatile("" : "+v"(x));
#elif defined(__x86_64__)
  __asm__ volatile("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__ volatile("" : "+w"(x));
#endif
}

/// The same for a whole block. Instructions before and after it are not mixed.
template <int R, int N>
TILEWISE_INLINE void hold_all(NativeF (&x)[R][N]) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) hold(x[r][j]);
  __asm__ volatile("" ::: "memory");
}

/// A step of all rows, one by one. `a(r)` is the factor of row r, `b(j)` vector j of the panel.
template <class Dot, int R, int N, class A, class B>
TILEWISE_INLINE void step_rows(NativeF (&acc)[R][N], const A& a, const B& b) {
  NativeF panel[N];
  for (int j = 0; j < N; ++j) panel[j] = b(j);
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) Dot::step(acc[r], a(r), panel);
}

/// Words of a step on the rows' side (A). A pair of bf16 may be widened to two words when A is packed, once for all
/// panels.
template <class Dot>
inline constexpr int kWordsOf = 1;

struct DotF32 {
  template <int N>
  TILEWISE_INLINE void step(NativeF (&acc)[N], uint32_t a, const NativeF (&b)[N]) {
    const NativeF x = native_set(bits_of<float>(a));
    for (int j = 0; j < N; ++j) acc[j] = fused(x, b[j], acc[j]);
  }
  template <int R, int N, class A, class B>
  TILEWISE_INLINE void block(NativeF (&acc)[R][N], const A& a, const B& b) {
    step_rows<DotF32>(acc, [&](int r) __attribute__((always_inline)) { return a(r, 0); }, b);
  }
};

/// Two bf16 products per lane and step: the odd element first, then the even one, as the hardware does.
struct DotBf16 {
  template <int N>
  TILEWISE_INLINE void step(NativeF (&acc)[N], uint32_t a, const NativeF (&b)[N]) {
#if defined(__AVX512BF16__)
    __m512i x = _mm512_set1_epi32(static_cast<int>(a));
    hold(x);
    for (int j = 0; j < N; ++j) acc[j] = _mm512_dpbf16_ps(acc[j], (__m512bh)x, (__m512bh)b[j]);
#else
    const NativeF odd = native_set(bits_of<float>(a & 0xffff0000u));
    const NativeF even = native_set(bits_of<float>(a << 16));
    for (int j = 0; j < N; ++j) {
      acc[j] = fused(odd, (NativeF)((NativeI)b[j] & static_cast<int32_t>(0xffff0000u)), acc[j]);
      acc[j] = fused(even, (NativeF)((NativeI)b[j] << 16), acc[j]);
    }
#endif
  }
#if defined(__AVX2__) && !defined(__AVX512F__)
  /// Multiplies all rows by the odd elements, then all by the even ones, which are widened: a(r, 0) and a(r, 1). The
  /// panel is read twice, so that only half of it is in registers at a time. Otherwise accumulators would not fit the
  /// registers, and every step would wait for memory.
  template <int R, int N, class A, class B>
  TILEWISE_INLINE void block(NativeF (&acc)[R][N], const A& a, const B& b) {
    half<0>(acc, a, b, [](__m256i x) {  // two shifts: a mask would take a register
      x = _mm256_srli_epi32(x, 16);
      hold(x);
      return (NativeF)_mm256_slli_epi32(x, 16);
    });
    half<1>(acc, a, b, [](__m256i x) { return (NativeF)_mm256_slli_epi32(x, 16); });
  }

 private:
  template <int Half, int R, int N, class A, class B, class Widen>
  TILEWISE_INLINE void half(NativeF (&acc)[R][N], const A& a, const B& b, const Widen& widen) {
    NativeF lanes[N];
    for (int j = 0; j < N; ++j) lanes[j] = widen((__m256i)b(j));
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const NativeF factor = native_set(bits_of<float>(a(r, Half)));
      for (int j = 0; j < N; ++j) acc[r][j] = fused(factor, lanes[j], acc[r][j]);
    }
    hold_all(acc);
  }
#else
  template <int R, int N, class A, class B>
  TILEWISE_INLINE void block(NativeF (&acc)[R][N], const A& a, const B& b) {
    step_rows<DotBf16>(acc, [&](int r) __attribute__((always_inline)) { return a(r, 0); }, b);
  }
#endif
};

#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
inline constexpr int kWordsOf<DotBf16> = 2;
#endif

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
