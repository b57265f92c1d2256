// The hash table of the index: finds the node of exactly this box of this buffer.
//
// Who may call: one thread at a time (the caller's lock). Blocks: never. Buckets and nodes are in the caller's memory
// and linked by indices; the object is only a view of them. There is one bucket per node, and nodes of one bucket form
// a list. Boxes are normalized by the index.
#pragma once
#include <bit>
#include <cstdint>

#include "protocols/spin_lock.h"
#include "tasks/regions/region_box.h"

namespace tilewise::tasks {

class RegionTable {
 public:
  static uint32_t num_buckets(uint32_t max_nodes) { return std::bit_ceil(max_nodes < 16 ? 16u : max_nodes); }

  /// buckets: num_buckets(max_nodes) of them, zero when the table is new.
  RegionTable(uint32_t* buckets, RegionNode* nodes, uint32_t max_nodes)
      : buckets_(buckets), nodes_(nodes), mask_(num_buckets(max_nodes) - 1) {}

  RegionNode* nodes() const { return nodes_; }

  /// Boxes with the same first byte share a bucket: they overlap, so that a query for one needs all of them anyway.
  uint32_t bucket_of(uint32_t owner, uint64_t offset) const {
    const auto product = static_cast<unsigned __int128>(offset + (uint64_t{owner} << 40)) * 0x9E3779B97F4A7C15u;
    return (static_cast<uint32_t>(product >> 64) ^ static_cast<uint32_t>(product)) & mask_;
  }
  void prefetch(uint32_t bucket) const { protocols::prefetch_for_write(&buckets_[bucket]); }

  uint32_t find(uint32_t owner, const NormalBox& box) const {
    uint32_t node = first_in(bucket_of(owner, box.offset));
    while (node != kNone) {
      const RegionNode& candidate = nodes_[node];
      if (candidate.box.owner == owner && candidate.box == box) break;
      node = candidate.next;
    }
    return node;
  }

  /// Whether no box on the grid has the same first byte. Boxes start where their cells do, so this one is then alone in
  /// its cell.
  bool is_first_at(const NormalBox& box, uint32_t bucket) const {
    for (uint32_t other = first_in(bucket); other != kNone; other = nodes_[other].next) {
      const RegionNode& node = nodes_[other];
      if (node.on_grid && node.box.owner == box.owner && node.box.offset == box.offset) return false;
    }
    return true;
  }

  void add(RegionNode& node, uint32_t index, uint32_t bucket) {
    node.next = first_in(bucket);
    buckets_[bucket] = index + 1;
  }

  void remove(const RegionNode& node, uint32_t index) {
    uint32_t& bucket = buckets_[bucket_of(node.box.owner, node.box.offset)];
    if (bucket == index + 1) {
      bucket = node.next == kNone ? 0 : node.next + 1;
    } else {
      uint32_t before = bucket - 1;
      while (nodes_[before].next != index) before = nodes_[before].next;
      nodes_[before].next = node.next;
    }
  }

 private:
  /// Buckets contain node + 1, so that zeroed memory is an empty table.
  uint32_t first_in(uint32_t bucket) const { return buckets_[bucket] == 0 ? kNone : buckets_[bucket] - 1; }

  uint32_t* buckets_;
  RegionNode* nodes_;
  uint32_t mask_;
};

}  // namespace tilewise::tasks
