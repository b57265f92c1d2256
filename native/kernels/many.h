// Several `Lanes` side by side: every operation runs on all of them before the next one starts.
//
// A chain as long as exp leaves a processor waiting when vectors come one after the other; side by side their chains
// overlap. The values are those of single `Lanes`, so nothing here changes a bit.
#pragma once
#include "kernels/simd.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Vectors side by side, as the registers of the level allow.
inline constexpr int kMany = kParts == 1 ? 4 : 1;
inline constexpr int64_t kManyLanes = kMany * kLanes;

template <int N>
struct Many {
  Lanes at[N];
};
template <int N>
struct ManyInt {
  IntLanes at[N];
};

#define TILEWISE_EACH_OF _Pragma("GCC unroll 8") for (int i = 0; i < N; ++i)

#define TILEWISE_MANY_BINARY(type, name, call)                            \
  template <int N>                                                        \
  TILEWISE_INLINE type<N> name(type<N> a, const type<N>& b) {             \
    TILEWISE_EACH_OF a.at[i] = call;                                      \
    return a;                                                             \
  }
TILEWISE_MANY_BINARY(Many, operator+, a.at[i] + b.at[i])
TILEWISE_MANY_BINARY(Many, operator-, a.at[i] - b.at[i])
TILEWISE_MANY_BINARY(Many, operator*, a.at[i] * b.at[i])
TILEWISE_MANY_BINARY(Many, operator/, a.at[i] / b.at[i])
TILEWISE_MANY_BINARY(Many, maximum, maximum(a.at[i], b.at[i]))
TILEWISE_MANY_BINARY(Many, minimum, minimum(a.at[i], b.at[i]))

template <int N>
TILEWISE_INLINE Many<N> fused(Many<N> a, const Many<N>& b, const Many<N>& c) {
  TILEWISE_EACH_OF a.at[i] = fused(a.at[i], b.at[i], c.at[i]);
  return a;
}
template <int N>
TILEWISE_INLINE Many<N> negate(Many<N> a) {
  TILEWISE_EACH_OF a.at[i] = negate(a.at[i]);
  return a;
}

/// The same value in every lane of a V, which is Lanes or Many.
template <class V>
struct Splat;
template <>
struct Splat<Lanes> {
  TILEWISE_INLINE Lanes of(float x) { return set(x); }
};
template <int N>
struct Splat<Many<N>> {
  TILEWISE_INLINE Many<N> of(float x) {
    Many<N> r;
    TILEWISE_EACH_OF r.at[i] = set(x);
    return r;
  }
};
template <class V>
TILEWISE_INLINE V splat(float x) {
  return Splat<V>::of(x);
}

template <int N, class T>
TILEWISE_INLINE Many<N> load_many(const T* from) {
  Many<N> r;
  TILEWISE_EACH_OF r.at[i] = load(from + i * kLanes);
  return r;
}
template <int N, class T>
TILEWISE_INLINE void store_many(T* to, const Many<N>& x) {
  TILEWISE_EACH_OF store(to + i * kLanes, x.at[i]);
}

/// body(c, n, width) over [0, n): kManyLanes at a time, then one vector at a time; see Wide and Edge.
struct Wide {
  using V = Many<kMany>;
  int64_t left;
  template <class T>
  TILEWISE_INLINE V load(const T* from, int64_t, float) {
    return load_many<kMany>(from);
  }
};

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
