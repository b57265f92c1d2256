// The tasks of one device that may start: highest priority first, then oldest first.
//
// Purpose: ready queue shared by the workers of one device. Who may call: whoever holds the owner's lock.
// Blocks: never. Memory order: none of its own. Memory: one vector, reserved for a full window.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace tilewise::rings {

struct ReadyEntry {
  int64_t priority;
  uint64_t sequence;
  int32_t slot;
};

class ReadyHeap {
 public:
  explicit ReadyHeap(int64_t capacity) { entries_.reserve(capacity); }

  void push(const ReadyEntry& entry) {
    entries_.push_back(entry);
    std::push_heap(entries_.begin(), entries_.end(), later);
  }
  int32_t pop() {
    std::pop_heap(entries_.begin(), entries_.end(), later);
    const int32_t slot = entries_.back().slot;
    entries_.pop_back();
    return slot;
  }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }

 private:
  static bool later(const ReadyEntry& a, const ReadyEntry& b) {
    return a.priority != b.priority ? a.priority < b.priority : a.sequence > b.sequence;
  }
  std::vector<ReadyEntry> entries_;
};

}  // namespace tilewise::rings
