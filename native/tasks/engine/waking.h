// Wakes sleeping threads: workers without tasks, and threads that wait for something.
//
// The protocol is in protocols/sleepers.h: the sleeper announces itself and then checks; the waker publishes and then
// checks for sleepers. Who may call: any thread, after it has published what a sleeper checks. Blocks: never.
#pragma once
#include "tasks/engine/engine.h"
#include "tasks/sched/sleep.h"

namespace tilewise::tasks {

/// One worker, or all; threads that wait, when no worker sleeps.
void wake_sleeper(Engine& engine, bool all);
/// Threads that wait for tasks or for room look again.
void wake_waiters(Engine& engine);

/// After work was published: a sleeper that could run it must see it.
inline void wake_worker(Engine& engine, bool all = false) {
  const Header& header = *engine.store.header;
  Sleepers::barrier(engine.fences);
  if (Sleepers::has_any(header.parked, header.waiting)) [[unlikely]]
    wake_sleeper(engine, all);
}

}  // namespace tilewise::tasks
