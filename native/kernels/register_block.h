// Several `Lanes` at once: every operation runs on all of them before the next one starts.
//
// In a long chain of dependent operations such as exp, a processor would wait after each one. With several chains in
// parallel it does not. The values are those of single `Lanes`, so nothing here changes a bit.
#pragma once
#include "kernels/transfer.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Vectors per block: 4 registers, or 6 of the 16 of AVX2, which is 10 % faster than 4 or 8.
inline constexpr int kBlockRegisters = kParts == 1 ? 4 : kParts == 2 ? 3 : 1;

template <int N>
struct RegisterBlock {
  Lanes at[N];
};
template <int N>
struct RegisterBlockInt {
  IntLanes at[N];
};

#define TILEWISE_EACH_OF _Pragma("GCC unroll 8") for (int i = 0; i < N; ++i)

// NOLINTBEGIN(bugprone-macro-parentheses): `type` names a template
#define TILEWISE_BLOCK_BINARY(type, name, call)               \
  template <int N>                                            \
  TILEWISE_INLINE type<N> name(type<N> a, const type<N>& b) { \
    TILEWISE_EACH_OF a.at[i] = call;                          \
    return a;                                                 \
  }
// NOLINTEND(bugprone-macro-parentheses)
TILEWISE_BLOCK_BINARY(RegisterBlock, operator+, a.at[i] + b.at[i])
TILEWISE_BLOCK_BINARY(RegisterBlock, operator-, a.at[i] - b.at[i])
TILEWISE_BLOCK_BINARY(RegisterBlock, operator*, a.at[i] * b.at[i])
TILEWISE_BLOCK_BINARY(RegisterBlock, operator/, a.at[i] / b.at[i])
TILEWISE_BLOCK_BINARY(RegisterBlock, maximum, maximum(a.at[i], b.at[i]))
TILEWISE_BLOCK_BINARY(RegisterBlock, minimum, minimum(a.at[i], b.at[i]))
TILEWISE_BLOCK_BINARY(RegisterBlock, with_sign_of, with_sign_of(a.at[i], b.at[i]))

template <int N>
TILEWISE_INLINE RegisterBlock<N> fused(RegisterBlock<N> a, const RegisterBlock<N>& b, const RegisterBlock<N>& c) {
  TILEWISE_EACH_OF a.at[i] = fused(a.at[i], b.at[i], c.at[i]);
  return a;
}
template <int N>
TILEWISE_INLINE RegisterBlock<N> negate(RegisterBlock<N> a) {
  TILEWISE_EACH_OF a.at[i] = negate(a.at[i]);
  return a;
}
template <int N>
TILEWISE_INLINE RegisterBlock<N> magnitude(RegisterBlock<N> a) {
  TILEWISE_EACH_OF a.at[i] = magnitude(a.at[i]);
  return a;
}
template <int N>
TILEWISE_INLINE RegisterBlock<N> select_above(const RegisterBlock<N>& a, float limit, RegisterBlock<N> yes,
                                              const RegisterBlock<N>& no) {
  TILEWISE_EACH_OF yes.at[i] = select_above(a.at[i], limit, yes.at[i], no.at[i]);
  return yes;
}

/// Whether |x| <= limit in every lane; false if any is NaN.
template <int N>
TILEWISE_INLINE bool all_within(const RegisterBlock<N>& x, float limit) {
  NativeI most = {};
  TILEWISE_EACH_OF TILEWISE_EACH_PART {
    const NativeI bits = magnitude_bits(x.at[i].part[p]);
    most = most > bits ? most : bits;
  }
  return all_at_most(most, limit);
}
TILEWISE_INLINE bool all_within(const Lanes& x, float limit) { return all_within(RegisterBlock<1>{{x}}, limit); }

/// The same value in every lane of a V, which is Lanes or RegisterBlock.
template <class V>
struct Splat;
template <>
struct Splat<Lanes> {
  static TILEWISE_MEMBER Lanes of(float x) { return set(x); }
};
template <int N>
struct Splat<RegisterBlock<N>> {
  static TILEWISE_MEMBER RegisterBlock<N> of(float x) {
    RegisterBlock<N> r;
    TILEWISE_EACH_OF r.at[i] = set(x);
    return r;
  }
};
template <class V>
TILEWISE_INLINE V splat(float x) {
  return Splat<V>::of(x);
}

/// The same value in every lane of a vector of x's type.
template <class V>
TILEWISE_INLINE V splat_like(const V&, float value) {
  return splat<V>(value);
}

/// Columns [c, c + 16 N) of a row; with N = 1 the last `left` columns may be fewer than 16.
template <int N>
struct Columns {
  static constexpr int kCount = N;
  int64_t c, left;

  template <class T>
  TILEWISE_MEMBER RegisterBlock<N> load(const T* row, float fill = 0.0f) const {
    RegisterBlock<N> r;
    if constexpr (N == 1) {
      r.at[0] = TILEWISE_ISA_NS::load(row + c, left, fill);
    } else {
      TILEWISE_EACH_OF r.at[i] = TILEWISE_ISA_NS::load(row + c + i * kLanes);
    }
    return r;
  }
  template <class T>
  TILEWISE_MEMBER void store(T* row, const RegisterBlock<N>& x) const {
    if constexpr (N == 1) {
      TILEWISE_ISA_NS::store(row + c, x.at[0], left);
    } else {
      store_row(row + c, x.at);
    }
  }
  TILEWISE_MEMBER RegisterBlock<N> set(float x) const { return splat<RegisterBlock<N>>(x); }

  /// Prefetches these columns of a row that is read or written later, while long chains of operations leave memory
  /// idle.
  template <bool kWrites, class T>
  TILEWISE_MEMBER void prefetch(const T* row) const {
    for (int64_t i = 0; i < N * kLanes; i += 64 / sizeof(T)) __builtin_prefetch(row + c + i, kWrites);
  }
  /// Prefetches the columns `distance` elements further; `next` follows the end of `row`.
  template <bool kWrites, class T>
  TILEWISE_MEMBER void prefetch_ahead(const T* row, const T* next, int64_t distance) const {
    prefetch<kWrites>((distance < left ? row : next - c - left) + distance);
  }
};

/// body(Columns) over a row of n columns, ascending.
template <class Body>
TILEWISE_INLINE void each_column(int64_t n, const Body& body) {
  int64_t c = 0;
  if constexpr (kBlockRegisters > 1)
    for (; c + kBlockRegisters * kLanes <= n; c += kBlockRegisters * kLanes) body(Columns<kBlockRegisters>{c, n - c});
  for (; c < n; c += kLanes) body(Columns<1>{c, n - c});
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
