// Finds the recorded boxes of a buffer that overlap a new box. Exact for boxes of one stride system; otherwise it never
// misses an overlap.
//
// Who may call: one thread at a time (the caller's lock). Blocks: never. All state is in the caller's memory and linked
// by indices, so that two processes can map it at different addresses; the object is only a view of it. Boxes come from
// pto_region; the states inside the nodes are the caller's. Returns kNone if the memory is used up.
//
// How it works: every buffer has a tree of pages ordered by the lowest byte (region_pages.h). Each entry of a page has
// the bounds of everything below it, as bytes and as coordinates in the tree's stride system (region_geometry.h). Exact
// lookup uses one hash table (region_table.h). While all boxes of a buffer are cells of one grid (region_tree.h), no
// two of them overlap and no query needs the pages. So nodes are only listed, until the first query about overlaps
// moves them to pages.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tasks/regions/region_box.h"
#include "tasks/regions/region_geometry.h"
#include "tasks/regions/region_pages.h"
#include "tasks/regions/region_table.h"
#include "tasks/regions/region_tree.h"

namespace tilewise::tasks {

class RegionIndex {
 public:
  static uint64_t bytes_needed(uint32_t max_nodes);

  /// memory: 64-byte aligned, bytes_needed() long; all zero when format is set, which touches one line.
  RegionIndex(std::byte* memory, uint32_t max_nodes, bool format);

  /// The node of `owner` (any number that identifies the buffer) with exactly these bytes, or kNone.
  uint32_t find(uint32_t owner, const Box& box) const;

  /// Adds a node with an empty state. kNone: the box is empty or memory is exhausted; then nothing has changed. The box
  /// must not be present.
  uint32_t insert(uint32_t owner, RegionTree& tree, const Box& box);
  void remove(uint32_t owner, RegionTree& tree, uint32_t node);

  /// Whether no other node of the tree overlaps this one, as far as the grid tells: overlapping() would visit only it.
  bool isolated(const RegionTree& tree, uint32_t node) const {
    return tree.count == 1 || (nodes()[node].on_grid && heads_[tree.root].num_off_grid == 0);
  }

  /// visit(node, Overlap) for each node that shares a byte with the box; it must not insert or remove. Returns the
  /// number of pages visited. The first query of a tree moves its nodes to pages, O(n log n), once in its life.
  template <class Visit>
  uint32_t overlapping(const RegionTree& tree, const Box& box, Visit&& visit);

  /// visit(node) for each node of the tree; it must not insert or remove.
  template <class Visit>
  void for_each(const RegionTree& tree, Visit&& visit) const;

  /// Records that the box is written, after all earlier writes.
  void note_write(uint32_t node) { nodes()[node].written_at = ++header_->num_writes; }

  RegionNode& operator[](uint32_t node) { return nodes()[node]; }
  const RegionNode& operator[](uint32_t node) const { return nodes()[node]; }
  uint32_t num_live() const { return header_->num_live; }
  uint32_t high_water() const { return header_->high_live; }
  uint32_t num_live_pages() const { return header_->pages.num_live; }  // in use, or reserved for listed nodes

 private:
  struct alignas(64) Header {
    uint32_t num_live, high_live;
    uint32_t used_nodes, free_node;  // nodes from used_nodes on have never been used
    PageCounts pages;
    uint32_t used_heads, free_head;
    uint64_t num_writes;
  };

  struct Query {
    NormalBox box;
    Cells cells;
    bool is_placed;  // the cells describe the box exactly
  };

  RegionNode* nodes() const { return table_.nodes(); }
  uint32_t insert_with_care(RegionTree& tree, uint32_t node, uint32_t bucket);
  bool takes_own_cell(const TreeHead& head, const Place& place, RegionNode& node, uint32_t bucket) const;
  void adopt_grid(TreeHead& head, const RegionTree& tree, const NormalBox& box, const Place& place);
  void enter(RegionTree& tree, uint32_t node, uint32_t bucket);
  bool new_tree(RegionTree& tree);
  void end_tree(RegionTree& tree);
  /// Returns false if nothing overlaps, because the tree or the box is empty. Moves the tree's nodes to pages if they
  /// are only listed.
  bool begin_query(const RegionTree& tree, const Box& box, Query& query);
  void file_nodes(TreeHead& head, uint32_t count);

  Header* header_;
  TreeHead* heads_;
  uint32_t max_nodes_;
  RegionTable table_;
  RegionPages pages_;
};

template <class Visit>
uint32_t RegionIndex::overlapping(const RegionTree& tree, const Box& box, Visit&& visit) {
  Query query;
  if (!begin_query(tree, box, query)) return 0;
  const uint64_t lo = query.box.offset, hi = query.box.end();
  const Cells cells = query.cells;
  return pages_.for_each_meeting(heads_[tree.root].root, cells, lo, hi, [&](const RegionPage& page, uint32_t at) {
    const Cells& entry_cells = page.cells[at];
    Overlap overlap = Overlap::kPartial;
    if (query.is_placed && !entry_cells.is_everywhere()) {
      if (cells.contains(entry_cells)) {
        overlap = entry_cells.contains(cells) ? Overlap::kEqual : Overlap::kCovered;
      } else if (entry_cells.contains(cells)) {
        overlap = Overlap::kInside;
      }
    } else if (page.lo[at] >= hi || lo >= page.hi[at] ||
               !compare_slowly(query.box, nodes()[page.child[at]].box, overlap)) {
      return;
    }
    visit(page.child[at], overlap);
  });
}

template <class Visit>
void RegionIndex::for_each(const RegionTree& tree, Visit&& visit) const {
  if (tree.count == 0) return;
  const TreeHead& head = heads_[tree.root];
  if (head.root != kNone) {
    pages_.for_each(head.root, visit);
  } else {
    for (uint32_t node = head.first; node != kNone; node = nodes()[node].after) visit(node);
  }
}

}  // namespace tilewise::tasks
