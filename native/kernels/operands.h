// Operands and attributes of a call, as kernels see them by name.
//
// declarations.py makes a struct of these types from every declaration of a kernel. The struct is built once per call,
// from KernelArgs. Compiled once per level, like the kernels.
#pragma once
#include "kernels/kernel.h"
#include "kernels/simd.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// An operand with elements of type T, which is const if the kernel only reads it.
template <class T>
struct Tile : TileView {
  Tile() : TileView{} {}  // an absent operand
  TILEWISE_MEMBER explicit Tile(const TileView& view) : TileView(view) {}

  TILEWISE_MEMBER T* row(int64_t index) const { return static_cast<T*>(data) + index * stride; }
  /// The next row, or the last row itself, for prefetches.
  TILEWISE_MEMBER T* next_row(int64_t index) const { return row(smaller(index + 1, rows - 1)); }
  TILEWISE_MEMBER T* elements() const { return static_cast<T*>(data); }
};

/// A row of an operand whose elements have one of several types, which is known at run time.
template <class T>
TILEWISE_INLINE T* row_of(const TileView& tile, int64_t index) {
  return static_cast<T*>(tile.data) + index * tile.stride;
}

/// A list of operands; the members of kStep lists alternate.
template <class T, int kStep>
struct Tiles {
  const TileView* first = nullptr;
  int64_t size = 0;

  Tiles() = default;
  TILEWISE_MEMBER Tiles(const TileView* tiles, int64_t count) : first(tiles), size(count) {}
  TILEWISE_MEMBER Tile<T> operator[](int64_t index) const { return Tile<T>(first[index * kStep]); }
};

/// A list of integers or floats.
template <class T>
struct Span {
  const T* data;
  int64_t size;

  TILEWISE_MEMBER Span(const T* values, int64_t count) : data(values), size(count) {}
  TILEWISE_MEMBER const T& operator[](int64_t index) const { return data[index]; }
};

/// The type of the elements of a kernel's own dtype: D::T if D describes how products of that dtype are computed.
template <class D>
struct ElementType {
  using Type = D;
};
template <class D>
  requires requires { typename D::T; }
struct ElementType<D> {
  using Type = typename D::T;
};
template <class D>
using ElementOf = typename ElementType<D>::Type;

/// The product of a list's factors; -1 if one is negative or the product does not fit.
template <class... Factors>
inline int64_t length_of(Factors... factors) {
  int64_t length = 1;
  bool fits = true;
  ((fits = fits && factors >= 0 && !__builtin_mul_overflow(length, static_cast<int64_t>(factors), &length)), ...);
  return fits ? length : -1;
}

template <class Kernel>
void run_kernel(const KernelArgs& args) {
  Kernel(args).run();
}

template <class Kernel>
constexpr Entry entry_of(const char* name) {
  return {name, run_kernel<Kernel>, Kernel::fits};
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
