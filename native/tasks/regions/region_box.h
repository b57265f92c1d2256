// Boxes of a buffer as the region index stores them.
//
// Plain data in the memory of the index; region_index.h says who may call and what is rejected.
#pragma once
#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "tasks/regions/access.h"

namespace tilewise::tasks {

inline constexpr uint32_t kMaxDims = 4;

/// A strided box of bytes, as pto_region: dimensions from the largest stride; the last is contiguous (stride 1).
struct Box {
  uint64_t offset = 0;
  uint32_t ndim = 1;
  uint64_t size[kMaxDims] = {};
  uint64_t stride[kMaxDims] = {};
};

/// kCovered: the query covers the whole node. kInside: the node covers the whole query. For boxes of different strides
/// kPartial may also mean one of these.
enum class Overlap : uint8_t { kEqual, kCovered, kInside, kPartial };

/// A box in normal form, so that equal boxes compare equal: innermost dimension first, no dimension of size 1 except
/// the first, contiguous neighbours merged. Elements after the last dimension are unused.
struct NormalBox {
  uint64_t offset;
  uint64_t size[kMaxDims];
  uint64_t outer_stride[kMaxDims - 1];  // of dimension d + 1; dimension 0 is contiguous
  uint32_t ndim;
  uint32_t owner;  // the buffer; not part of the box

  uint64_t stride(uint32_t d) const { return d == 0 ? 1 : outer_stride[d - 1]; }
  uint64_t end() const {  // end of the last byte
    uint64_t byte = offset + size[0];
    for (uint32_t d = 1; d < ndim; ++d) byte += (size[d] - 1) * stride(d);
    return byte;
  }
  bool operator==(const NormalBox& other) const {
    bool equal = offset == other.offset && ndim == other.ndim && size[0] == other.size[0];
    for (uint32_t d = 1; d < ndim; ++d) equal &= size[d] == other.size[d] && stride(d) == other.stride(d);
    return equal;
  }
};

/// Coordinates [begin, end) in a stride system, shifted by 2^31 so that signed comparison orders them. Lanes that a box
/// does not use are [0, 1). A box without coordinates has all of them: its end is the maximum.
struct Cells {
  using Lanes = int32_t __attribute__((vector_size(16)));
  static constexpr int32_t kLowest = INT32_MIN, kHighest = INT32_MAX;

  Lanes begin, end;

  static Cells everywhere() { return {Lanes{} + kLowest, Lanes{} + kHighest}; }
  bool is_everywhere() const { return end[0] == kHighest; }
  bool meets(const Cells& other) const { return is_all((begin < other.end) & (other.begin < end)); }
  bool contains(const Cells& other) const { return is_all((begin <= other.begin) & (other.end <= end)); }
  void widen(const Cells& other) {
    begin = begin < other.begin ? begin : other.begin;
    end = end > other.end ? end : other.end;
  }
  static bool is_all(Lanes mask) {
#if defined(__SSE2__)
    return _mm_movemask_epi8(reinterpret_cast<__m128i>(mask)) == 0xFFFF;
#else
    return (mask[0] & mask[1] & mask[2] & mask[3]) != 0;
#endif
  }
};

/// One recorded box. `state` belongs to the caller, the rest to the index.
struct RegionNode {
  AccessState state;
  uint32_t next;  // in the hash bucket, or in the free list
  union {
    uint32_t leaf;    // the page that lists it
    uint32_t before;  // without pages: its neighbours in the list of the tree
  };
  uint32_t after;
  bool on_grid;  // the only box in its cell of the tree's grid
  bool is_small;  // on the grid, but smaller than its cell
  uint64_t written_at;  // number of its last write among all; 0: never written. See boxes.h
  NormalBox box;

  uint64_t lo() const { return box.offset; }
  uint64_t hi() const { return box.end(); }
};
static_assert(sizeof(RegionNode) == 144);

}  // namespace tilewise::tasks
