// See link.h.
#include "tasks/run/link.h"

#include <algorithm>

namespace tilewise::tasks {

void add_many(Engine& engine, Slot& task, uint64_t word, uint32_t thread) {
  ChunkPool pool{engine, engine.thread_slot(thread)};
  push_ref(pool, task.more_producers, word);
}

void start_waiting(Engine& engine, uint32_t slot, uint32_t thread) {
  if (advance(engine, slot, thread)) make_ready(engine, slot, thread);
}

void use_mutexes(Slot& task, SlotArgs& args, uint32_t count) {
  std::sort(args.mutexes, args.mutexes + count);
  args.num_mutexes = static_cast<uint32_t>(std::unique(args.mutexes, args.mutexes + count) - args.mutexes);
  args.num_mutexes_held = 0;
  task.flags |= kUsesMutexes;
}

// Mutexes of commuting accesses are locked in the order of their handles, so that no two tasks wait for each other.
bool lock_mutexes(Engine& engine, uint32_t slot) {
  Slot& task = engine.store.slots[slot];
  SlotArgs& args = engine.store.args[slot];
  while (args.num_mutexes_held < args.num_mutexes) {
    TaskMutexes::Mutex& mutex = engine.store.handles[args.mutexes[args.num_mutexes_held]].mutex;
    const bool is_taken = TaskMutexes::take(mutex, slot + 1, [&](uint32_t first) {
      task.state.store(SlotState::kPending, std::memory_order_relaxed);
      task.next_waiter = first;
    });
    if (!is_taken) return false;
    ++args.num_mutexes_held;
  }
  return true;
}

void unlock_mutexes(Engine& engine, uint32_t slot, uint32_t thread) {
  const SlotArgs& args = engine.store.args[slot];
  for (uint32_t t = 0; t < args.num_mutexes_held; ++t) {
    TaskMutexes::give(
        engine.store.handles[args.mutexes[t]].mutex,
        [&](uint32_t waiter) { return engine.store.slots[waiter - 1].next_waiter; },
        [&](uint32_t waiter) {
          if (lock_mutexes(engine, waiter - 1)) make_ready(engine, waiter - 1, thread);
        });
  }
}

}  // namespace tilewise::tasks
