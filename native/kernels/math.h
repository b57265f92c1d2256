// exp, log, tanh and erf on 16 lanes: polynomials with an error of at most 2 ulp, with the same bits on every level
// that has fused multiply-add. Infinities, zeros and NaN give the results of the C library.
#pragma once
#include "kernels/register_block.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

inline constexpr float kInfinity = __builtin_inff();

/// y 2^n for y near 1, rounded once also for denormal results. n = shifted - kRoundingShift; both are integers, and n
/// is at most 60 if kIsSmall. Adding to the exponent bits would turn NaN into a number; adding n - n keeps it NaN.
inline constexpr float kRoundingShift = 12582912.0f;
template <bool kIsSmall>
TILEWISE_INLINE Lanes times_power_of_two(Lanes y, const Lanes& n, const Lanes& shifted) {
#if defined(__AVX512BW__)
  (void)shifted;
  y.part[0] = _mm512_scalef_ps(y.part[0], n.part[0]);
  return y;
#else
  // Two steps, because 2^n itself may be out of range. Shifting by 23 bits removes kRoundingShift, and also its half.
  const IntLanes one = as_int(set(1.0f));
  if constexpr (kIsSmall) {
    const IntLanes up = as_int(set(0x1p64f)) - one;
    return fused(as_float(as_int(y) + (shift_left<23>(as_int(shifted)) + up)), set(0x1p-64f), n - n);
  }
  const IntLanes half = shift_right<1>(as_int(shifted)), other = as_int(shifted) - half;
  return fused(as_float(as_int(y) + shift_left<23>(half)), as_float(shift_left<23>(other) + one), n - n);
#endif
}
/// y 2^n if neither y nor the result is near the ends of the range.
TILEWISE_INLINE Lanes add_to_exponent(const Lanes& y, const Lanes& shifted) {
  return as_float(as_int(y) + shift_left<23>(as_int(shifted)));
}
template <int N>
TILEWISE_INLINE RegisterBlock<N> add_to_exponent(RegisterBlock<N> y, const RegisterBlock<N>& shifted) {
  TILEWISE_EACH_OF y.at[i] = add_to_exponent(y.at[i], shifted.at[i]);
  return y;
}
template <bool kIsSmall, int N>
TILEWISE_INLINE RegisterBlock<N> times_power_of_two(RegisterBlock<N> y, const RegisterBlock<N>& n,
                                                    const RegisterBlock<N>& shifted) {
  TILEWISE_EACH_OF y.at[i] = times_power_of_two<kIsSmall>(y.at[i], n.at[i], shifted.at[i]);
  return y;
}

/// e^x for Lanes or RegisterBlock, reduced by n ln 2; scale(y, n, n + kRoundingShift) is y 2^n for y near 1.
template <class V, class Scale>
TILEWISE_INLINE V exponential_scaled(const V& x, const Scale& scale) {
  const V shifted = fused(x, splat<V>(1.44269504088896341f), splat<V>(kRoundingShift));
  const V n = shifted - splat<V>(kRoundingShift);
  V r = fused(n, splat<V>(-0.693359375f), x);
  r = fused(n, splat<V>(2.12194440e-4f), r);
  V p = splat<V>(1.9875691500e-4f);
  p = fused(p, r, splat<V>(1.3981999507e-3f));
  p = fused(p, r, splat<V>(8.3334519073e-3f));
  p = fused(p, r, splat<V>(4.1665795894e-2f));
  p = fused(p, r, splat<V>(1.6666665459e-1f));
  p = fused(p, r, splat<V>(5.0000001201e-1f));
  const V y = fused(p, r * r, r) + splat<V>(1.0f);
  return scale(y, n, shifted);
}

/// e^x for Lanes or RegisterBlock; x is below 42 if kIsSmall, else below 90.
template <bool kIsSmall, class V>
TILEWISE_INLINE V exponential_within(const V& x) {
  return exponential_scaled(maximum(splat<V>(-105.0f), x),
                            [](const V& y, const V& n, const V& shifted)
                                __attribute__((always_inline)) { return times_power_of_two<kIsSmall>(y, n, shifted); });
}

/// e^x for Lanes or RegisterBlock.
template <class V>
TILEWISE_INLINE V exponential(const V& x) {
#if !defined(__AVX512BW__)
  // Far from the ends of the range no clamping is needed and one step scales: the same bits in 14 operations instead
  // of 23.
  if (__builtin_expect(all_within(x, 86.0f), 1))
    return exponential_scaled(x, [](const V& y, const V&, const V& shifted)
                                     __attribute__((always_inline)) { return add_to_exponent(y, shifted); });
#endif
  return exponential_within<false>(minimum(splat<V>(89.0f), x));
}
TILEWISE_INLINE float exponential(float x) { return exponential(set(x)).part[0][0]; }

/// e^x of x <= 0, the same bits in fewer steps.
template <class V>
TILEWISE_INLINE V decay(const V& x) {
  return exponential_within<true>(x);
}

/// Natural logarithm.
TILEWISE_INLINE Lanes logarithm(const Lanes& x) {
  const IntLanes tiny = greater(set(1.17549435e-38f), x);
  const Lanes scaled = select(tiny, x * set(8388608.0f), x);
  const IntLanes bits = as_int(scaled);
  // Choose the exponent so that the mantissa lies in [sqrt(1/2), sqrt(2)).
  const IntLanes offset = bits - set_int(0x3f3504f3);
  const IntLanes exponent = shift_right<23>(offset);
  const Lanes mantissa = as_float(bits - shift_left<23>(exponent));
  Lanes e;
  TILEWISE_EACH_PART e.part[p] = __builtin_convertvector(exponent.part[p], NativeF);
  e = e - select(tiny, set(23.0f), set(0.0f));
  const Lanes f = mantissa - set(1.0f);
  const Lanes z = f * f;
  Lanes p = set(7.0376836292e-2f);
  p = fused(p, f, set(-1.1514610310e-1f));
  p = fused(p, f, set(1.1676998740e-1f));
  p = fused(p, f, set(-1.2420140846e-1f));
  p = fused(p, f, set(1.4249322787e-1f));
  p = fused(p, f, set(-1.6668057665e-1f));
  p = fused(p, f, set(2.0000714765e-1f));
  p = fused(p, f, set(-2.4999993993e-1f));
  p = fused(p, f, set(3.3333331174e-1f));
  Lanes y = p * f * z;
  y = fused(e, set(-2.12194440e-4f), y);
  y = fused(z, set(-0.5f), y);
  y = fused(e, set(0.693359375f), f + y);
  y = select(greater(x, set(3.40282347e38f)), x, y);
  y = select(greater(x, set(0.0f)), y, set(-kInfinity));
  const Lanes nan = set(__builtin_nanf(""));
  TILEWISE_EACH_PART y.part[p] = x.part[p] >= 0.0f ? y.part[p] : nan.part[p];
  return y;
}
template <int N>
TILEWISE_INLINE RegisterBlock<N> logarithm(RegisterBlock<N> x) {
  TILEWISE_EACH_OF x.at[i] = logarithm(x.at[i]);
  return x;
}
TILEWISE_INLINE float logarithm(float x) { return logarithm(set(x)).part[0][0]; }

/// 1 / (1 + e^-x).
template <class V>
TILEWISE_INLINE V sigmoid(const V& x) {
  return splat<V>(1.0f) / (splat<V>(1.0f) + exponential(negate(x)));
}

/// Hyperbolic tangent for Lanes or RegisterBlock: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
template <class V>
TILEWISE_INLINE V tanh(const V& x) {
  const V t = magnitude(x), z = t * t, one = splat<V>(1.0f);
  V p = splat<V>(-5.70498872745e-3f);
  p = fused(p, z, splat<V>(2.06390887954e-2f));
  p = fused(p, z, splat<V>(-5.37397155531e-2f));
  p = fused(p, z, splat<V>(1.33314422036e-1f));
  p = fused(p, z, splat<V>(-3.33332819422e-1f));
  const V near = fused(p * z, t, t);
  const V far = one - splat<V>(2.0f) / (exponential(t + t) + one);
  return with_sign_of(select_above(t, 0.625f, far, near), x);
}

/// The error function for Lanes or RegisterBlock: a polynomial near 0, further out 1 - e^p.
template <class V>
TILEWISE_INLINE V erf(const V& x) {
  const V t = magnitude(x), z = t * t;
  V p = splat<V>(-5.96761703e-4f);
  p = fused(p, z, splat<V>(4.99119423e-3f));
  p = fused(p, z, splat<V>(-2.67681349e-2f));
  p = fused(p, z, splat<V>(1.12819925e-1f));
  p = fused(p, z, splat<V>(-3.76125336e-1f));
  p = fused(p, z, splat<V>(1.28379166e-1f));
  const V near = fused(p, t, t);
  p = fused(splat<V>(-1.72853470e-5f), t, splat<V>(3.83197126e-4f));
  p = fused(p, z, fused(splat<V>(-3.88396438e-3f), t, splat<V>(2.42546219e-2f)));
  p = fused(p, t, splat<V>(-1.06777877e-1f));
  p = fused(p, t, splat<V>(-6.34846687e-1f));
  p = fused(p, t, splat<V>(-1.28717512e-1f));
  p = fused(p, t, negate(t));
  const V far = splat<V>(1.0f) - exponential(p);
  return with_sign_of(select_above(t, 0.927734375f, far, near), x);
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
