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
