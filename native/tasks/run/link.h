// The order among live tasks: waiting for producers, events and mutexes.
//
// Purpose: a task has a list of producers and waits for one of them at a time; the thread that completes that one
// advances the task to the next. Who may call: the submitter until the task is submitted; then the one thread that
// advances it. Blocks: for an event's lock. Memory order: store/slots.h. Memory: the store.
#pragma once
#include "tasks/engine/failures.h"
#include "tasks/engine/pool.h"
#include "tasks/order/boxes.h"
#include "tasks/order/dependencies.h"
#include "tasks/run/events.h"
#include "tasks/run/ready.h"

namespace tilewise::tasks {

/// Adds a producer for which the slot has no room.
void add_many(Engine& engine, Slot& task, uint64_t word, uint32_t thread);
/// Sets up the mutexes of commuting accesses, whose handles are in args.mutexes.
void use_mutexes(Slot& task, SlotArgs& args, uint32_t count);
/// Locks the mutexes of the task's commuting accesses. Returns false if the task waits for one.
bool lock_mutexes(Engine& engine, uint32_t slot);
/// Unlocks them and advances the tasks that wait for them.
void unlock_mutexes(Engine& engine, uint32_t slot, uint32_t thread);
/// The slow path of start_submitted().
void start_waiting(Engine& engine, uint32_t slot, uint32_t thread);

[[gnu::always_inline]] inline void add_producer(Engine& engine, Slot& task, uint64_t word, uint32_t thread) {
  if (task.num_producers < task.room) [[likely]] {
    task.producers[task.num_producers++] = word;
    return;
  }
  add_many(engine, task, word, thread);
}

/// Makes the task wait for a live producer. For a completed one only its failure matters, which is looked up at once.
[[gnu::always_inline]] inline void order_after(Engine& engine, Slot& task, TaskRef producer, uint32_t thread) {
  if (!TaskWord::has_ended(engine.store.slots[slot_of(producer)].word, generation_of(producer))) {
    add_producer(engine, task, producer, thread);
  } else if (engine.has_failures()) [[unlikely]] {
    inherit(engine, task, producer);
  }
}

inline void collect_param(Engine& engine, uint32_t slot, uint32_t thread, Handle& handle, const pto_region* region,
                          int mode) {
  ChunkPool pool{engine, engine.thread_slot(thread)};
  const auto sink = [&](TaskRef producer) {
    if (engine.graph != nullptr) engine.graph->note(producer);
    order_after(engine, engine.store.slots[slot], producer, thread);
  };
  if (region == nullptr && (handle.flags & kHasRegions) == 0) {
    collect(handle.state, pool, mode, sink);
    return;
  }
  collect_boxes(engine.boxes, engine.store.index_of(handle), handle, region, mode, pool, sink);
}

inline void record_param(Engine& engine, TaskRef task, uint32_t thread, Handle& handle, const pto_region* region,
                         int mode) {
  ChunkPool pool{engine, engine.thread_slot(thread)};
  if (region == nullptr && (handle.flags & kHasRegions) == 0) {
    record(handle.state, pool, mode, task);
  } else {
    record_box(engine.boxes, engine.store.index_of(handle), handle, region, mode, pool, task);
  }
}

/// Adds a task to the list of a producer's waiters. Returns false if the producer has completed. If true, the task may
/// belong to any thread.
[[gnu::always_inline]] inline bool wait_for_producer(Engine& engine, uint32_t slot, TaskRef producer_name) {
  Slot& task = engine.store.slots[slot];
  Slot& producer = engine.store.slots[slot_of(producer_name)];
  return TaskWord::add_waiter(producer.word, generation_of(producer_name), slot + 1, [&](uint32_t first) {
    task.state.store(SlotState::kPending, std::memory_order_relaxed);
    task.next_waiter = first;
  });
}

/// Counts an arrival at a replayed task. Returns whether it was the last.
inline bool arrive(Engine& engine, uint32_t slot) {
  if (!Countdown::arrive(engine.store.slots[slot].children)) return false;
  if (engine.has_failures()) [[unlikely]]
    engine.replays->inherit(slot);
  return true;
}

inline void drop_producer(Engine& engine, Slot& task, uint32_t thread) {
  if (task.more_producers == 0) {
    --task.num_producers;
    return;
  }
  Chunk& chunk = engine.store.chunks[task.more_producers - 1];
  if (--chunk.count > 0) return;
  ChunkPool pool{engine, engine.thread_slot(thread)};
  const uint32_t empty = task.more_producers;
  task.more_producers = chunk.next;
  pool.give(empty);
}

// Makes the task wait for its last producer that has not completed. Exactly one thread at a time advances a task: its
// submitter, then the thread that completes the producer that it waits for.
inline bool advance(Engine& engine, uint32_t slot, uint32_t thread) {
  Slot& task = engine.store.slots[slot];
  while (task.num_producers > 0 || task.more_producers != 0) {
    const Chunk* more = task.more_producers != 0 ? &engine.store.chunks[task.more_producers - 1] : nullptr;
    const uint64_t word = more != nullptr ? more->refs[more->count - 1] : task.producers[task.num_producers - 1];
    if ((word & kIsEvent) != 0) {
      drop_producer(engine, task, thread);
      const Chunk* next = task.more_producers != 0 ? &engine.store.chunks[task.more_producers - 1] : nullptr;
      const uint64_t value = next != nullptr ? next->refs[next->count - 1] : task.producers[task.num_producers - 1];
      drop_producer(engine, task, thread);
      if (!wait_for_event(engine, slot, static_cast<uint32_t>(word >> 32), value)) return false;
      continue;
    }
    if (wait_for_producer(engine, slot, word)) return false;
    if (engine.has_failures()) [[unlikely]]
      inherit(engine, task, word);
    drop_producer(engine, task, thread);
  }
  if ((task.flags & (kUsesMutexes | kIsEmbedded | kIsReplayed)) == 0) [[likely]]
    return true;
  if ((task.flags & kIsReplayed) != 0) return arrive(engine, slot);
  if ((task.flags & kIsEmbedded) != 0) return engine.host->admit(engine.store.place_of(slot));
  return lock_mutexes(engine, slot);
}

[[gnu::always_inline]] inline void start_submitted(Engine& engine, uint32_t slot, uint32_t thread) {
  const Slot& task = engine.store.slots[slot];
  const bool is_ready =
      (task.num_producers | task.more_producers) == 0 && (task.flags & (kUsesMutexes | kIsEmbedded | kIsReplayed)) == 0;
  if (is_ready) return make_ready(engine, slot, thread);
  const Busy busy(engine.thread_slot(thread));  // meanwhile the slot may say that it waits although it does not
  if (task.num_producers > 0 && task.more_producers == 0) [[likely]] {
    const uint64_t last = task.producers[task.num_producers - 1];
    if ((last & kIsEvent) == 0 && wait_for_producer(engine, slot, last)) [[likely]]
      return;
  }
  start_waiting(engine, slot, thread);
}

}  // namespace tilewise::tasks
