// The region index: normal form and coordinates of boxes, the hash table, the grid of a tree, and the list of a tree
// that has no pages. region_pages.h has the pages of the trees.
//
// Owns nothing: everything lies in the memory that the caller gave. Refuses an insertion (before it changes anything)
// for which nodes or pages are missing. Boxes come from the caller, already checked against the buffer's size.
#include "tasks/regions/region_index.h"

#include <bit>
#include <cassert>
#include <utility>

#include "protocols/spin_lock.h"
#include "tasks/regions/region_pages.h"

namespace tilewise::tasks {
namespace {

using Wide = unsigned __int128;
constexpr uint64_t kMaxBytes = uint64_t{1} << 63;

/// 2^64 / divisor, rounded up: multiplying by it divides numbers below 2^32, exactly. Wider divisors give 0, as the
/// quotient is; 1 does too, and must not be divided by.
inline uint64_t reciprocal_of(uint64_t divisor) { return divisor >> 32 != 0 ? 0 : UINT64_MAX / divisor + 1; }

inline uint64_t divide(uint64_t a, uint64_t divisor, uint64_t reciprocal) {
  if (a >> 32 != 0) [[unlikely]]
    return a / divisor;
  return static_cast<uint64_t>(Wide{a} * reciprocal >> 64);
}

/// Both below 2^32; the divisor may be 1. The product is a multiple of 2^64, but for as little as was rounded up.
inline bool divides(uint64_t reciprocal, uint64_t a) { return a * reciprocal <= reciprocal - 1; }

inline int32_t shifted(uint64_t coordinate) {
  return static_cast<int32_t>(static_cast<uint32_t>(coordinate) ^ 0x80000000u);
}

/// False: the box is empty.
inline bool to_normal(const Box& box, NormalBox& normal) {
  if (box.ndim == 0 || box.ndim > kMaxDims) return false;
  uint32_t d = box.ndim - 1;
  uint32_t last = 0;            // the outermost dimension so far
  uint64_t size = box.size[d];  // its size
  uint64_t next = size;         // the stride of a dimension that is contiguous with it
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

uint32_t num_buckets(uint32_t max_nodes) { return std::bit_ceil(max_nodes < 16 ? 16u : max_nodes); }

/// Four nodes per page on average: room for trees of few boxes and for pages that removals have thinned out.
uint32_t num_pages(uint32_t max_nodes) { return max_nodes / 4 + 8; }

/// Sizes of the box per dimension of the system: each stride of the box must be one of the system's, and runs of full
/// rows (merged by the normal form) are taken apart again.
bool spread(const uint64_t* stride, uint32_t ndim, const NormalBox& box, const uint64_t* start, uint64_t* size) {
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

}  // namespace

uint64_t RegionIndex::bytes_needed(uint32_t max_nodes) {
  const uint64_t pages = num_pages(max_nodes);
  return sizeof(Header) + max_nodes * uint64_t{sizeof(RegionNode)} + pages * (sizeof(Page) + sizeof(Head)) +
         num_buckets(max_nodes) * uint64_t{sizeof(uint32_t)};
}

RegionIndex::RegionIndex(std::byte* memory, uint32_t max_nodes, bool format)
    : max_nodes_(max_nodes), max_pages_(num_pages(max_nodes)), bucket_mask_(num_buckets(max_nodes) - 1) {
  header_ = reinterpret_cast<Header*>(memory);
  pages_ = reinterpret_cast<Page*>(memory + sizeof(Header));  // these are whole cache lines, nodes are not
  heads_ = reinterpret_cast<Head*>(pages_ + max_pages_);
  nodes_ = reinterpret_cast<RegionNode*>(heads_ + max_pages_);
  buckets_ = reinterpret_cast<uint32_t*>(nodes_ + max_nodes);
  if (format) {
    *header_ = Header{};
    header_->free_node = header_->free_page = header_->free_head = kNone;
  }
}

/// Coordinates of a box in a system.
struct RegionIndex::Place {
  uint64_t begin[kMaxDims], size[kMaxDims];

  Cells cells(uint32_t ndim) const {
    int32_t from[kMaxDims], to[kMaxDims];
    for (uint32_t k = 0; k < kMaxDims; ++k) {
      from[k] = shifted(k < ndim ? begin[k] : 0);
      to[k] = shifted(k < ndim ? begin[k] + size[k] : 1);
    }
    return {Cells::Lanes{from[0], from[1], from[2], from[3]}, Cells::Lanes{to[0], to[1], to[2], to[3]}};
  }
};

RegionIndex::System RegionIndex::system_of(const NormalBox& box) {
  System system{box.ndim, {1}, {}};
  for (uint32_t d = 1; d < box.ndim; ++d) {
    system.stride[d] = box.stride(d);
    system.reciprocal[d] = reciprocal_of(system.stride[d]);
  }
  return system;
}

bool RegionIndex::normalise(const Box& box, NormalBox& normal) { return to_normal(box, normal); }

/// Coordinates of a box in a stride system. False: it has none there, because its strides are others, because it runs
/// over the end of a row (then coordinates would not be unique), or because they exceed 32 bits.
bool RegionIndex::locate(const System& system, const NormalBox& box, Place& place) {
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

/// False: everywhere.
bool RegionIndex::place(const System& system, const NormalBox& box, Cells& cells) {
  Place place;
  const bool is_placed = locate(system, box, place);
  cells = is_placed ? place.cells(system.ndim) : everywhere();
  return is_placed;
}

/// Two boxes without common coordinates in their tree: looks for a system that holds both. Their byte ranges meet.
bool RegionIndex::compare_slowly(const NormalBox& query, const NormalBox& node, Overlap& overlap) {
  const System system = system_of(query.ndim >= node.ndim ? query : node);
  Cells a, b;
  if (query == node) {
    overlap = Overlap::kEqual;
  } else if (query.ndim == 1 && query.offset <= node.offset && node.end() <= query.end()) {
    overlap = Overlap::kCovered;
  } else if (node.ndim == 1 && node.offset <= query.offset && query.end() <= node.end()) {
    overlap = Overlap::kInside;
  } else if (place(system, query, a) && place(system, node, b)) {
    if (!meet(a, b)) return false;
    overlap = contains(a, b) ? Overlap::kCovered : contains(b, a) ? Overlap::kInside : Overlap::kPartial;
  } else {
    overlap = Overlap::kPartial;
  }
  return true;
}

/// Boxes with one first byte share a bucket: they overlap, so that whoever asks for one looks at all of them anyway.
inline uint32_t RegionIndex::bucket_of(uint32_t owner, uint64_t offset) const {
  const Wide product = Wide{offset + (uint64_t{owner} << 40)} * 0x9E3779B97F4A7C15u;
  return static_cast<uint32_t>(product >> 64 ^ product) & bucket_mask_;
}

/// Buckets hold node + 1, so that untouched memory is a table of empty ones.
inline uint32_t RegionIndex::bucket_head(uint32_t bucket) const {
  return buckets_[bucket] == 0 ? kNone : buckets_[bucket] - 1;
}

uint32_t RegionIndex::find(uint32_t owner, const Box& box) const {
  NormalBox normal;
  if (!to_normal(box, normal)) return kNone;
  uint32_t node = bucket_head(bucket_of(owner, normal.offset));
  while (node != kNone) {
    const RegionNode& candidate = nodes_[node];
    if (candidate.box.owner == owner && candidate.box == normal) break;
    node = candidate.next;
  }
  return node;
}

uint32_t RegionIndex::insert(uint32_t owner, RegionTree& tree, const Box& box) {
  if (header_->num_live == max_nodes_) return kNone;
  const uint32_t index = header_->free_node != kNone ? header_->free_node : header_->used_nodes;
  RegionNode& node = nodes_[index];
  if (!to_normal(box, node.box)) return kNone;  // in its place at once: copying it costs more than making it
  node.box.owner = owner;
  const uint32_t bucket = bucket_of(owner, node.box.offset);
  protocols::prefetch_for_write(&buckets_[bucket]);
  if (tree.count == 0 && !new_tree(tree)) return kNone;
  Head& head = heads_[tree.root];
  const bool is_easy =
      head.root == kNone && fills_cell(head, node.box) && (head.num_small == 0 || is_first_at(node.box, bucket));
  if (!is_easy) return insert_with_care(tree, index, bucket);
  if (tree.count % kFanout == 0 && !promise_pages(tree.count)) return kNone;
  node.on_grid = true;
  node.is_small = false;
  list_node(head, index);
  enter(tree, index, bucket);
  return index;
}

/// The rest of insert: any box, in any tree.
[[gnu::noinline, gnu::flatten]] uint32_t RegionIndex::insert_with_care(RegionTree& tree, uint32_t index,
                                                                       uint32_t bucket) {
  RegionNode& node = nodes_[index];
  Head& head = heads_[tree.root];
  Place place;
  const bool is_placed = locate(head.system, node.box, place);
  const bool adopts = !is_placed && node.box.ndim > head.system.ndim && locate(system_of(node.box), node.box, place);
  node.is_small = false;
  node.on_grid = adopts || (is_placed && takes_own_cell(head, place, node, bucket));
  const uint32_t leaf = head.root == kNone ? kNone : leaf_for(head, node.lo());
  if (leaf == kNone) {
    if (tree.count % kFanout == 0 && !promise_pages(tree.count)) return kNone;
  } else if (pages_[leaf].count == kFanout && !has_pages_for(leaf)) {
    return kNone;
  }
  if (adopts) adopt_system(head, tree, node.box, place);
  head.num_small += node.is_small;
  head.num_off_grid += !node.on_grid;
  if (leaf == kNone) {
    list_node(head, index);
  } else {
    const Cells cells = is_placed || adopts ? place.cells(head.system.ndim) : everywhere();
    add_to_leaf(head, leaf, {cells, node.lo(), node.hi(), index});
  }
  enter(tree, index, bucket);
  return index;
}

/// Whatever the tree, a new node leaves the free ones, gets an empty state and can be found.
inline void RegionIndex::enter(RegionTree& tree, uint32_t index, uint32_t bucket) {
  RegionNode& node = nodes_[index];
  if (index == header_->used_nodes) {
    ++header_->used_nodes;
  } else {
    header_->free_node = node.next;
    protocols::prefetch_for_write(&nodes_[node.next]);  // it will be wanted soon
  }
  if (++header_->num_live > header_->high_live) header_->high_live = header_->num_live;
  node.state = AccessState{};
  node.written_at = 0;
  node.next = bucket_head(bucket);
  buckets_[bucket] = index + 1;
  ++tree.count;
}

void RegionIndex::remove([[maybe_unused]] uint32_t owner, RegionTree& tree, uint32_t index) {
  RegionNode& node = nodes_[index];
  assert(node.box.owner == owner && tree.count > 0);
  uint32_t& bucket = buckets_[bucket_of(node.box.owner, node.box.offset)];
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
  --tree.count;
  if (head.root == kNone) {
    (node.before == kNone ? head.first : nodes_[node.before].after) = node.after;
    if (node.after != kNone) nodes_[node.after].before = node.before;
    if (tree.count % kFanout == 0) {
      header_->num_live_pages -= num_packed_pages(tree.count + 1) - num_packed_pages(tree.count);
    }
  } else {
    remove_from_leaf(head, node.leaf, index);
  }
  if (tree.count == 0) {
    head.next = header_->free_head;
    header_->free_head = tree.root;
    tree.root = kNone;
  }
}

// ---- nodes, grid and stride system of a tree

/// An empty tree: a head. There are as many heads as pages, and no tree without a page in use or promised, so that
/// heads never run out first. False: pages did.
bool RegionIndex::new_tree(RegionTree& tree) {
  if (header_->num_live_pages == max_pages_) return false;
  tree.root = header_->free_head;
  if (tree.root != kNone) {
    header_->free_head = heads_[tree.root].next;
  } else {
    tree.root = header_->used_heads++;
  }
  Head& head = heads_[tree.root];
  head = Head{};
  head.root = head.first = kNone;
  return true;
}

/// Takes the stride system and the grid of a box that the present one cannot hold. It has more dimensions, so this
/// happens at most kMaxDims times while the tree lives.
void RegionIndex::adopt_system(Head& head, const RegionTree& tree, const NormalBox& box, const Place& place) {
  head.system = system_of(box);
  head.origin = 0;
  for (uint32_t d = 0; d < box.ndim; ++d) {
    const uint64_t stride = box.stride(d), cell = place.size[d], phase = place.begin[d] % cell;
    const uint64_t end = d + 1 < box.ndim ? box.stride(d + 1) / stride : UINT32_MAX - 1;
    const uint64_t num_cells = (std::min<uint64_t>(end, UINT32_MAX - 1) - phase) / cell;
    const uint64_t pitch = cell * stride;
    const uint64_t limit = num_cells < kMaxBytes / pitch ? num_cells * pitch : kMaxBytes;
    head.grid[d] = {static_cast<uint32_t>(cell), static_cast<uint32_t>(phase), pitch, reciprocal_of(pitch), limit};
    head.origin += phase * stride;
  }
  head.num_off_grid = tree.count;
  head.num_small = 0;
  for_each(tree, [this](uint32_t node) { nodes_[node].on_grid = nodes_[node].is_small = false; });
  if (head.root != kNone) refresh_cells(head, head.root);
}

void RegionIndex::refresh_cells(const Head& head, uint32_t index) {
  Page& page = pages_[index];
  for (uint32_t i = 0; i < page.count; ++i) {
    if (page.level > 0) {
      refresh_cells(head, page.child[i]);
      page.cells[i] = summary(page.child[i]).cells;
    } else {
      place(head.system, nodes_[page.child[i]].box, page.cells[i]);
    }
  }
}

/// Whether a box is a whole cell of the grid. (Boxes with fewer dimensions than the system are left to takes_own_cell.)
inline bool RegionIndex::fills_cell(const Head& head, const NormalBox& box) {
  if (box.ndim != head.system.ndim) return false;
  uint64_t rest = box.offset - head.origin;  // beyond every limit when the box lies before the grid
  for (uint32_t d = box.ndim - 1; d > 0; --d) {
    const Axis& axis = head.grid[d];
    if (box.size[d] != axis.cell || box.stride(d) != head.system.stride[d] || rest >= axis.limit) return false;
    rest -= divide(rest, axis.pitch, axis.reciprocal) * axis.pitch;
  }
  const Axis& axis = head.grid[0];
  return box.size[0] == axis.cell && rest < axis.limit && divides(axis.reciprocal, rest);
}

/// No box on the grid has the same first byte. As they start where their cells do, this one has its cell for itself.
inline bool RegionIndex::is_first_at(const NormalBox& box, uint32_t bucket) const {
  for (uint32_t other = bucket_head(bucket); other != kNone; other = nodes_[other].next) {
    const RegionNode& known = nodes_[other];
    if (known.on_grid && known.box.owner == box.owner && known.box.offset == box.offset) return false;
  }
  return true;
}

/// Whether a new box lies in a cell of the grid that no other box on the grid is in; then says whether it is small.
/// Those that fill a cell are equal, hence one, as long as there are no smaller ones.
bool RegionIndex::takes_own_cell(const Head& head, const Place& place, RegionNode& node, uint32_t bucket) const {
  bool smaller = false;
  for (uint32_t d = 0; d < head.system.ndim; ++d) {
    const Axis& axis = head.grid[d];
    if (place.size[d] > axis.cell || place.begin[d] % axis.cell != axis.phase) return false;
    smaller |= place.size[d] < axis.cell;
  }
  if ((smaller || head.num_small > 0) && !is_first_at(node.box, bucket)) return false;
  node.is_small = smaller;
  return true;
}

// ---- trees without pages

inline void RegionIndex::list_node(Head& head, uint32_t index) {
  nodes_[index].before = kNone;
  nodes_[index].after = head.first;
  if (head.first != kNone) nodes_[head.first].before = index;
  head.first = index;
}

/// Gives a tree its pages: takes its nodes in the order of their first bytes, so that the pages are full and no more of
/// them than were promised.
[[gnu::noinline]] void RegionIndex::file_nodes(Head& head, uint32_t count) {
  header_->num_live_pages -= num_packed_pages(count);
  uint32_t index = sorted_by_lo(nodes_, head.first);
  head.first = kNone;
  head.root = head.hint = new_page(0);
  head.hint_lo = 0;
  head.hint_hi = UINT64_MAX;
  while (index != kNone) {
    const RegionNode& node = nodes_[index];
    Entry entry{{}, node.lo(), node.hi(), index};
    place(head.system, node.box, entry.cells);
    add_to_leaf(head, leaf_for(head, entry.lo), entry);
    index = node.after;
  }
}

}  // namespace tilewise::tasks
