// Ordered queues of ready tasks: those with a priority, those for one worker, and those that did not fit in the rings.
//
// Purpose: passes such tasks from the threads that made them ready to those that run them; all others use a ring
// (protocols/ready_ring.h). A queue is a heap with a lock. Who may call: any thread. Blocks: for its lock. Memory: the
// store.
#pragma once
#include <algorithm>
#include <mutex>

#include "tasks/store/layout.h"

namespace tilewise::tasks {

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

/// Takes the first task if `is_welcome(slot)`; kNone otherwise.
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

template <class Visit>
void for_each(OrderedQueue& queue, std::byte* base, Visit&& visit) {
  if (queue.size.load(std::memory_order_acquire) == 0) return;
  const auto* entries = reinterpret_cast<const OrderedEntry*>(base + queue.entries_offset);
  std::lock_guard guard(queue.lock);
  for (uint32_t e = 0; e < queue.size.load(std::memory_order_relaxed); ++e) visit(entries[e].slot);
}

/// Takes the task with the highest `rank(slot)` if it is above 0; kNone otherwise. Linear: for short queues.
template <class Rank>
uint32_t take_best(OrderedQueue& queue, std::byte* base, Rank&& rank) {
  if (queue.size.load(std::memory_order_acquire) == 0) return kNone;
  auto* entries = reinterpret_cast<OrderedEntry*>(base + queue.entries_offset);
  std::lock_guard guard(queue.lock);
  const uint32_t size = queue.size.load(std::memory_order_relaxed);
  uint32_t best = size;
  auto best_rank = decltype(rank(uint32_t{})){0};
  for (uint32_t e = 0; e < size; ++e) {
    const auto own = rank(entries[e].slot);
    if (own > best_rank) best = e, best_rank = own;
  }
  if (best == size) return kNone;
  const uint32_t slot = entries[best].slot;
  entries[best] = entries[size - 1];
  std::make_heap(entries, entries + size - 1, runs_later);
  queue.size.store(size - 1, std::memory_order_release);
  return slot;
}

}  // namespace tilewise::tasks
