// The pages of the region index's trees: finding the leaf for a key, adding and removing entries, splitting, bounds;
// and the order in which listed nodes are filed.
//
// An inner entry bounds all below it; bounds may be too wide after removals, never too narrow. Owns nothing: pages lie
// in the caller's memory. Refuses nothing: insert() has made sure that there are enough pages. Included by
// region_index.cc alone, so that an insertion, which goes to and fro between the two, is compiled as one.
#pragma once
#include <algorithm>
#include <bit>
#include <utility>

#include "tasks/regions/region_index.h"

namespace tilewise::tasks {

inline Cells::Lanes lesser(Cells::Lanes a, Cells::Lanes b) { return a < b ? a : b; }
inline Cells::Lanes greater(Cells::Lanes a, Cells::Lanes b) { return a > b ? a : b; }

inline uint32_t merged(RegionNode* nodes, uint32_t a, uint32_t b) {
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

/// Merge sort of a list linked by `after` alone. It begins with the newest node, so that insertions in rising order are
/// one run, to be reversed. runs[k]: 2^k runs in one.
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
    for (; runs[k] != kNone; ++k) run = merged(nodes, std::exchange(runs[k], kNone), run);
    runs[k] = run;
  }
  uint32_t all = kNone;
  for (const uint32_t run : runs) all = merged(nodes, run, all);
  return all;
}

inline uint32_t RegionIndex::new_page(uint32_t level) {
  uint32_t index = header_->free_page;
  if (index != kNone) {
    header_->free_page = pages_[index].parent;
  } else {
    index = header_->used_pages++;
  }
  ++header_->num_live_pages;
  Page& page = pages_[index];
  page.count = 0;
  page.level = level;
  page.parent = kNone;
  return index;
}

inline void RegionIndex::free_page(uint32_t page) {
  pages_[page].parent = header_->free_page;
  header_->free_page = page;
  --header_->num_live_pages;
}

/// Of a tree into which nodes are filed in their order.
inline uint32_t RegionIndex::num_packed_pages(uint32_t num_nodes) {
  uint32_t total = 0;
  do {
    num_nodes = (num_nodes + kFanout - 1) / kFanout;
    total += num_nodes;
  } while (num_nodes > 1);
  return total;
}

/// Pages for one node more. False: there are not enough.
inline bool RegionIndex::promise_pages(uint32_t count) {
  const uint32_t num_more = num_packed_pages(count + 1) - num_packed_pages(count);
  if (header_->num_live_pages + num_more > max_pages_) return false;
  header_->num_live_pages += num_more;
  return true;
}

/// Whether a full leaf can be split: one page per full page on the way up, and one for a new root.
inline bool RegionIndex::has_pages_for(uint32_t leaf) const {
  uint32_t num_needed = 0;
  for (uint32_t page = leaf; page != kNone && pages_[page].count == kFanout; page = pages_[page].parent) {
    ++num_needed;
    if (pages_[page].parent != kNone) continue;
    ++num_needed;
    if (pages_[page].level + 1 == kMaxHeight) return false;
  }
  return header_->num_live_pages + num_needed <= max_pages_;
}

/// The leaf for a key; mostly the same one as the last time.
inline uint32_t RegionIndex::leaf_for(Head& head, uint64_t lo) {
  if (head.hint_lo <= lo && lo < head.hint_hi) return head.hint;
  head.hint_lo = 0;
  head.hint_hi = UINT64_MAX;
  uint32_t index = head.root;
  while (pages_[index].level > 0) {
    const Page& page = pages_[index];
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

inline RegionIndex::Entry RegionIndex::get_entry(uint32_t index, uint32_t at) const {
  const Page& page = pages_[index];
  return {page.cells[at], page.lo[at], page.hi[at], page.child[at]};
}

inline void RegionIndex::set_entry(uint32_t index, uint32_t at, const Entry& entry) {
  Page& page = pages_[index];
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

/// What the parent says of a page.
inline RegionIndex::Entry RegionIndex::summary(uint32_t index) const {
  const Page& page = pages_[index];
  Entry total = get_entry(index, 0);
  for (uint32_t i = 1; i < page.count; ++i) {
    total.cells.begin = lesser(total.cells.begin, page.cells[i].begin);
    total.cells.end = greater(total.cells.end, page.cells[i].end);
    total.lo = std::min(total.lo, page.lo[i]);
    total.hi = std::max(total.hi, page.hi[i]);
  }
  total.child = index;
  return total;
}

inline void RegionIndex::refresh_summaries(uint32_t page) {
  for (; pages_[page].parent != kNone; page = pages_[page].parent) {
    set_entry(pages_[page].parent, pages_[page].slot, summary(page));
  }
}

inline void RegionIndex::widen_summaries(uint32_t index, const Entry& entry) {
  while (pages_[index].parent != kNone) {
    const uint32_t at = pages_[index].slot;
    index = pages_[index].parent;
    Page& page = pages_[index];
    if (contains(page.cells[at], entry.cells) && page.lo[at] <= entry.lo && entry.hi <= page.hi[at]) return;
    page.cells[at].begin = lesser(page.cells[at].begin, entry.cells.begin);
    page.cells[at].end = greater(page.cells[at].end, entry.cells.end);
    page.lo[at] = std::min(page.lo[at], entry.lo);
    page.hi[at] = std::max(page.hi[at], entry.hi);
  }
}

inline void RegionIndex::add_to_leaf(Head& head, uint32_t leaf, const Entry& entry) {
  Page& page = pages_[leaf];
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

inline void RegionIndex::sort_leaf(uint32_t leaf) {
  for (uint32_t i = 1; i < kFanout; ++i) {
    const Entry entry = get_entry(leaf, i);
    uint32_t at = i;
    for (; at > 0 && pages_[leaf].lo[at - 1] > entry.lo; --at) set_entry(leaf, at, get_entry(leaf, at - 1));
    if (at != i) set_entry(leaf, at, entry);
  }
}

inline void RegionIndex::insert_at(uint32_t index, uint32_t at, const Entry& entry) {
  for (uint32_t i = pages_[index].count++; i > at; --i) set_entry(index, i, get_entry(index, i - 1));
  set_entry(index, at, entry);
}

/// Adds an entry to a page whose entries are sorted. A full page is split: in the middle, or, when keys rise, behind
/// its end, which keeps pages full. Returns the new page to the right, or kNone.
inline uint32_t RegionIndex::add_entry(Head& head, uint32_t index, uint32_t at, const Entry& entry) {
  Page& page = pages_[index];
  if (page.count < kFanout) {
    insert_at(index, at, entry);
    widen_summaries(index, entry);
    return kNone;
  }
  const uint32_t cut = at == kFanout ? kFanout : kFanout / 2;
  const uint32_t right = new_page(page.level);
  for (uint32_t i = cut; i < kFanout; ++i) set_entry(right, i - cut, get_entry(index, i));
  pages_[right].count = kFanout - cut;
  page.count = cut;
  if (at <= cut && cut != kFanout) {
    insert_at(index, at, entry);
  } else {
    insert_at(right, at - cut, entry);
  }
  if (page.parent == kNone) {
    head.root = new_page(page.level + 1);
    insert_at(head.root, 0, summary(index));
  } else if (cut != kFanout) {
    refresh_summaries(index);
  }
  add_entry(head, page.parent, page.slot + 1, summary(right));
  return right;
}

inline void RegionIndex::remove_from_leaf(Head& head, uint32_t leaf, uint32_t node) {
  Page& page = pages_[leaf];
  uint32_t at = 0;
  while (page.child[at] != node) ++at;
  --page.count;
  if (at != page.count) set_entry(leaf, at, get_entry(leaf, page.count));
  if (page.count == 0) {
    remove_page(head, leaf);
  } else if (std::has_single_bit(page.count)) {  // now and then: bounds that are too wide only cost time
    refresh_summaries(leaf);
  }
}

/// Takes an empty page out of its tree, with all above it that become empty, and roots of one child.
inline void RegionIndex::remove_page(Head& head, uint32_t index) {
  head.hint_lo = head.hint_hi = 0;
  for (;;) {
    const uint32_t parent = pages_[index].parent;
    uint32_t at = pages_[index].slot;
    free_page(index);
    if (parent == kNone) return;
    Page& page = pages_[parent];
    --page.count;
    for (; at < page.count; ++at) set_entry(parent, at, get_entry(parent, at + 1));
    if (page.count > 0) break;
    index = parent;
  }
  while (pages_[head.root].level > 0 && pages_[head.root].count == 1) {
    const uint32_t root = head.root;
    head.root = pages_[root].child[0];
    pages_[head.root].parent = kNone;
    free_page(root);
  }
}

}  // namespace tilewise::tasks
