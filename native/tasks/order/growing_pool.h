// Chunks of references for a single thread, from process memory that grows as needed.
//
// Purpose: dependency states that no other thread uses: those of a recording, and of an embedded engine's objects.
// States that threads share take their chunks from the store (engine/pool.h). Derived classes add what dependencies.h
// requires of a pool. Blocks: never. Memory: references stay valid while it grows.
#pragma once
#include <deque>

#include "tasks/store/slots.h"

namespace tilewise::tasks {

class GrowingPool {
 public:
  Chunk& chunk(uint32_t index) { return chunks_[index - 1]; }
  uint32_t take() {
    if (first_free_ == 0) {
      chunks_.emplace_back();
      return static_cast<uint32_t>(chunks_.size());
    }
    const uint32_t index = first_free_;
    first_free_ = chunk(index).next;
    return index;
  }
  void give(uint32_t index) {
    chunk(index).next = first_free_;
    first_free_ = index;
  }

 private:
  std::deque<Chunk> chunks_;
  uint32_t first_free_ = 0;  // + 1
};

}  // namespace tilewise::tasks
