// Ready tasks: their queues, and taking one.
//
// Purpose: a task goes to the ring of the thread that made it ready; one with a priority, or for one worker, to an
// ordered queue. Who may call: making ready: any thread, for its own thread; taking: the thread that owns the slot.
// Blocks: for a queue's lock. Memory: the store.
#pragma once
#include "tasks/engine/task_parts.h"
#include "tasks/engine/waking.h"
#include "tasks/sched/queues.h"

namespace tilewise::tasks {

/// Queues a task that has a priority, is for one worker or prefers one, or did not fit in the ring.
void push_special(Engine& engine, uint32_t slot);
/// The number of tasks in such a queue.
inline std::atomic<uint32_t>& count_of(Header& header, SharedQueue which) {
  return which == kUrgent ? header.num_urgent : which == kBackground ? header.num_background : header.num_overflow;
}
/// Whether a thread that only helps may run the task: it must not block.
bool can_help(const Engine& engine, uint32_t slot);
/// Takes a ready task; kNone: no task is ready. Urgent ones first, then the thread's own, then others'.
uint32_t take(Engine& engine, uint32_t thread, bool is_worker);
/// Gives back a task that this thread has taken from a ring and may not run: to a queue from which any worker takes it.
void pass_on(Engine& engine, uint32_t slot);
/// Takes half of another thread's ready tasks; returns one of them and queues the rest.
uint32_t steal(Engine& engine, uint32_t thread, uint32_t classes);
/// Takes a task that prefers another worker; kNone: there is no such task. For a worker that has been idle for a while.
uint32_t take_preferring(Engine& engine, uint32_t worker);
/// Whether take() or take_preferring() would return a task.
bool has_work(const Engine& engine, uint32_t thread);
/// Makes a task ready on a thread without a slot in this runtime: it goes to a shared queue.
void make_ready_from_outside(Engine& engine, uint32_t slot);

/// Marks this thread as having tasks that no slot shows as ready or running.
class Busy {
 public:
  explicit Busy(ThreadSlot& thread) : thread_(thread), before_(thread.is_busy.load(std::memory_order_relaxed)) {
    thread_.is_busy.store(1, std::memory_order_release);
  }
  ~Busy() { thread_.is_busy.store(before_, std::memory_order_release); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  ThreadSlot& thread_;
  uint32_t before_;
};

[[gnu::always_inline]] inline void push_ready(Engine& engine, uint32_t slot, uint32_t thread) {
  const Slot& task = engine.store.slots[slot];
  if ((task.flags & kHasTarget) == 0 && task.priority == 0) [[likely]] {
    if (engine.store.rings[thread * engine.store.header->num_classes + task.type_class].push(slot)) [[likely]]
      return;
  }
  push_special(engine, slot);
}

[[gnu::always_inline]] inline void make_ready(Engine& engine, uint32_t slot, uint32_t thread) {
  engine.store.slots[slot].state.store(SlotState::kReady, std::memory_order_relaxed);
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    ready_ticks_of(engine, slot) = ticks();
  const bool has_target = (engine.store.slots[slot].flags & kHasTarget) != 0;
  push_ready(engine, slot, thread);
  wake_worker(engine, has_target);
}

}  // namespace tilewise::tasks
