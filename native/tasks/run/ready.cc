// See ready.h.
#include "tasks/run/ready.h"

namespace tilewise::tasks {

namespace {

constexpr uint32_t kStealLimit = 32;

/// The queue of the tasks that are for one worker or prefer it.
OrderedQueue& queue_of_worker(Engine& engine, uint32_t worker) {
  return engine.store.queues[kNumSharedQueues * engine.store.header->num_classes + worker];
}

}  // namespace

void push_special(Engine& engine, uint32_t slot) {
  const Slot& task = engine.store.slots[slot];
  Header& header = *engine.store.header;
  const OrderedEntry entry{task.priority, sequence_of(engine, slot), slot};
  if ((task.flags & kHasTarget) != 0) {
    const bool is_preference = (task.flags & kPrefersTarget) != 0;  // once pushed, the task may be another thread's
    const uint32_t worker = engine.store.args[slot].target_worker - 1;
    push(queue_of_worker(engine, worker), engine.store.base, entry);
    // Counted after the push and before the caller wakes workers: a worker that sleeps sees either the count or the
    // wake.
    if (is_preference) header.num_preferring.fetch_add(1, std::memory_order_release);
    return;
  }
  const SharedQueue which = task.priority > 0 ? kUrgent : task.priority < 0 ? kBackground : kOverflow;
  push(engine.store.queues[which * header.num_classes + task.type_class], engine.store.base, entry);
  count_of(header, which).fetch_add(1, std::memory_order_release);
}

void pass_on(Engine& engine, uint32_t slot) {
  push_special(engine, slot);
  wake_worker(engine);  // a worker that checked between the two queues saw neither
}

void make_ready_from_outside(Engine& engine, uint32_t slot) {
  engine.store.slots[slot].state.store(SlotState::kReady, std::memory_order_relaxed);
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) ready_ticks_of(engine, slot) = ticks();
  const bool is_for_one = (engine.store.slots[slot].flags & kHasTarget) != 0;  // before the push passes it on
  push_special(engine, slot);
  wake_worker(engine, is_for_one);
}

bool can_help(const Engine& engine, uint32_t slot) {
  return engine.store.header->num_workers == 0 || is_leaf(engine.store.slots[slot]);
}

uint32_t take(Engine& engine, uint32_t thread, bool is_worker) {
  Header& header = *engine.store.header;
  const uint32_t classes = engine.thread_slot(thread).classes;
  const auto is_welcome = [&](uint32_t slot) { return is_worker || can_help(engine, slot); };
  const auto take_shared = [&](SharedQueue which) {
    std::atomic<uint32_t>& count = count_of(header, which);
    if (count.load(std::memory_order_acquire) == 0) return kNone;
    for (uint32_t c = 0; c < header.num_classes; ++c) {
      if ((classes >> c & 1) == 0) continue;
      const uint32_t slot =
          take_first(engine.store.queues[which * header.num_classes + c], engine.store.base, is_welcome);
      if (slot == kNone) continue;
      count.fetch_sub(1, std::memory_order_relaxed);
      return slot;
    }
    return kNone;
  };
  uint32_t slot = take_shared(kUrgent);
  if (slot != kNone) return slot;
  if (is_worker && thread < header.num_workers) {
    slot = take_first(queue_of_worker(engine, thread), engine.store.base, is_welcome);
    if (slot != kNone) {
      if ((engine.store.slots[slot].flags & kPrefersTarget) != 0) {
        header.num_preferring.fetch_sub(1, std::memory_order_relaxed);
      }
      return slot;
    }
  }
  for (uint32_t c = 0; c < header.num_classes && slot == kNone; ++c) {
    if ((classes >> c & 1) != 0) slot = engine.store.rings[thread * header.num_classes + c].take_one();
  }
  if (slot == kNone) slot = steal(engine, thread, classes);
  if (slot != kNone) {
    if (is_welcome(slot)) return slot;
    pass_on(engine, slot);  // a helper has taken a task that may block
  }
  slot = take_shared(kOverflow);
  return slot != kNone ? slot : take_shared(kBackground);
}

uint32_t steal(Engine& engine, uint32_t thread, uint32_t classes) {
  Header& header = *engine.store.header;
  ThreadSlot& me = engine.thread_slot(thread);
  const uint32_t num_thread_slots = header.threads_in_use.load(std::memory_order_acquire);
  uint32_t victim = me.victim < num_thread_slots ? me.victim : 0;
  for (uint32_t tries = 0; tries < num_thread_slots; ++tries, victim = victim + 1 < num_thread_slots ? victim + 1 : 0) {
    if (victim == thread) continue;
    for (uint32_t c = 0; c < header.num_classes; ++c) {
      Ring& ring = engine.store.rings[victim * header.num_classes + c];
      if ((classes >> c & 1) == 0 || !ring.has_any()) continue;
      uint32_t slots[kStealLimit];
      const uint32_t count = ring.take_half(slots, kStealLimit);
      if (count == 0) continue;
      me.victim = victim;
      for (uint32_t i = 0; i < count; ++i) protocols::prefetch_for_write(&engine.store.slots[slots[i]]);
      for (uint32_t i = 1; i < count; ++i) push_ready(engine, slots[i], thread);
      if (count > 1) wake_worker(engine);
      return slots[0];
    }
  }
  return kNone;
}

uint32_t take_preferring(Engine& engine, uint32_t worker) {
  Header& header = *engine.store.header;
  if (header.num_preferring.load(std::memory_order_acquire) == 0) return kNone;
  const uint32_t classes = engine.thread_slot(worker).classes;
  const auto rank = [&](uint32_t slot) -> uint64_t {
    const Slot& task = engine.store.slots[slot];
    const bool is_free = (task.flags & kPrefersTarget) != 0 && (classes >> task.type_class & 1) != 0;
    return is_free ? UINT64_MAX - sequence_of(engine, slot) : 0;  // the oldest
  };
  for (uint32_t next = 1; next < header.num_workers; ++next) {
    const uint32_t other = (worker + next) % header.num_workers;
    const uint32_t slot = take_best(queue_of_worker(engine, other), engine.store.base, rank);
    if (slot == kNone) continue;
    header.num_preferring.fetch_sub(1, std::memory_order_relaxed);
    return slot;
  }
  return kNone;
}

bool has_work(const Engine& engine, uint32_t thread) {
  const Header& header = *engine.store.header;
  const uint32_t classes = engine.store.thread_slots[thread].classes;
  const auto is_waiting = [&](uint32_t queue) {
    return engine.store.queues[queue].size.load(std::memory_order_acquire) != 0;
  };
  for (uint32_t c = 0; c < header.num_classes; ++c) {
    if ((classes >> c & 1) == 0) continue;
    for (uint32_t which = 0; which < kNumSharedQueues; ++which) {
      if (is_waiting(which * header.num_classes + c)) return true;
    }
    const uint32_t num_thread_slots = header.threads_in_use.load(std::memory_order_acquire);
    for (uint32_t s = 0; s < num_thread_slots; ++s) {
      if (engine.store.rings[s * header.num_classes + c].has_any()) return true;
    }
  }
  if (thread < header.num_workers && header.num_preferring.load(std::memory_order_acquire) != 0) return true;
  return thread < header.num_workers && is_waiting(kNumSharedQueues * header.num_classes + thread);
}

}  // namespace tilewise::tasks
