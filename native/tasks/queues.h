// Ready tasks: a ring per thread and class, and ordered queues for what is special.
//
// Purpose: hand ready tasks from whoever made them ready to whoever runs them. A ring is pushed by its owner alone and
// taken from by anyone, several at once; an ordered queue (priorities, one worker's own tasks, what did not fit) is a
// heap under a lock. Blocks: a ring never; a queue for its lock. Memory: the region.
//
// Memory order of the ring: the owner publishes cells with the release of `tail`; a taker acquires `tail`, reads the
// cells, then takes them by compare-and-swap of `head`. The owner overwrites a cell only after it has seen `head` pass
// it, and then the swap of whoever still reads the old cell fails. Counters are 64 bits wide: no wrap, no ABA.
#pragma once
#include <algorithm>
#include <mutex>

#include "tasks/layout.h"

namespace tilewise::tasks {

/// Owner only. False when full.
inline bool push(Ring& ring, uint32_t slot) {
  const uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  if (tail - ring.seen_head >= kRingCells) {
    ring.seen_head = ring.head.load(std::memory_order_acquire);
    if (tail - ring.seen_head >= kRingCells) return false;
  }
  ring.cells[tail % kRingCells].store(slot, std::memory_order_relaxed);
  ring.tail.store(tail + 1, std::memory_order_release);
  return true;
}

/// Owner only.
inline bool is_full(Ring& ring) {
  return ring.tail.load(std::memory_order_relaxed) - ring.head.load(std::memory_order_relaxed) >= kRingCells;
}

inline bool has_tasks(const Ring& ring) {
  return ring.head.load(std::memory_order_relaxed) != ring.tail.load(std::memory_order_relaxed);
}

/// Takes the oldest task; kNone when there is none.
inline uint32_t take_one(Ring& ring) {
  uint64_t head = ring.head.load(std::memory_order_acquire);
  while (head != ring.tail.load(std::memory_order_acquire)) {
    const uint32_t slot = ring.cells[head % kRingCells].load(std::memory_order_relaxed);
    if (ring.head.compare_exchange_weak(head, head + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      return slot;
    }
  }
  return kNone;
}

/// Takes half of what is there, at most `limit`, oldest first. Returns how many.
inline uint32_t take_half(Ring& ring, uint32_t* slots, uint32_t limit) {
  uint64_t head = ring.head.load(std::memory_order_acquire);
  while (true) {
    const uint64_t tail = ring.tail.load(std::memory_order_acquire);
    if (tail <= head) return 0;
    const auto count = static_cast<uint32_t>(std::min<uint64_t>((tail - head + 1) / 2, limit));
    for (uint32_t i = 0; i < count; ++i) {
      slots[i] = ring.cells[(head + i) % kRingCells].load(std::memory_order_relaxed);
    }
    if (ring.head.compare_exchange_weak(head, head + count, std::memory_order_acq_rel, std::memory_order_acquire)) {
      return count;
    }
  }
}

/// Highest priority first, then the order of submission.
inline bool runs_later(const OrderedEntry& a, const OrderedEntry& b) {
  return a.priority != b.priority ? a.priority < b.priority : a.sequence > b.sequence;
}

inline void push(OrderedQueue& queue, std::byte* base, const OrderedEntry& entry) {
  auto* entries = reinterpret_cast<OrderedEntry*>(base + queue.entries_offset);
  std::lock_guard guard(queue.lock);
  const uint32_t size = queue.size.load(std::memory_order_relaxed);
  entries[size] = entry;
  std::push_heap(entries, entries + size + 1, runs_later);
  queue.size.store(size + 1, std::memory_order_release);
}

/// The first task if `is_welcome(slot)`; kNone otherwise.
template <class Predicate>
uint32_t take_first(OrderedQueue& queue, std::byte* base, Predicate&& is_welcome) {
  if (queue.size.load(std::memory_order_acquire) == 0) return kNone;
  auto* entries = reinterpret_cast<OrderedEntry*>(base + queue.entries_offset);
  std::lock_guard guard(queue.lock);
  const uint32_t size = queue.size.load(std::memory_order_relaxed);
  if (size == 0 || !is_welcome(entries[0].slot)) return kNone;
  const uint32_t slot = entries[0].slot;
  std::pop_heap(entries, entries + size, runs_later);
  queue.size.store(size - 1, std::memory_order_release);
  return slot;
}

/// Any task for which `is_welcome(slot)`; kNone when there is none. Linear: for short queues.
template <class Predicate>
uint32_t take_any(OrderedQueue& queue, std::byte* base, Predicate&& is_welcome) {
  if (queue.size.load(std::memory_order_acquire) == 0) return kNone;
  auto* entries = reinterpret_cast<OrderedEntry*>(base + queue.entries_offset);
  std::lock_guard guard(queue.lock);
  const uint32_t size = queue.size.load(std::memory_order_relaxed);
  OrderedEntry* const end = entries + size;
  OrderedEntry* const found = std::find_if(entries, end, [&](const OrderedEntry& e) { return is_welcome(e.slot); });
  if (found == end) return kNone;
  const uint32_t slot = found->slot;
  *found = entries[size - 1];
  std::make_heap(entries, end - 1, runs_later);
  queue.size.store(size - 1, std::memory_order_release);
  return slot;
}

}  // namespace tilewise::tasks
