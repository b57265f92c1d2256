// Nodes addressed by a 32-bit index, taken from and given back to a free list.
//
// Purpose: dependency edges and access nodes; what is taken is always given back, so a pool stays as large as its
// busiest moment and allocates nothing afterwards. Who may call: whoever holds the owner's lock. Blocks: never.
// Memory order: none of its own. Memory: one vector; references die when take() grows it, indices do not.
#pragma once
#include <cstdint>
#include <vector>

namespace tilewise::rings {

inline constexpr int32_t kNone = -1;

template <class Node>
class IndexPool {
 public:
  int32_t take() {
    ++live_;
    if (free_.empty()) {
      nodes_.emplace_back();
      return static_cast<int32_t>(nodes_.size()) - 1;
    }
    const int32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  void give(int32_t index) {
    --live_;
    free_.push_back(index);
  }
  Node& operator[](int32_t index) { return nodes_[index]; }
  int64_t num_live() const { return live_; }
  int64_t capacity() const { return static_cast<int64_t>(nodes_.size()); }

 private:
  std::vector<Node> nodes_;
  std::vector<int32_t> free_;
  int64_t live_ = 0;
};

}  // namespace tilewise::rings
