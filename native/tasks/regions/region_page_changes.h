// Changes of the pages of the index's trees: reservations, entries, splits, bounds.
//
// The definitions of region_pages.h, which says who may call and what is rejected. Only region_index.cc includes it, so
// that an insertion, which alternates between index and pages, is compiled as one.
#pragma once
#include <algorithm>
#include <bit>

#include "tasks/regions/region_pages.h"

namespace tilewise::tasks {

inline uint32_t RegionPages::take(uint32_t level) {
  uint32_t index = counts_->free;
  if (index != kNone) {
    counts_->free = pages_[index].parent;
  } else {
    index = counts_->used++;
  }
  ++counts_->num_live;
  RegionPage& page = pages_[index];
  page.count = 0;
  page.level = level;
  page.parent = kNone;
  return index;
}

inline void RegionPages::give(uint32_t page) {
  pages_[page].parent = counts_->free;
  counts_->free = page;
  --counts_->num_live;
}

inline uint32_t RegionPages::num_packed(uint32_t num_nodes) {
  uint32_t total = 0;
  do {
    num_nodes = (num_nodes + kFanout - 1) / kFanout;
    total += num_nodes;
  } while (num_nodes > 1);
  return total;
}

inline bool RegionPages::reserve(uint32_t count) {
  if (count % kFanout != 0) return true;
  const uint32_t num_more = num_packed(count + 1) - num_packed(count);
  if (counts_->num_live + num_more > max_pages_) return false;
  counts_->num_live += num_more;
  return true;
}

inline void RegionPages::unreserve(uint32_t count) {
  if (count % kFanout == 0) counts_->num_live -= num_packed(count + 1) - num_packed(count);
}

inline void RegionPages::plant(TreeHead& head, uint32_t count) {
  counts_->num_live -= num_packed(count);
  head.root = head.hint = take(0);
  head.hint_lo = 0;
  head.hint_hi = UINT64_MAX;
}

/// Whether there are pages for splitting each full page on the way up, and for a new root.
inline bool RegionPages::has_room_in(uint32_t leaf) const {
  uint32_t num_needed = 0;
  for (uint32_t page = leaf; page != kNone && pages_[page].count == kFanout; page = pages_[page].parent) {
    ++num_needed;
    if (pages_[page].parent != kNone) continue;
    ++num_needed;
    if (pages_[page].level + 1 == kMaxHeight) return false;
  }
  return counts_->num_live + num_needed <= max_pages_;
}

inline uint32_t RegionPages::leaf_for(TreeHead& head, uint64_t lo) {
  if (head.hint_lo <= lo && lo < head.hint_hi) return head.hint;
  head.hint_lo = 0;
  head.hint_hi = UINT64_MAX;
  uint32_t index = head.root;
  while (pages_[index].level > 0) {
    const RegionPage& page = pages_[index];
    uint32_t num_before = 0;
    for (uint32_t i = 0; i < page.count; ++i) num_before += page.lo[i] <= lo;
    const uint32_t at = num_before > 0 ? num_before - 1 : 0;
    if (at > 0) head.hint_lo = page.lo[at];
    if (at + 1 < page.count) head.hint_hi = page.lo[at + 1];
    index = page.child[at];
  }
  head.hint = index;
  return index;
}

inline PageEntry RegionPages::get_entry(uint32_t index, uint32_t at) const {
  const RegionPage& page = pages_[index];
  return {page.cells[at], page.lo[at], page.hi[at], page.child[at]};
}

inline void RegionPages::set_entry(uint32_t index, uint32_t at, const PageEntry& entry) {
  RegionPage& page = pages_[index];
  page.cells[at] = entry.cells;
  page.lo[at] = entry.lo;
  page.hi[at] = entry.hi;
  page.child[at] = entry.child;
  if (page.level == 0) {
    nodes_[entry.child].leaf = index;
  } else {
    pages_[entry.child].parent = index;
    pages_[entry.child].slot = at;
  }
}

inline PageEntry RegionPages::summary(uint32_t index) const {
  const RegionPage& page = pages_[index];
  PageEntry total = get_entry(index, 0);
  for (uint32_t i = 1; i < page.count; ++i) {
    total.cells.widen(page.cells[i]);
    total.lo = std::min(total.lo, page.lo[i]);
    total.hi = std::max(total.hi, page.hi[i]);
  }
  total.child = index;
  return total;
}

inline void RegionPages::refresh_cells(const Grid& grid, uint32_t index) {
  RegionPage& page = pages_[index];
  for (uint32_t i = 0; i < page.count; ++i) {
    if (page.level > 0) {
      refresh_cells(grid, page.child[i]);
      page.cells[i] = summary(page.child[i]).cells;
    } else {
      place(grid.system, nodes_[page.child[i]].box, page.cells[i]);
    }
  }
}

inline void RegionPages::refresh_summaries(uint32_t page) {
  for (; pages_[page].parent != kNone; page = pages_[page].parent) {
    set_entry(pages_[page].parent, pages_[page].slot, summary(page));
  }
}

inline void RegionPages::widen_summaries(uint32_t index, const PageEntry& entry) {
  while (pages_[index].parent != kNone) {
    const uint32_t at = pages_[index].slot;
    index = pages_[index].parent;
    RegionPage& page = pages_[index];
    if (page.cells[at].contains(entry.cells) && page.lo[at] <= entry.lo && entry.hi <= page.hi[at]) return;
    page.cells[at].widen(entry.cells);
    page.lo[at] = std::min(page.lo[at], entry.lo);
    page.hi[at] = std::max(page.hi[at], entry.hi);
  }
}

inline void RegionPages::add_to_leaf(TreeHead& head, uint32_t leaf, const PageEntry& entry) {
  RegionPage& page = pages_[leaf];
  if (page.count < kFanout) {
    set_entry(leaf, page.count++, entry);
    widen_summaries(leaf, entry);
    return;
  }
  sort_leaf(leaf);
  const uint32_t at = static_cast<uint32_t>(std::upper_bound(page.lo, page.lo + kFanout, entry.lo) - page.lo);
  const uint32_t right = add_entry(head, leaf, at, entry);
  if (head.hint == leaf && at == kFanout) {
    head.hint = right;
    head.hint_lo = entry.lo;
  } else {
    head.hint_lo = head.hint_hi = 0;
  }
}

inline void RegionPages::sort_leaf(uint32_t leaf) {
  for (uint32_t i = 1; i < kFanout; ++i) {
    const PageEntry entry = get_entry(leaf, i);
    uint32_t at = i;
    for (; at > 0 && pages_[leaf].lo[at - 1] > entry.lo; --at) set_entry(leaf, at, get_entry(leaf, at - 1));
    if (at != i) set_entry(leaf, at, entry);
  }
}

inline void RegionPages::insert_at(uint32_t index, uint32_t at, const PageEntry& entry) {
  for (uint32_t i = pages_[index].count++; i > at; --i) set_entry(index, i, get_entry(index, i - 1));
  set_entry(index, at, entry);
}

/// Adds an entry to a page whose entries are sorted. A full page is split: in the middle, or, for ascending keys, at
/// its end, which keeps pages full. Returns the new page to the right, or kNone.
inline uint32_t RegionPages::add_entry(TreeHead& head, uint32_t index, uint32_t at, const PageEntry& entry) {
  RegionPage& page = pages_[index];
  if (page.count < kFanout) {
    insert_at(index, at, entry);
    widen_summaries(index, entry);
    return kNone;
  }
  const uint32_t cut = at == kFanout ? kFanout : kFanout / 2;
  const uint32_t right = take(page.level);
  for (uint32_t i = cut; i < kFanout; ++i) set_entry(right, i - cut, get_entry(index, i));
  pages_[right].count = kFanout - cut;
  page.count = cut;
  if (at <= cut && cut != kFanout) {
    insert_at(index, at, entry);
  } else {
    insert_at(right, at - cut, entry);
  }
  if (page.parent == kNone) {
    head.root = take(page.level + 1);
    insert_at(head.root, 0, summary(index));
  } else if (cut != kFanout) {
    refresh_summaries(index);
  }
  add_entry(head, page.parent, page.slot + 1, summary(right));
  return right;
}

inline void RegionPages::remove_from_leaf(TreeHead& head, uint32_t leaf, uint32_t node) {
  RegionPage& page = pages_[leaf];
  uint32_t at = 0;
  while (page.child[at] != node) ++at;
  --page.count;
  if (at != page.count) set_entry(leaf, at, get_entry(leaf, page.count));
  if (page.count == 0) {
    remove_page(head, leaf);
  } else if (std::has_single_bit(page.count)) {  // only occasionally: bounds that are too wide only cost time
    refresh_summaries(leaf);
  }
}

/// Removes an empty page from its tree, and all pages above it that become empty or roots with one child.
inline void RegionPages::remove_page(TreeHead& head, uint32_t index) {
  head.hint_lo = head.hint_hi = 0;
  for (;;) {
    const uint32_t parent = pages_[index].parent;
    uint32_t at = pages_[index].slot;
    give(index);
    if (parent == kNone) return;
    RegionPage& page = pages_[parent];
    --page.count;
    for (; at < page.count; ++at) set_entry(parent, at, get_entry(parent, at + 1));
    if (page.count > 0) break;
    index = parent;
  }
  while (pages_[head.root].level > 0 && pages_[head.root].count == 1) {
    const uint32_t root = head.root;
    head.root = pages_[root].child[0];
    pages_[head.root].parent = kNone;
    give(root);
  }
}

}  // namespace tilewise::tasks
