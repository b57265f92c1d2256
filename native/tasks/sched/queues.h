// Ready tasks: a ring per thread and class, and ordered queues for what is special.
//
// Purpose: hand ready tasks from whoever made them ready to whoever runs them. A ring is pushed by its owner alone and
// taken from by anyone, several at once; an ordered queue (priorities, one worker's own tasks, what did not fit) is a
// heap under a lock. Blocks: a ring never; a queue for its lock. Memory: the region.
//
// Memory order of the ring: the owner publishes cells with the release of `tail`; a taker acquires `tail`, reads the
// cells, then takes them by compare-and-swap of `head`. The owner overwrites a cell only after it has seen `head` pass
// it, and then the swap of whoever still reads the old cell fails. The newest task stands in the tail's word too, so
// that a single one crosses to another core with one cache line, not two; so counts are of 44 bits and wrap, after
// days: a taker is deceived only if it sleeps that long between two looks.
#pragma once
#include <algorithm>
#include <mutex>

#include "tasks/store/layout.h"

namespace tilewise::tasks {

/// [tasks ever pushed 44 | the newest 20].
using TailWord = uint64_t;
inline constexpr uint64_t kCountMask = ~uint64_t{0} >> kSlotBits;
inline constexpr TailWord make_tail(uint64_t count, uint32_t newest) { return count << kSlotBits | newest; }
inline constexpr uint64_t count_in(TailWord tail) { return tail >> kSlotBits; }
inline constexpr uint32_t newest_in(TailWord tail) { return tail & ((1u << kSlotBits) - 1); }

inline constexpr uint64_t distance(uint64_t head, uint64_t count) { return (count - head) & kCountMask; }

/// Owner only. False when full.
inline bool push(Ring& ring, uint32_t slot) {
  const uint64_t count = count_in(ring.tail.load(std::memory_order_relaxed));
  if (distance(ring.seen_head, count) >= kRingCells) {
    ring.seen_head = ring.head.load(std::memory_order_acquire);
    if (distance(ring.seen_head, count) >= kRingCells) return false;
  }
  ring.cells[count % kRingCells].store(slot, std::memory_order_relaxed);
  ring.tail.store(make_tail(count + 1, slot), std::memory_order_release);
  return true;
}

/// Owner only.
inline bool is_full(Ring& ring) {
  const uint64_t count = count_in(ring.tail.load(std::memory_order_relaxed));
  return distance(ring.head.load(std::memory_order_relaxed), count) >= kRingCells;
}

inline bool has_tasks(const Ring& ring) {
  return ring.head.load(std::memory_order_relaxed) != count_in(ring.tail.load(std::memory_order_relaxed));
}

/// How many there are, about.
inline uint64_t num_tasks(const Ring& ring) {
  const uint64_t head = ring.head.load(std::memory_order_relaxed);
  return distance(head, count_in(ring.tail.load(std::memory_order_relaxed)));
}

/// What stands at `at`, before the end.
inline uint32_t peek(const Ring& ring, uint64_t at, TailWord tail) {
  if (distance(at, count_in(tail)) == 1) return newest_in(tail);
  return ring.cells[at % kRingCells].load(std::memory_order_relaxed);
}

/// Takes half of what is there, rounded up, at most `limit`, oldest first. Returns how many.
inline uint32_t take_half(Ring& ring, uint32_t* slots, uint32_t limit) {
  uint64_t head = ring.head.load(std::memory_order_acquire);
  while (true) {
    const TailWord tail = ring.tail.load(std::memory_order_acquire);
    const uint64_t available = distance(head, count_in(tail));
    if (available == 0) return 0;
    const auto count = static_cast<uint32_t>(std::min<uint64_t>((available + 1) / 2, limit));
    for (uint32_t i = 0; i < count; ++i) slots[i] = peek(ring, head + i, tail);
    const uint64_t taken = (head + count) & kCountMask;
    if (ring.head.compare_exchange_weak(head, taken, std::memory_order_acq_rel, std::memory_order_acquire)) {
      return count;
    }
  }
}

/// Takes the oldest task; kNone when there is none.
inline uint32_t take_one(Ring& ring) {
  uint32_t slot = kNone;
  return take_half(ring, &slot, 1) == 1 ? slot : kNone;
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
