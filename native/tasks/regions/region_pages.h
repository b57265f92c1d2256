// The pages of the index's trees: finding the leaf of a key, adding and removing entries, splitting, bounds.
//
// Who may call: the index, one thread at a time (the caller's lock). Blocks: never. Pages are in the caller's memory
// and linked by indices; the object is only a view of them. An inner entry bounds everything below it; bounds may be
// too wide after removals, never too narrow. reserve and has_room_in reject changes that need more pages than are free.
// region_page_changes.h defines the changes.
#pragma once
#include <cstdint>

#include "tasks/regions/region_tree.h"

namespace tilewise::tasks {

inline constexpr uint32_t kFanout = 16;

/// Entries of a leaf (level 0) are nodes in any order; those of an inner page are pages ordered by lo.
struct alignas(64) RegionPage {
  Cells cells[kFanout];
  uint64_t lo[kFanout];
  uint64_t hi[kFanout];
  uint32_t child[kFanout];
  uint32_t count;
  uint32_t level;
  uint32_t parent;  // also the free list
  uint32_t slot;  // in the parent
};
static_assert(sizeof(RegionPage) == 896);

struct PageEntry {
  Cells cells;
  uint64_t lo, hi;
  uint32_t child;
};

/// In the shared memory: pages from `used` on have never been used.
struct PageCounts {
  uint32_t used, free, num_live;
};

class RegionPages {
 public:
  /// Four nodes per page on average: room for trees of few boxes and for pages that removals have thinned out.
  static uint32_t num_pages(uint32_t max_nodes) { return max_nodes / 4 + 8; }

  RegionPages(PageCounts* counts, RegionPage* pages, RegionNode* nodes, uint32_t max_nodes)
      : counts_(counts), pages_(pages), nodes_(nodes), max_pages_(num_pages(max_nodes)) {}

  uint32_t num_live() const { return counts_->num_live; }
  bool is_used_up() const { return counts_->num_live == max_pages_; }

  /// Reserves pages for one more node in a tree of `count` listed nodes. Returns false if there are too few.
  bool reserve(uint32_t count);
  /// Releases reserved pages when a tree has only `count` listed nodes left.
  void unreserve(uint32_t count);
  /// Makes a first, empty leaf for a tree of `count` listed nodes, and frees the pages reserved for them for their use.
  void plant(TreeHead& head, uint32_t count);

  /// Whether a leaf can take another entry.
  bool has_room_in(uint32_t leaf) const;
  /// The leaf for a key; usually the same one as last time.
  uint32_t leaf_for(TreeHead& head, uint64_t lo);
  void add_to_leaf(TreeHead& head, uint32_t leaf, const PageEntry& entry);
  void remove_from_leaf(TreeHead& head, uint32_t leaf, uint32_t node);
  /// Recomputes the cells of all nodes below a page after the grid has changed.
  void refresh_cells(const Grid& grid, uint32_t page);

  /// visit(page, at) for each leaf entry whose cells overlap these, in leaves with bytes in [lo, hi). Returns the
  /// number of pages visited.
  template <class Visit>
  uint32_t for_each_meeting(uint32_t root, const Cells& cells, uint64_t lo, uint64_t hi, Visit&& visit) const;

  /// visit(node) for each node of the tree.
  template <class Visit>
  void for_each(uint32_t root, Visit&& visit) const;

 private:
  static constexpr uint32_t kMaxHeight = 16;
  static constexpr uint32_t kMaxPending = kMaxHeight * kFanout;

  /// The number of pages of a tree that nodes fill in order.
  static uint32_t num_packed(uint32_t num_nodes);
  uint32_t take(uint32_t level);
  void give(uint32_t page);
  PageEntry get_entry(uint32_t page, uint32_t at) const;
  void set_entry(uint32_t page, uint32_t at, const PageEntry& entry);
  void insert_at(uint32_t page, uint32_t at, const PageEntry& entry);
  uint32_t add_entry(TreeHead& head, uint32_t page, uint32_t at, const PageEntry& entry);
  void sort_leaf(uint32_t leaf);
  void remove_page(TreeHead& head, uint32_t page);
  /// The parent's entry for a page.
  PageEntry summary(uint32_t page) const;
  void refresh_summaries(uint32_t page);
  void widen_summaries(uint32_t page, const PageEntry& entry);

  PageCounts* counts_;
  RegionPage* pages_;
  RegionNode* nodes_;
  uint32_t max_pages_;
};

template <class Visit>
uint32_t RegionPages::for_each_meeting(uint32_t root, const Cells& cells, uint64_t lo, uint64_t hi,
                                       Visit&& visit) const {
  uint32_t pending[kMaxPending], num_pending = 0, num_looked_at = 0;
  pending[num_pending++] = root;
  while (num_pending > 0) {
    const RegionPage& page = pages_[pending[--num_pending]];
    ++num_looked_at;
    const uint32_t count = page.count;
    if (page.level > 0) {
      for (uint32_t i = 0; i < count; ++i) {
        pending[num_pending] = page.child[i];
        num_pending += page.cells[i].meets(cells) & (page.lo[i] < hi) & (lo < page.hi[i]);
      }
      continue;
    }
    for (uint32_t i = 0; i < count; ++i) {
      if (page.cells[i].meets(cells)) visit(page, i);
    }
  }
  return num_looked_at;
}

template <class Visit>
void RegionPages::for_each(uint32_t root, Visit&& visit) const {
  uint32_t pending[kMaxPending], num_pending = 0;
  pending[num_pending++] = root;
  while (num_pending > 0) {
    const RegionPage& page = pages_[pending[--num_pending]];
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
