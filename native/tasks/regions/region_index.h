// Which recorded boxes of a buffer overlap a new box. Exact for boxes of one stride system, never missing an overlap
// otherwise.
//
// Who calls: one thread at a time (the caller's lock). Nothing blocks. All state lies in the caller's memory and is
// linked by indices, so that two processes can map it at two addresses; the object itself is only a view of it.
// Boxes come from pto_region; the states inside the nodes are the caller's. Refuses (kNone) when the memory is used up.
//
// How: every buffer has a tree of pages ordered by the lowest byte; each entry of a page has the bounds of all below
// it, as bytes and as coordinates in the stride system of the tree. Exact lookup goes through one hash table. While all
// boxes of a buffer are cells of one grid, no two of them meet and nobody needs the pages: so nodes are only listed,
// until the first question about overlaps files them in pages.
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "tasks/regions/region_box.h"

namespace tilewise::tasks {

/// The tree of one buffer; zero-cost to make, lies in the buffer's handle.
struct RegionTree {
  uint32_t root = kNone;  // its head
  uint32_t count = 0;
};
static_assert(sizeof(RegionTree) == 8);

class RegionIndex {
 public:
  static uint64_t bytes_needed(uint32_t max_nodes);

  /// memory: 64-byte aligned, bytes_needed() long; all zero when format is set, which touches one line.
  RegionIndex(std::byte* memory, uint32_t max_nodes, bool format);

  /// The node of exactly these bytes that `owner` (any number that names the buffer) has, or kNone.
  uint32_t find(uint32_t owner, const Box& box) const;

  /// A new node with an empty state. kNone: the box is empty, or the memory is used up; then nothing changed.
  /// The box must not be present.
  uint32_t insert(uint32_t owner, RegionTree& tree, const Box& box);
  void remove(uint32_t owner, RegionTree& tree, uint32_t node);

  /// Surely no other node of the tree overlaps this one: overlapping() would visit it alone.
  bool isolated(const RegionTree& tree, uint32_t node) const {
    return tree.count == 1 || (nodes_[node].on_grid && heads_[tree.root].num_off_grid == 0);
  }

  /// visit(node, Overlap) for each node that shares a byte with the box; it must not insert or remove. Returns the
  /// number of pages looked at. The first question about a tree files its nodes, O(n log n) once in the tree's life.
  template <class Visit>
  uint32_t overlapping(const RegionTree& tree, const Box& box, Visit&& visit);

  /// visit(node) for each node of the tree; it must not insert or remove.
  template <class Visit>
  void for_each(const RegionTree& tree, Visit&& visit) const;

  /// The box is written now, after all that were written before.
  void note_write(uint32_t node) { nodes_[node].written_at = ++header_->num_writes; }

  RegionNode& operator[](uint32_t node) { return nodes_[node]; }
  const RegionNode& operator[](uint32_t node) const { return nodes_[node]; }
  uint32_t num_live() const { return header_->num_live; }
  uint32_t high_water() const { return header_->high_live; }
  uint32_t num_live_pages() const { return header_->num_live_pages; }  // in use, or promised to listed nodes

 private:
  static constexpr uint32_t kFanout = 16;
  static constexpr uint32_t kMaxHeight = 16;
  static constexpr uint32_t kMaxPending = kMaxHeight * kFanout;

  struct Entry {
    Cells cells;
    uint64_t lo, hi;
    uint32_t child;
  };

  /// Entries of a leaf (level 0) are nodes in any order; those of an inner page are pages ordered by lo.
  struct alignas(64) Page {
    Cells cells[kFanout];
    uint64_t lo[kFanout];
    uint64_t hi[kFanout];
    uint32_t child[kFanout];
    uint32_t count;
    uint32_t level;
    uint32_t parent;  // also the free list
    uint32_t slot;  // in the parent
  };

  /// The strides that coordinates count in, from the smallest, which is 1.
  struct System {
    uint32_t ndim;  // 0: no coordinates
    uint64_t stride[kMaxDims];
    uint64_t reciprocal[kMaxDims];
  };

  /// One dimension of a tree's grid.
  struct Axis {
    uint32_t cell, phase;
    uint64_t pitch, reciprocal;  // bytes from cell to cell
    uint64_t limit;  // where the cells end, in bytes from the origin of the grid
  };

  /// What the nodes of a tree have in common. The first box chooses the stride system and the grid: cells of its
  /// size, in phase with it. While every box fills or starts a cell of its own, none overlaps another.
  struct alignas(64) Head {
    uint32_t root;  // kNone: no pages
    uint32_t first;  // without pages: the node inserted last
    uint32_t num_off_grid;
    uint32_t num_small;
    System system;
    Axis grid[kMaxDims];
    uint64_t origin;  // of the grid
    uint32_t next;  // free list
    uint32_t hint;  // the leaf for keys in [hint_lo, hint_hi)
    uint64_t hint_lo, hint_hi;
  };

  struct alignas(64) Header {
    uint32_t num_live, high_live;
    uint32_t used_nodes, free_node;  // nodes from used_nodes on were never given out
    uint32_t used_pages, free_page, num_live_pages, used_heads, free_head;
    uint64_t num_writes;
  };

  static bool normalise(const Box& box, NormalBox& normal);
  static uint32_t num_packed_pages(uint32_t num_nodes);
  struct Place;  // coordinates as numbers
  static bool locate(const System& system, const NormalBox& box, Place& place);
  static bool place(const System& system, const NormalBox& box, Cells& cells);
  static System system_of(const NormalBox& box);
  static bool compare_slowly(const NormalBox& query, const NormalBox& node, Overlap& overlap);

  // Lanes that a box does not use are [0, 1). What has no coordinates has all of them: its end is the largest.
  static constexpr int32_t kLowest = INT32_MIN, kHighest = INT32_MAX;
  static Cells everywhere() { return {Cells::Lanes{} + kLowest, Cells::Lanes{} + kHighest}; }
  static bool all(Cells::Lanes mask) {
#if defined(__SSE2__)
    return _mm_movemask_epi8(reinterpret_cast<__m128i>(mask)) == 0xFFFF;
#else
    return (mask[0] & mask[1] & mask[2] & mask[3]) != 0;
#endif
  }
  static bool meet(const Cells& a, const Cells& b) { return all((a.begin < b.end) & (b.begin < a.end)); }
  static bool contains(const Cells& a, const Cells& b) { return all((a.begin <= b.begin) & (b.end <= a.end)); }

  uint32_t bucket_of(uint32_t owner, uint64_t offset) const;
  uint32_t bucket_head(uint32_t bucket) const;
  void adopt_system(Head& head, const RegionTree& tree, const NormalBox& box, const Place& place);
  void refresh_cells(const Head& head, uint32_t page);
  static bool fills_cell(const Head& head, const NormalBox& box);
  bool is_first_at(const NormalBox& box, uint32_t bucket) const;
  bool takes_own_cell(const Head& head, const Place& place, RegionNode& node, uint32_t bucket) const;
  uint32_t insert_with_care(RegionTree& tree, uint32_t node, uint32_t bucket);
  bool promise_pages(uint32_t count);
  void enter(RegionTree& tree, uint32_t node, uint32_t bucket);
  bool new_tree(RegionTree& tree);
  void list_node(Head& head, uint32_t node);
  void file_nodes(Head& head, uint32_t count);
  uint32_t new_page(uint32_t level);
  void free_page(uint32_t page);
  bool has_pages_for(uint32_t leaf) const;
  uint32_t leaf_for(Head& head, uint64_t lo);
  void add_to_leaf(Head& head, uint32_t leaf, const Entry& entry);
  uint32_t add_entry(Head& head, uint32_t page, uint32_t at, const Entry& entry);
  void insert_at(uint32_t page, uint32_t at, const Entry& entry);
  void set_entry(uint32_t page, uint32_t at, const Entry& entry);
  Entry get_entry(uint32_t page, uint32_t at) const;
  void sort_leaf(uint32_t page);
  Entry summary(uint32_t page) const;
  void refresh_summaries(uint32_t page);
  void widen_summaries(uint32_t page, const Entry& entry);
  void remove_from_leaf(Head& head, uint32_t leaf, uint32_t node);
  void remove_page(Head& head, uint32_t page);

  Header* header_;
  RegionNode* nodes_;
  Page* pages_;
  Head* heads_;
  uint32_t* buckets_;
  uint32_t max_nodes_, max_pages_, bucket_mask_;
};

template <class Visit>
uint32_t RegionIndex::overlapping(const RegionTree& tree, const Box& box, Visit&& visit) {
  NormalBox query;
  if (tree.count == 0 || !normalise(box, query)) return 0;
  Head& head = heads_[tree.root];
  if (head.root == kNone) file_nodes(head, tree.count);
  Cells cells;
  const bool placed = place(head.system, query, cells);
  const uint64_t query_end = query.end();
  uint32_t pending[kMaxPending], num_pending = 0, num_looked_at = 0;
  pending[num_pending++] = head.root;
  while (num_pending > 0) {
    const Page& page = pages_[pending[--num_pending]];
    ++num_looked_at;
    const uint32_t count = page.count;
    if (page.level > 0) {
      for (uint32_t i = 0; i < count; ++i) {
        pending[num_pending] = page.child[i];
        num_pending += meet(page.cells[i], cells) & (page.lo[i] < query_end) & (query.offset < page.hi[i]);
      }
      continue;
    }
    for (uint32_t i = 0; i < count; ++i) {
      if (!meet(page.cells[i], cells)) continue;
      Overlap overlap = Overlap::kPartial;
      if (placed && page.cells[i].end[0] != kHighest) {
        if (contains(cells, page.cells[i])) {
          overlap = contains(page.cells[i], cells) ? Overlap::kEqual : Overlap::kCovered;
        } else if (contains(page.cells[i], cells)) {
          overlap = Overlap::kInside;
        }
      } else if (page.lo[i] >= query_end || query.offset >= page.hi[i] ||
                 !compare_slowly(query, nodes_[page.child[i]].box, overlap)) {
        continue;
      }
      visit(page.child[i], overlap);
    }
  }
  return num_looked_at;
}

template <class Visit>
void RegionIndex::for_each(const RegionTree& tree, Visit&& visit) const {
  if (tree.count == 0) return;
  if (heads_[tree.root].root == kNone) {
    for (uint32_t node = heads_[tree.root].first; node != kNone; node = nodes_[node].after) visit(node);
    return;
  }
  uint32_t pending[kMaxPending], num_pending = 0;
  pending[num_pending++] = heads_[tree.root].root;
  while (num_pending > 0) {
    const Page& page = pages_[pending[--num_pending]];
    for (uint32_t i = 0; i < page.count; ++i) {
      if (page.level > 0) {
        pending[num_pending++] = page.child[i];
      } else {
        visit(page.child[i]);
      }
    }
  }
}

}  // namespace tilewise::tasks
