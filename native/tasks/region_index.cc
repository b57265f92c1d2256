// The region index: normal form and coordinates of boxes, the hash table, the grid of a tree. region_pages.h has the
// pages of the trees.
//
// Owns nothing: everything lies in the memory that the caller gave. Refuses an insertion (before it changes anything)
// for which nodes or pages are missing. Boxes come from the caller, already checked against the buffer's size.
#include "tasks/region_index.h"

#include <bit>
#include <cassert>

#include "rings/spin_lock.h"
#include "tasks/region_pages.h"

namespace tilewise::tasks {
namespace {

/// Coordinates are mostly below 2^32, for which division is several times as fast.
inline uint64_t divide(uint64_t a, uint64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

inline int32_t shifted(uint64_t coordinate) {
  return static_cast<int32_t>(static_cast<uint32_t>(coordinate) ^ 0x80000000u);
}

inline uint32_t unshifted(int32_t lane) { return static_cast<uint32_t>(lane) ^ 0x80000000u; }

/// Sizes of the box per dimension of the system: each stride of the box must be one of the system's, and runs of full
/// rows (merged by the normal form) are taken apart again.
bool spread(const uint64_t* stride, uint32_t ndim, const NormalBox& box, const uint64_t* start, uint64_t* size) {
  uint32_t k = 0;
  for (uint32_t d = 0; d < box.ndim; ++d, ++k) {
    while (k < ndim && stride[k] != box.stride[d]) ++k;
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

}  // namespace

uint32_t RegionIndex::num_buckets(uint32_t max_nodes) { return std::bit_ceil(max_nodes < 16 ? 16u : max_nodes); }

/// Four nodes per page on average: room for trees of few boxes and for pages that removals have thinned out.
uint32_t RegionIndex::num_pages(uint32_t max_nodes) { return max_nodes / 4 + 8; }

uint64_t RegionIndex::bytes_needed(uint32_t max_nodes) {
  const uint64_t pages = num_pages(max_nodes);
  return sizeof(Header) + max_nodes * uint64_t{sizeof(RegionNode)} + pages * (sizeof(Page) + sizeof(Head)) +
         num_buckets(max_nodes) * uint64_t{sizeof(uint32_t)};
}

RegionIndex::RegionIndex(std::byte* memory, uint32_t max_nodes, bool format)
    : max_nodes_(max_nodes), max_pages_(num_pages(max_nodes)), bucket_mask_(num_buckets(max_nodes) - 1) {
  header_ = reinterpret_cast<Header*>(memory);
  nodes_ = reinterpret_cast<RegionNode*>(memory + sizeof(Header));
  pages_ = reinterpret_cast<Page*>(nodes_ + max_nodes);
  heads_ = reinterpret_cast<Head*>(pages_ + max_pages_);
  buckets_ = reinterpret_cast<uint32_t*>(heads_ + max_pages_);
  if (format) {
    *header_ = Header{};
    header_->free_node = header_->free_page = header_->free_head = kNone;
  }
}

/// False: the box is empty.
bool RegionIndex::normalise(const Box& box, NormalBox& normal) {
  if (box.ndim == 0 || box.ndim > kMaxDims) return false;
  for (uint32_t k = 1; k < kMaxDims; ++k) normal.size[k] = normal.stride[k] = 0;
  uint32_t d = box.ndim - 1;
  uint32_t last = 0;  // the outermost dimension so far
  bool is_empty = box.size[d] == 0;
  normal.size[0] = box.size[d];
  normal.stride[0] = 1;
  while (d-- > 0) {
    const uint64_t size = box.size[d], stride = box.stride[d];
    is_empty |= size == 0;
    if (size <= 1 || stride == 0) continue;
    if (last == 0 && stride <= normal.size[0]) {
      normal.size[0] += stride * (size - 1);
    } else if (stride == normal.stride[last] * normal.size[last]) {
      normal.size[last] *= size;
    } else {
      ++last;
      normal.size[last] = size;
      normal.stride[last] = stride;
    }
  }
  normal.ndim = last + 1;
  normal.offset = box.offset;
  normal.end = box.offset + normal.size[0];
  for (uint32_t k = 1; k <= last; ++k) normal.end += (normal.size[k] - 1) * normal.stride[k];
  return !is_empty;
}

/// Sum of independent products: the multiplications overlap in the processor.
uint32_t RegionIndex::hash_of(uint32_t owner, const NormalBox& box) {
  uint64_t h = (box.offset + owner) * 0x9E3779B97F4A7C15u + box.size[0] * 0xC2B2AE3D27D4EB4Fu;
  h += owner * 0xD6E8FEB86659FD93u;
  for (uint32_t d = 1; d < box.ndim; ++d) {
    h += (box.size[d] + d) * 0xA0761D6478BD642Fu + std::rotl(box.stride[d] * 0xE7037ED1A0B428DBu, static_cast<int>(d));
  }
  h ^= h >> 32;
  h *= 0x8EBC6AF09C88C6E3u;
  return static_cast<uint32_t>(h >> 32);
}

/// Coordinates of a box in a stride system. False: it has none there, because its strides are others, because it runs
/// over the end of a row (then coordinates would not be unique), or because they exceed 32 bits.
bool RegionIndex::place(const uint64_t* stride, uint32_t ndim, const NormalBox& box, Cells& cells) {
  bool same = ndim == box.ndim;
  for (uint32_t k = 1; k < ndim; ++k) same &= stride[k] == box.stride[k];
  if (!same && box.ndim >= ndim) return false;
  uint64_t start[kMaxDims] = {0, 0, 0, 0}, size[kMaxDims] = {1, 1, 1, 1};
  uint64_t rest = box.offset;
  for (uint32_t k = ndim - 1; k > 0; --k) {
    start[k] = divide(rest, stride[k]);
    rest -= start[k] * stride[k];
  }
  start[0] = rest;
  if (same) {
    for (uint32_t k = 0; k < ndim; ++k) size[k] = box.size[k];
  } else if (!spread(stride, ndim, box, start, size)) {
    return false;
  }
  uint64_t reach = 0;  // from the start of its row to the last byte of the box in it
  bool fits = true;
  for (uint32_t k = 0; k < ndim; ++k) {
    const uint64_t end = start[k] + size[k];
    reach += (end - 1) * stride[k];
    fits &= (k + 1 == ndim || reach < stride[k + 1]) & (end < UINT32_MAX);
  }
  if (!fits) return false;
  cells.begin = Cells::Lanes{shifted(start[0]), shifted(start[1]), shifted(start[2]), shifted(start[3])};
  cells.end = Cells::Lanes{shifted(start[0] + size[0]), shifted(start[1] + size[1]),
                           shifted(start[2] + size[2]), shifted(start[3] + size[3])};
  return true;
}

bool RegionIndex::place_in(const Head& head, const NormalBox& box, Cells& cells) const {
  return head.ndim > 0 && place(head.stride, head.ndim, box, cells);
}

/// Two boxes without common coordinates in their tree: looks for a system that holds both. Their byte ranges meet.
bool RegionIndex::compare_slowly(const NormalBox& query, const NormalBox& node, Overlap& overlap) {
  const NormalBox& system = query.ndim >= node.ndim ? query : node;
  Cells a, b;
  if (query == node) {
    overlap = Overlap::kEqual;
  } else if (query.ndim == 1 && query.offset <= node.offset && node.end <= query.end) {
    overlap = Overlap::kCovered;
  } else if (place(system.stride, system.ndim, query, a) && place(system.stride, system.ndim, node, b)) {
    if (!meet(a, b)) return false;
    overlap = contains(a, b) ? Overlap::kCovered : Overlap::kPartial;
  } else {
    overlap = Overlap::kPartial;
  }
  return true;
}

/// Buckets hold node + 1, so that untouched memory is a table of empty ones.
uint32_t RegionIndex::bucket_head(uint32_t bucket) const {
  return buckets_[bucket] == 0 ? kNone : buckets_[bucket] - 1;
}

uint32_t RegionIndex::find(uint32_t owner, const Box& box) const {
  NormalBox normal;
  if (!normalise(box, normal)) return kNone;
  const uint32_t hash = hash_of(owner, normal);
  uint32_t node = bucket_head(hash & bucket_mask_);
  while (node != kNone) {
    const RegionNode& candidate = nodes_[node];
    if (candidate.hash == hash && candidate.owner == owner && candidate.box == normal) break;
    node = candidate.next;
  }
  return node;
}

[[gnu::flatten]] uint32_t RegionIndex::insert(uint32_t owner, RegionTree& tree, const Box& box) {
  if (header_->num_live == max_nodes_) return kNone;
  const uint32_t index = header_->free_node != kNone ? header_->free_node : header_->used_nodes;
  RegionNode& node = nodes_[index];
  const NormalBox& normal = node.box;  // written in its place at once: copying it costs more than making it
  if (!normalise(box, node.box)) return kNone;
  const uint32_t hash = hash_of(owner, normal);
  rings::prefetch_for_write(&buckets_[hash & bucket_mask_]);
  uint32_t leaf = kNone;
  if (tree.count == 0) {
    if (header_->num_live_pages == max_pages_) return kNone;
    leaf = new_tree(tree);
  } else {
    leaf = leaf_for(heads_[tree.root], normal.offset);
    if (pages_[leaf].count == kFanout && !has_pages_for(leaf)) return kNone;
  }
  Head& head = heads_[tree.root];
  take_node(index);
  Entry entry{everywhere(), normal.offset, normal.end, index};
  bool is_placed = place_in(head, normal, entry.cells);
  if (!is_placed && normal.ndim > head.ndim) {
    is_placed = place(normal.stride, normal.ndim, normal, entry.cells);
    if (is_placed) adopt_system(head, tree, normal, entry.cells);
  }
  if (!is_placed) entry.cells = everywhere();

  node.state = AccessState{};
  node.owner = owner;
  node.hash = hash;
  node.next = bucket_head(hash & bucket_mask_);
  buckets_[hash & bucket_mask_] = index + 1;
  node.is_small = false;
  node.on_grid = is_placed && takes_own_cell(head, entry, leaf, node.is_small);
  head.num_small += node.is_small;
  head.num_off_grid += !node.on_grid;
  head.was_mixed |= !node.on_grid;
  ++tree.count;
  add_to_leaf(head, leaf, entry);
  return index;
}

void RegionIndex::remove([[maybe_unused]] uint32_t owner, RegionTree& tree, uint32_t index) {
  RegionNode& node = nodes_[index];
  assert(node.owner == owner && tree.count > 0);
  uint32_t& bucket = buckets_[node.hash & bucket_mask_];
  if (bucket == index + 1) {
    bucket = node.next == kNone ? 0 : node.next + 1;
  } else {
    uint32_t before = bucket - 1;
    while (nodes_[before].next != index) before = nodes_[before].next;
    nodes_[before].next = node.next;
  }
  node.next = header_->free_node;
  header_->free_node = index;
  --header_->num_live;

  Head& head = heads_[tree.root];
  head.num_small -= node.is_small;
  head.num_off_grid -= !node.on_grid;
  Page& page = pages_[node.leaf];
  uint32_t at = 0;
  while (page.child[at] != index) ++at;
  --page.count;
  if (at != page.count) set_entry(node.leaf, at, get_entry(node.leaf, page.count));
  if (page.count == 0) {
    remove_page(head, node.leaf);
  } else if (std::has_single_bit(page.count)) {  // now and then: bounds that are too wide only cost time
    refresh_summaries(node.leaf);
  }
  if (--tree.count == 0) {
    head.next = header_->free_head;
    header_->free_head = tree.root;
    tree.root = kNone;
  }
}

// ---- nodes, grid and stride system of a tree

/// node: the first of the free list, or else the first that was never used.
void RegionIndex::take_node(uint32_t node) {
  if (node == header_->used_nodes) {
    ++header_->used_nodes;
  } else {
    header_->free_node = nodes_[node].next;
  }
  if (++header_->num_live > header_->high_live) header_->high_live = header_->num_live;
}

/// An empty tree: a head and one leaf. There are as many heads as pages, so that heads never run out first.
uint32_t RegionIndex::new_tree(RegionTree& tree) {
  tree.root = header_->free_head;
  if (tree.root != kNone) {
    header_->free_head = heads_[tree.root].next;
  } else {
    tree.root = header_->used_heads++;
  }
  Head& head = heads_[tree.root];
  head = Head{};
  head.root = head.hint = new_page(0);
  head.hint_hi = UINT64_MAX;
  return head.root;
}

/// Takes the stride system and the grid of a box that the present one cannot hold. It has more dimensions, so this
/// happens at most kMaxDims times while the tree lives.
void RegionIndex::adopt_system(Head& head, const RegionTree& tree, const NormalBox& box, const Cells& cells) {
  head.ndim = box.ndim;
  for (uint32_t d = 0; d < kMaxDims; ++d) {
    head.stride[d] = box.stride[d];
    head.cell[d] = unshifted(cells.end[d]) - unshifted(cells.begin[d]);
    head.phase[d] = unshifted(cells.begin[d]) % head.cell[d];
  }
  if (tree.count == 0) return;
  head.num_off_grid = tree.count;
  head.num_small = 0;
  head.was_mixed = true;
  for_each(tree, [this](uint32_t node) { nodes_[node].on_grid = nodes_[node].is_small = false; });
  refresh_cells(head, head.root);
}

void RegionIndex::refresh_cells(const Head& head, uint32_t index) {
  Page& page = pages_[index];
  for (uint32_t i = 0; i < page.count; ++i) {
    if (page.level > 0) {
      refresh_cells(head, page.child[i]);
      page.cells[i] = summary(page.child[i]).cells;
    } else if (!place_in(head, nodes_[page.child[i]].box, page.cells[i])) {
      page.cells[i] = everywhere();
    }
  }
}

/// Whether a new box lies in a cell of the grid that no other box on the grid is in. Boxes on the grid start where
/// their cell does. So those that fill it are equal, hence one; a smaller one is found by its first byte, in the leaf
/// in which that would be, as long as no two boxes had the same first byte.
bool RegionIndex::takes_own_cell(const Head& head, const Entry& entry, uint32_t leaf, bool& is_small) const {
  bool smaller = false;
  for (uint32_t d = 0; d < head.ndim; ++d) {
    const uint32_t begin = unshifted(entry.cells.begin[d]);
    const uint32_t size = unshifted(entry.cells.end[d]) - begin;
    if (size > head.cell[d] || begin % head.cell[d] != head.phase[d]) return false;
    smaller |= size < head.cell[d];
  }
  if (smaller || head.num_small > 0) {
    if (head.was_mixed) return false;
    const Page& page = pages_[leaf];
    for (uint32_t i = 0; i < page.count; ++i) {
      if (page.lo[i] == entry.lo) return false;
    }
  }
  is_small = smaller;
  return true;
}

}  // namespace tilewise::tasks
