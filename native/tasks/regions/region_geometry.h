// Arithmetic of boxes: a normal form, so that equal boxes compare equal, and coordinates in a system of strides.
//
// Pure functions and plain data: no state, nothing blocks, any thread may call. Returns false for empty boxes and boxes
// without coordinates in a system. Boxes come from pto_region; cells go to the pages of the trees.
#pragma once
#include <cstdint>

#include "tasks/regions/region_box.h"

namespace tilewise::tasks {

/// 2^64 / divisor, rounded up: multiplying by it divides numbers below 2^32 exactly. Wider divisors give 0, which is
/// their quotient; a divisor of 1 also gives 0 and must not be used.
inline uint64_t reciprocal_of(uint64_t divisor) { return divisor >> 32 != 0 ? 0 : UINT64_MAX / divisor + 1; }

inline uint64_t divide(uint64_t a, uint64_t divisor, uint64_t reciprocal) {
  if (a >> 32 != 0) [[unlikely]]
    return a / divisor;
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * reciprocal >> 64);
}

/// Whether the divisor divides `a`. Both are below 2^32; the divisor may be 1. If it does, the product is a multiple of
/// 2^64 plus only the rounding error.
inline bool divides(uint64_t reciprocal, uint64_t a) { return a * reciprocal <= reciprocal - 1; }

/// Returns false if the box is empty.
inline bool normalise(const Box& box, NormalBox& normal) {
  if (box.ndim == 0 || box.ndim > kMaxDims) return false;
  uint32_t d = box.ndim - 1;
  uint32_t last = 0;  // the outermost dimension so far
  uint64_t size = box.size[d];  // its size
  uint64_t next = size;  // the stride of a dimension that is contiguous with it
  if (size == 0) return false;
  while (d-- > 0) {
    const uint64_t count = box.size[d], stride = box.stride[d];
    if (count <= 1 || stride == 0) {
      if (count == 0) return false;
    } else if (last == 0 && stride <= size) {
      size += stride * (count - 1);
      next = size;
    } else if (stride == next) {
      size *= count;
      next *= count;
    } else {
      normal.size[last] = size;
      normal.outer_stride[last] = stride;
      ++last;
      size = count;
      next = stride * count;
    }
  }
  normal.size[last] = size;
  normal.ndim = last + 1;
  normal.offset = box.offset;
  return true;
}

/// The strides of a coordinate system, from the smallest, which is 1.
struct StrideSystem {
  uint32_t ndim;  // 0: no coordinates
  uint64_t stride[kMaxDims];
  uint64_t reciprocal[kMaxDims];
};

inline StrideSystem system_of(const NormalBox& box) {
  StrideSystem system{box.ndim, {1}, {}};
  for (uint32_t d = 1; d < box.ndim; ++d) {
    system.stride[d] = box.stride(d);
    system.reciprocal[d] = reciprocal_of(system.stride[d]);
  }
  return system;
}

/// Coordinates of a box in a system.
struct Place {
  uint64_t begin[kMaxDims], size[kMaxDims];

  static int32_t shifted(uint64_t coordinate) {
    return static_cast<int32_t>(static_cast<uint32_t>(coordinate) ^ 0x80000000u);
  }

  Cells cells(uint32_t ndim) const {
    int32_t from[kMaxDims], to[kMaxDims];
    for (uint32_t k = 0; k < kMaxDims; ++k) {
      from[k] = shifted(k < ndim ? begin[k] : 0);
      to[k] = shifted(k < ndim ? begin[k] + size[k] : 1);
    }
    return {Cells::Lanes{from[0], from[1], from[2], from[3]}, Cells::Lanes{to[0], to[1], to[2], to[3]}};
  }
};

/// The box's size per dimension of the system. Each stride of the box must be one of the system's; runs of full rows,
/// which the normal form merges, are split again.
inline bool spread(const uint64_t* stride, uint32_t ndim, const NormalBox& box, const uint64_t* start, uint64_t* size) {
  uint32_t k = 0;
  for (; k < ndim; ++k) size[k] = 1;
  k = 0;
  for (uint32_t d = 0; d < box.ndim; ++d, ++k) {
    while (k < ndim && stride[k] != box.stride(d)) ++k;
    if (k == ndim) return false;
    size[k] = box.size[d];
  }
  for (k = 0; k + 1 < ndim; ++k) {
    if (start[k] != 0 || size[k + 1] != 1 || size[k] * stride[k] <= stride[k + 1]) continue;
    const uint64_t row = stride[k + 1] / stride[k];
    if (row * stride[k] != stride[k + 1] || size[k] % row != 0) return false;
    size[k + 1] = size[k] / row;
    size[k] = row;
  }
  return true;
}

/// Computes the coordinates of a box in a stride system. Returns false if it has none: its strides differ, it crosses
/// the end of a row (coordinates would not be unique), or they exceed 32 bits.
inline bool locate(const StrideSystem& system, const NormalBox& box, Place& place) {
  const uint32_t ndim = system.ndim;
  bool same = ndim == box.ndim;
  for (uint32_t k = 1; same && k < ndim; ++k) same = system.stride[k] == box.stride(k);
  if (!same && box.ndim >= ndim) return false;
  uint64_t rest = box.offset;
  for (uint32_t k = ndim - 1; k > 0; --k) {
    place.begin[k] = divide(rest, system.stride[k], system.reciprocal[k]);
    rest -= place.begin[k] * system.stride[k];
  }
  place.begin[0] = rest;
  if (same) {
    for (uint32_t k = 0; k < ndim; ++k) place.size[k] = box.size[k];
  } else if (!spread(system.stride, ndim, box, place.begin, place.size)) {
    return false;
  }
  uint64_t reach = 0;  // from the start of its row to the last byte of the box in it
  bool fits = true;
  for (uint32_t k = 0; k < ndim; ++k) {
    const uint64_t end = place.begin[k] + place.size[k];
    reach += (end - 1) * system.stride[k];
    fits &= (k + 1 == ndim || reach < system.stride[k + 1]) & (end < UINT32_MAX);
  }
  return fits;
}

/// Computes the cells of a box. Returns false if it has no coordinates; then its cells are everywhere.
inline bool place(const StrideSystem& system, const NormalBox& box, Cells& cells) {
  Place place;
  const bool is_placed = locate(system, box, place);
  cells = is_placed ? place.cells(system.ndim) : Cells::everywhere();
  return is_placed;
}

/// How a query overlaps a node if they have no common coordinates in the node's tree: searches a system that contains
/// both. Their byte ranges must overlap. Returns false if they share no byte.
bool compare_slowly(const NormalBox& query, const NormalBox& node, Overlap& overlap);

}  // namespace tilewise::tasks
