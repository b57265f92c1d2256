// The common data of the nodes of one buffer: the grid, and the list of nodes that are not in pages yet.
//
// Plain data in the memory of the index, linked by indices; region_index.h says who may call and what is rejected.
// Boxes are normalized by the index.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

#include "tasks/regions/region_box.h"
#include "tasks/regions/region_geometry.h"

namespace tilewise::tasks {

/// The tree of one buffer, stored in the buffer's handle; an empty one costs nothing.
struct RegionTree {
  uint32_t root = kNone;  // its head
  uint32_t count = 0;
};
static_assert(sizeof(RegionTree) == 8);

/// One dimension of a grid.
struct Axis {
  uint32_t cell, phase;
  uint64_t pitch, reciprocal;  // bytes from cell to cell
  uint64_t limit;              // end of the cells, in bytes from the origin of the grid
};

/// The stride system of a tree, and cells of one size, aligned to the box that chose both. While every box fills or
/// starts its own cell, no two boxes overlap.
struct Grid {
  StrideSystem system;
  Axis axes[kMaxDims];
  uint64_t origin;

  /// Adopts the stride system and the cells of a box, whose place in that system is `place`.
  void adopt(const NormalBox& box, const Place& place) {
    constexpr uint64_t kMaxBytes = uint64_t{1} << 63;
    system = system_of(box);
    origin = 0;
    for (uint32_t d = 0; d < box.ndim; ++d) {
      const uint64_t stride = box.stride(d), cell = place.size[d], phase = place.begin[d] % cell;
      const uint64_t end = d + 1 < box.ndim ? box.stride(d + 1) / stride : UINT32_MAX - 1;
      const uint64_t num_cells = (std::min<uint64_t>(end, UINT32_MAX - 1) - phase) / cell;
      const uint64_t pitch = cell * stride;
      const uint64_t limit = num_cells < kMaxBytes / pitch ? num_cells * pitch : kMaxBytes;
      axes[d] = {static_cast<uint32_t>(cell), static_cast<uint32_t>(phase), pitch, reciprocal_of(pitch), limit};
      origin += phase * stride;
    }
  }

  /// Whether a box is a whole cell. (starts_cell handles boxes with fewer dimensions than the system.)
  bool is_cell(const NormalBox& box) const {
    if (box.ndim != system.ndim) return false;
    uint64_t rest = box.offset - origin;  // wraps beyond every limit if the box is before the grid
    for (uint32_t d = box.ndim - 1; d > 0; --d) {
      const Axis& axis = axes[d];
      if (box.size[d] != axis.cell || box.stride(d) != system.stride[d] || rest >= axis.limit) return false;
      rest -= divide(rest, axis.pitch, axis.reciprocal) * axis.pitch;
    }
    const Axis& axis = axes[0];
    return box.size[0] == axis.cell && rest < axis.limit && divides(axis.reciprocal, rest);
  }

  /// Whether a place begins where a cell does and stays inside it; if so, sets whether it is smaller than the cell.
  bool starts_cell(const Place& place, bool& is_smaller) const {
    is_smaller = false;
    for (uint32_t d = 0; d < system.ndim; ++d) {
      const Axis& axis = axes[d];
      if (place.size[d] > axis.cell || place.begin[d] % axis.cell != axis.phase) return false;
      is_smaller |= place.size[d] < axis.cell;
    }
    return true;
  }
};

/// The head of a tree. Its first box chooses the grid.
struct alignas(64) TreeHead {
  uint32_t root;  // kNone: no pages
  uint32_t first;  // without pages: the node inserted last
  uint32_t num_off_grid;
  uint32_t num_small;
  Grid grid;
  uint32_t next;  // free list
  uint32_t hint;  // the leaf for keys in [hint_lo, hint_hi)
  uint64_t hint_lo, hint_hi;
};
static_assert(sizeof(TreeHead) == 256);

// ---- the list of a tree without pages: linked by `before` and `after`, the newest node first

inline void list_node(RegionNode* nodes, TreeHead& head, uint32_t index) {
  nodes[index].before = kNone;
  nodes[index].after = head.first;
  if (head.first != kNone) nodes[head.first].before = index;
  head.first = index;
}

inline void unlist_node(RegionNode* nodes, TreeHead& head, uint32_t index) {
  const RegionNode& node = nodes[index];
  (node.before == kNone ? head.first : nodes[node.before].after) = node.after;
  if (node.after != kNone) nodes[node.after].before = node.before;
}

/// Merges two lists in the order of the first bytes.
inline uint32_t merged_lists(RegionNode* nodes, uint32_t a, uint32_t b) {
  if (a == kNone || b == kNone) return a == kNone ? b : a;
  const uint32_t first = nodes[a].lo() <= nodes[b].lo() ? a : b;
  uint32_t last = kNone;
  while (a != kNone && b != kNone) {
    const bool is_a = nodes[a].lo() <= nodes[b].lo();
    const uint32_t lower = is_a ? a : b;
    if (last != kNone) nodes[last].after = lower;
    const uint32_t next = nodes[lower].after;
    a = is_a ? next : a;
    b = is_a ? b : next;
    last = lower;
  }
  nodes[last].after = a == kNone ? b : a;
  return first;
}

/// Merge sort of a list linked by `after` alone. It begins with the newest node, so that insertions in ascending order
/// are one run, which is reversed. runs[k]: 2^k merged runs.
inline uint32_t sorted_by_lo(RegionNode* nodes, uint32_t newest) {
  constexpr uint32_t kLevels = 25;
  uint32_t runs[kLevels];
  std::fill(runs, runs + kLevels, kNone);
  while (newest != kNone) {
    uint32_t run = kNone;
    do {
      const uint32_t next = nodes[newest].after;
      nodes[newest].after = run;
      run = std::exchange(newest, next);
    } while (newest != kNone && nodes[newest].lo() < nodes[run].lo());
    uint32_t k = 0;
    for (; runs[k] != kNone; ++k) run = merged_lists(nodes, std::exchange(runs[k], kNone), run);
    runs[k] = run;
  }
  uint32_t all = kNone;
  for (const uint32_t run : runs) all = merged_lists(nodes, run, all);
  return all;
}

}  // namespace tilewise::tasks
