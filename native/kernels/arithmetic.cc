// Elementwise arithmetic, comparisons and losses, one pass over memory each.
#include "kernels/declared/arithmetic.h"

#include "kernels/kernel.h"
#include "kernels/map_rows.h"
#include "kernels/math.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// fn on every native vector of blocks.
template <int N, class Fn>
TILEWISE_INLINE RegisterBlock<N> by_part(const RegisterBlock<N>& a, const RegisterBlock<N>& b, const Fn& fn) {
  RegisterBlock<N> r;
  TILEWISE_EACH_OF TILEWISE_EACH_PART r.at[i].part[p] = fn(a.at[i].part[p], b.at[i].part[p]);
  return r;
}

/// 1 where a > b, else 0, also where a NaN takes part.
template <class V>
TILEWISE_INLINE V is_above(const V& a, const V& b) {
  return by_part(a, b, [](NativeF x, NativeF y) TILEWISE_INLINED { return x > y ? native_set(1.0f) : NativeF{}; });
}
template <class V>
TILEWISE_INLINE V is_same(const V& a, const V& b) {
  return by_part(a, b, [](NativeF x, NativeF y) TILEWISE_INLINED { return x == y ? native_set(1.0f) : NativeF{}; });
}

/// `value`, or a where a is NaN.
template <class V>
TILEWISE_INLINE V unless_nan(const V& a, const V& value) {
  return by_part(a, value, [](NativeF x, NativeF y) TILEWISE_INLINED { return x == x ? y : x; });
}

// kernel subtract  f32 bf16: out out, in a, in b, 1 flop per element
template <class T>
void SubtractKernel<T>::run() const {
  map_rows(out, [](const auto& a, const auto& b) TILEWISE_INLINED { return a - b; }, a, b);
}

// kernel divide  f32 bf16: out out, in a, in b, 1 flop per element
template <class T>
void DivideKernel<T>::run() const {
  map_rows(out, [](const auto& a, const auto& b) TILEWISE_INLINED { return a / b; }, a, b);
}

// kernel shift  f32 bf16: out out, in x, float value, 1 flop per element
template <class T>
void ShiftKernel<T>::run() const {
  map_rows(out, [v = value](const auto& x) TILEWISE_INLINED { return x + splat_like(x, v); }, x);
}

// kernel maximum  f32 bf16: out out, in a, in b, 1 flop per element
/// NaN if one of them is.
template <class T>
void MaximumKernel<T>::run() const {
  map_rows(out, [](const auto& a, const auto& b) TILEWISE_INLINED { return unless_nan(a, maximum(a, b)); }, a, b);
}

// kernel minimum  f32 bf16: out out, in a, in b, 1 flop per element
template <class T>
void MinimumKernel<T>::run() const {
  map_rows(out, [](const auto& a, const auto& b) TILEWISE_INLINED { return unless_nan(a, minimum(a, b)); }, a, b);
}

// kernel maximum_backward  f32 bf16: out da, in dy, in a, in b, 3 flops per element
/// The first operand's share of dy: all where it is larger, half where both are equal.
template <class T>
void MaximumBackwardKernel<T>::run() const {
  const auto share = [](const auto& dy, const auto& a, const auto& b)
                         TILEWISE_INLINED { return dy * (is_above(a, b) + splat_like(a, 0.5f) * is_same(a, b)); };
  map_rows(da, share, dy, a, b);
}

// kernel greater  f32 bf16: out out, in a, in b, 1 flop per element
/// 1 where a > b, else 0.
template <class T>
void GreaterKernel<T>::run() const {
  map_rows(out, [](const auto& a, const auto& b) TILEWISE_INLINED { return is_above(a, b); }, a, b);
}

// kernel equal  f32 bf16: out out, in a, in b, 1 flop per element
template <class T>
void EqualKernel<T>::run() const {
  map_rows(out, [](const auto& a, const auto& b) TILEWISE_INLINED { return is_same(a, b); }, a, b);
}

// kernel equal_to  f32 bf16
//   out out[m d]
//   in x:i32[m d]
//   int value
//   flops m * d
//   bytes 2 * item * m * d
/// 1 where an integer has this value, else 0.
template <class T>
void EqualToKernel<T>::run() const {
  T one[kLanes];
  store(one, set(1.0f));
  for (int64_t r = 0; r < out.rows; ++r)
    for (int64_t c = 0; c < out.cols; ++c) out.row(r)[c] = x.row(r)[c] == value ? one[0] : T{};
}

// kernel select  f32 bf16
//   out out[m d]
//   in mask[m d], a?[m d], b?[m d]
//   flops m * d
//   bytes 3 * item * m * d
/// a where the mask is not 0, b where it is; an absent operand is 0.
template <class T>
void SelectKernel<T>::run() const {
  for (int64_t r = 0; r < out.rows; ++r) {
    const T *which = mask.row(r), *yes = a.data ? a.row(r) : nullptr, *no = b.data ? b.row(r) : nullptr;
    T* to = out.row(r);
    each_column(out.cols, [&](auto at) TILEWISE_INLINED {
      const auto zero = at.set(0.0f), m = at.load(which);
      const auto left = yes ? at.load(yes) : zero, right = no ? at.load(no) : zero;
      auto chosen = zero;
      for (int i = 0; i < at.kCount; ++i)
        TILEWISE_EACH_PART chosen.at[i].part[p] =
            m.at[i].part[p] != NativeF{} ? left.at[i].part[p] : right.at[i].part[p];
      at.store(to, chosen);
    });
  }
}

// kernel sigmoid  f32 bf16: out out, in x, 3 flops per element
template <class T>
void SigmoidKernel<T>::run() const {
  map_rows<kPrefetchBytes>(out, [](const auto& x) TILEWISE_INLINED { return sigmoid(x); }, x);
}

// kernel sigmoid_backward  f32 bf16: out dx, in dy, in y, 3 flops per element
/// Computed from the result y: dy y (1 - y).
template <class T>
void SigmoidBackwardKernel<T>::run() const {
  map_rows(
      dx, [](const auto& dy, const auto& y) TILEWISE_INLINED { return dy * (y * (splat_like(y, 1.0f) - y)); }, dy, y);
}

// kernel sqrt  f32 bf16: out out, in x, 1 flop per element
template <class T>
void SqrtKernel<T>::run() const {
  const auto root = [](auto x) TILEWISE_INLINED {
    for (auto& lanes : x.at) lanes = square_root(lanes);
    return x;
  };
  map_rows(out, root, x);
}

/// x^n for n >= 0.
template <class V>
TILEWISE_INLINE V whole_power(V x, int64_t n) {
  V result = splat_like(x, 1.0f);
  for (; n > 0; n >>= 1) {
    if (n & 1) result = result * x;
    x = x * x;
  }
  return result;
}

// kernel power  f32 bf16: out out, in x, float exponent, 4 flops per element
/// Whole and half exponents up to 64 by products and roots, others as e^(exponent ln x).
template <class T>
void PowerKernel<T>::run() const {
  const float twice = exponent * 2.0f, size = twice < 0 ? -twice : twice;
  const bool is_exact = size <= 128.0f && size == static_cast<float>(static_cast<int64_t>(size));
  if (is_exact) {
    const auto halves = static_cast<int64_t>(size);
    const bool is_inverse = twice < 0;
    const auto by_products = [halves, is_inverse](const auto& x) TILEWISE_INLINED {
      auto y = whole_power(x, halves / 2);
      if (halves & 1) {
        auto root = x;
        for (auto& lanes : root.at) lanes = square_root(lanes);
        y = y * root;
      }
      return is_inverse ? splat_like(x, 1.0f) / y : y;
    };
    return map_rows(out, by_products, x);
  }
  const auto by_log = [e = exponent](const auto& x)
                          TILEWISE_INLINED { return exponential(splat_like(x, e) * logarithm(x)); };
  map_rows(out, by_log, x);
}

// kernel abs  f32 bf16: out out, in x, 1 flop per element
template <class T>
void AbsKernel<T>::run() const {
  map_rows(out, [](const auto& x) TILEWISE_INLINED { return magnitude(x); }, x);
}

// kernel abs_backward  f32 bf16: out dx, in dy, in x, 2 flops per element
/// dy times the sign of x, which is 0 at 0.
template <class T>
void AbsBackwardKernel<T>::run() const {
  const auto signed_by = [](const auto& dy, const auto& x) TILEWISE_INLINED {
    const auto zero = splat_like(x, 0.0f);
    return dy * (is_above(x, zero) - is_above(zero, x));
  };
  map_rows(dx, signed_by, dy, x);
}

/// ln(1 + x) of x in [0, 1]: the quotient corrects the logarithm for the rounding of 1 + x.
template <int N>
TILEWISE_INLINE RegisterBlock<N> log_one_plus(const RegisterBlock<N>& x) {
  const auto one = splat_like(x, 1.0f), sum = one + x, rounded = sum - one;
  RegisterBlock<N> result = logarithm(sum) * (x / maximum(rounded, splat_like(x, 1e-30f)));
  TILEWISE_EACH_OF TILEWISE_EACH_PART {
    NativeF& y = result.at[i].part[p];
    y = rounded.at[i].part[p] == NativeF{} ? x.at[i].part[p] : y;
  }
  return result;
}

// kernel bce_with_logits  f32 bf16: out out, in x, in target, 8 flops per element
/// Binary cross-entropy of a logit: max(x, 0) - x target + ln(1 + e^-|x|).
template <class T>
void BceWithLogitsKernel<T>::run() const {
  const auto loss = [](const auto& x, const auto& target) TILEWISE_INLINED {
    const auto above = maximum(splat_like(x, 0.0f), x);
    return above - x * target + log_one_plus(decay(negate(magnitude(x))));
  };
  map_rows(out, loss, x, target);
}

// kernel bce_with_logits_backward  f32 bf16: out dx, in dy, in x, in target, 5 flops per element
template <class T>
void BceWithLogitsBackwardKernel<T>::run() const {
  const auto slope = [](const auto& dy, const auto& x, const auto& target)
                         TILEWISE_INLINED { return dy * (sigmoid(x) - target); };
  map_rows(dx, slope, dy, x, target);
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/arithmetic_entries.h"
