// A chunk has room for some references to tasks. Each thread has a stock of free chunks, which is refilled from a
// shared pool.
//
// Who may call: the thread that owns the slot. Blocks: for the lock of the pools if the stock is empty or too large.
// Memory: the chunks lie in the store; nothing is allocated here.
#pragma once
#include <mutex>

#include "tasks/engine/failures.h"

namespace tilewise::tasks {

struct ChunkPool {
  Engine& engine;
  ThreadSlot& own;

  static constexpr uint32_t kStock = 16;

  Chunk& chunk(uint32_t index) const { return engine.store.chunks[index - 1]; }

  uint32_t take() {
    if (own.free_chunks == 0) refill();
    const uint32_t index = own.free_chunks;
    own.free_chunks = chunk(index).next;
    --own.num_free_chunks;
    return index;
  }

  void give(uint32_t index) {
    chunk(index).next = own.free_chunks;
    own.free_chunks = index;
    if (++own.num_free_chunks > 4 * kStock) shrink();
  }

  /// Whether the reference no longer matters: its task has completed and, if the reference passes failures on, without
  /// an error. Never while a graph is recorded.
  bool is_settled(TaskRef ref) const {
    if (!TaskWord::has_ended(engine.store.slots[slot_of(ref)].word, generation_of(ref)) || engine.graph != nullptr) {
      return false;
    }
    return (ref & kCarriesPoison) == 0 || !engine.has_failures() || find_error(engine, without_flags(ref)) == 0;
  }

  bool remembers_failures() const { return engine.has_failures(); }

  [[gnu::noinline]] void refill() {
    Header& header = *engine.store.header;
    std::lock_guard guard(header.pools.lock);
    for (uint32_t n = 0; n < kStock; ++n) {
      uint32_t index = header.pools.free_chunks;
      if (index != 0) {
        header.pools.free_chunks = chunk(index).next;
        --header.pools.num_free_chunks;
      } else if (header.pools.fresh_chunks < header.max_chunks) {
        index = ++header.pools.fresh_chunks;
      } else {
        break;
      }
      chunk(index).next = own.free_chunks;
      own.free_chunks = index;
      ++own.num_free_chunks;
    }
    if (header.pools.num_spare_chunks(header.max_chunks) < header.pools.reclaim_below) {
      header.wants_chunks.store(1, std::memory_order_relaxed);
    }
    if (own.free_chunks == 0) {
      throw_error(
          PTO_NO_MEMORY,
          "[runtime.submit] the dependencies between tasks that have not ended must fit the runtime's table; got "
          "more than ",
          uint64_t{header.max_chunks} * kRefsPerChunk,
          " references to tasks; use a smaller window, or fewer readers between two writers");
    }
  }

  [[gnu::noinline]] void shrink() {
    Header& header = *engine.store.header;
    std::lock_guard guard(header.pools.lock);
    while (own.num_free_chunks > kStock) {
      const uint32_t index = own.free_chunks;
      own.free_chunks = chunk(index).next;
      --own.num_free_chunks;
      chunk(index).next = header.pools.free_chunks;
      header.pools.free_chunks = index;
      ++header.pools.num_free_chunks;
    }
  }
};

}  // namespace tilewise::tasks
