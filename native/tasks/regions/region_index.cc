// The region index: adding and removing nodes; creating and ending trees, changing their grid, moving them to pages.
//
// It owns nothing: all data is in the caller's memory. An insertion without enough nodes or pages is rejected before it
// changes anything. The caller has checked boxes against the buffer's size.
#include "tasks/regions/region_index.h"

#include <cassert>

#include "protocols/spin_lock.h"
#include "tasks/regions/region_page_changes.h"

namespace tilewise::tasks {
namespace {

/// The offsets of the parts after the header, in bytes: first the parts of whole cache lines, then the nodes.
struct Offsets {
  explicit Offsets(uint32_t max_nodes) {
    const uint64_t max_pages = RegionPages::num_pages(max_nodes);
    heads = max_pages * sizeof(RegionPage);
    nodes = heads + max_pages * sizeof(TreeHead);
    buckets = nodes + max_nodes * uint64_t{sizeof(RegionNode)};
    end = buckets + RegionTable::num_buckets(max_nodes) * uint64_t{sizeof(uint32_t)};
  }
  uint64_t heads, nodes, buckets, end;
};

}  // namespace

uint64_t RegionIndex::bytes_needed(uint32_t max_nodes) { return sizeof(Header) + Offsets(max_nodes).end; }

RegionIndex::RegionIndex(std::byte* memory, uint32_t max_nodes, bool format)
    : header_(reinterpret_cast<Header*>(memory)),
      heads_(reinterpret_cast<TreeHead*>(memory + sizeof(Header) + Offsets(max_nodes).heads)),
      max_nodes_(max_nodes),
      table_(reinterpret_cast<uint32_t*>(memory + sizeof(Header) + Offsets(max_nodes).buckets),
             reinterpret_cast<RegionNode*>(memory + sizeof(Header) + Offsets(max_nodes).nodes), max_nodes),
      pages_(&header_->pages, reinterpret_cast<RegionPage*>(memory + sizeof(Header)), nodes(), max_nodes) {
  static_assert(sizeof(Header) == 64);
  if (format) {
    *header_ = Header{};
    header_->free_node = header_->pages.free = header_->free_head = kNone;
  }
}

uint32_t RegionIndex::find(uint32_t owner, const Box& box) const {
  NormalBox normal;
  if (!normalise(box, normal)) return kNone;
  return table_.find(owner, normal);
}

uint32_t RegionIndex::insert(uint32_t owner, RegionTree& tree, const Box& box) {
  if (header_->num_live == max_nodes_) return kNone;
  const uint32_t index = header_->free_node != kNone ? header_->free_node : header_->used_nodes;
  RegionNode& node = nodes()[index];
  if (!normalise(box, node.box)) return kNone;  // written in place, because copying costs more than computing it
  node.box.owner = owner;
  const uint32_t bucket = table_.bucket_of(owner, node.box.offset);
  table_.prefetch(bucket);
  if (tree.count == 0 && !new_tree(tree)) return kNone;
  TreeHead& head = heads_[tree.root];
  const bool is_easy = head.root == kNone && head.grid.is_cell(node.box) &&
                       (head.num_small == 0 || table_.is_first_at(node.box, bucket));
  if (!is_easy) return insert_with_care(tree, index, bucket);
  if (!pages_.reserve(tree.count)) return kNone;
  node.on_grid = true;
  node.is_small = false;
  list_node(nodes(), head, index);
  enter(tree, index, bucket);
  return index;
}

/// The general path of insert: any box, in any tree.
[[gnu::noinline, gnu::flatten]] uint32_t RegionIndex::insert_with_care(RegionTree& tree, uint32_t index,
                                                                       uint32_t bucket) {
  RegionNode& node = nodes()[index];
  TreeHead& head = heads_[tree.root];
  const StrideSystem& system = head.grid.system;
  Place place;
  const bool is_placed = locate(system, node.box, place);
  const bool adopts = !is_placed && node.box.ndim > system.ndim && locate(system_of(node.box), node.box, place);
  node.is_small = false;
  node.on_grid = adopts || (is_placed && takes_own_cell(head, place, node, bucket));
  const uint32_t leaf = head.root == kNone ? kNone : pages_.leaf_for(head, node.lo());
  if (leaf == kNone ? !pages_.reserve(tree.count) : !pages_.has_room_in(leaf)) return kNone;
  if (adopts) adopt_grid(head, tree, node.box, place);
  head.num_small += node.is_small;
  head.num_off_grid += !node.on_grid;
  if (leaf == kNone) {
    list_node(nodes(), head, index);
  } else {
    const Cells cells = is_placed || adopts ? place.cells(system.ndim) : Cells::everywhere();
    pages_.add_to_leaf(head, leaf, {cells, node.lo(), node.hi(), index});
  }
  enter(tree, index, bucket);
  return index;
}

/// Whether a new box is in a cell of the grid that no other box on the grid uses; if so, sets whether it is smaller
/// than the cell. Boxes that fill a cell are equal, so while there are no smaller ones, there is one per cell.
bool RegionIndex::takes_own_cell(const TreeHead& head, const Place& place, RegionNode& node, uint32_t bucket) const {
  bool is_smaller;
  if (!head.grid.starts_cell(place, is_smaller)) return false;
  if ((is_smaller || head.num_small > 0) && !table_.is_first_at(node.box, bucket)) return false;
  node.is_small = is_smaller;
  return true;
}

/// Adopts the grid of a box that does not fit the current stride system. It has more dimensions, so this happens at
/// most kMaxDims times in a tree's life.
void RegionIndex::adopt_grid(TreeHead& head, const RegionTree& tree, const NormalBox& box, const Place& place) {
  head.grid.adopt(box, place);
  head.num_off_grid = tree.count;
  head.num_small = 0;
  for_each(tree, [this](uint32_t node) { nodes()[node].on_grid = nodes()[node].is_small = false; });
  if (head.root != kNone) pages_.refresh_cells(head.grid, head.root);
}

/// Common to all trees: takes a free node, empties its state and adds it to the hash table.
inline void RegionIndex::enter(RegionTree& tree, uint32_t index, uint32_t bucket) {
  RegionNode& node = nodes()[index];
  if (index == header_->used_nodes) {
    ++header_->used_nodes;
  } else {
    header_->free_node = node.next;
    protocols::prefetch_for_write(&nodes()[node.next]);  // it will be used soon
  }
  if (++header_->num_live > header_->high_live) header_->high_live = header_->num_live;
  node.state = AccessState{};
  node.written_at = 0;
  table_.add(node, index, bucket);
  ++tree.count;
}

void RegionIndex::remove([[maybe_unused]] uint32_t owner, RegionTree& tree, uint32_t index) {
  RegionNode& node = nodes()[index];
  assert(node.box.owner == owner && tree.count > 0);
  table_.remove(node, index);
  node.next = header_->free_node;
  header_->free_node = index;
  --header_->num_live;

  TreeHead& head = heads_[tree.root];
  head.num_small -= node.is_small;
  head.num_off_grid -= !node.on_grid;
  --tree.count;
  if (head.root == kNone) {
    unlist_node(nodes(), head, index);
    pages_.unreserve(tree.count);
  } else {
    pages_.remove_from_leaf(head, node.leaf, index);
  }
  if (tree.count == 0) end_tree(tree);
}

/// Makes an empty tree, which is a head. There are as many heads as pages, and every tree uses or reserves a page, so
/// heads never run out before pages. Returns false if pages have run out.
bool RegionIndex::new_tree(RegionTree& tree) {
  if (pages_.is_used_up()) return false;
  tree.root = header_->free_head;
  if (tree.root != kNone) {
    header_->free_head = heads_[tree.root].next;
  } else {
    tree.root = header_->used_heads++;
  }
  TreeHead& head = heads_[tree.root];
  head = TreeHead{};
  head.root = head.first = kNone;
  return true;
}

inline void RegionIndex::end_tree(RegionTree& tree) {
  heads_[tree.root].next = header_->free_head;
  header_->free_head = tree.root;
  tree.root = kNone;
}

[[gnu::noinline]] bool RegionIndex::begin_query(const RegionTree& tree, const Box& box, Query& query) {
  if (tree.count == 0 || !normalise(box, query.box)) return false;
  TreeHead& head = heads_[tree.root];
  if (head.root == kNone) file_nodes(head, tree.count);
  query.is_placed = place(head.grid.system, query.box, query.cells);
  return true;
}

/// Moves a tree's listed nodes to pages, in the order of their first bytes, so that the pages are full and no more than
/// were reserved.
[[gnu::noinline]] void RegionIndex::file_nodes(TreeHead& head, uint32_t count) {
  uint32_t index = sorted_by_lo(nodes(), head.first);
  head.first = kNone;
  pages_.plant(head, count);
  while (index != kNone) {
    const RegionNode& node = nodes()[index];
    PageEntry entry{{}, node.lo(), node.hi(), index};
    place(head.grid.system, node.box, entry.cells);
    pages_.add_to_leaf(head, pages_.leaf_for(head, entry.lo), entry);
    index = node.after;
  }
}

}  // namespace tilewise::tasks
