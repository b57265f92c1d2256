// Wakes sleeping threads: workers without tasks, and threads that wait for something.
//
// The protocol is in protocols/sleepers.h: the sleeper announces itself and then checks; the waker publishes and then
// checks for sleepers. Who may call: any thread, after it has published what a sleeper checks. Blocks: never.
#pragma once
#include "tasks/engine/engine.h"
#include "tasks/sched/sleep.h"

namespace tilewise::tasks {

/// Wakes one worker or all; if no worker sleeps, wakes threads that wait.
void wake_sleeper(Engine& engine, bool all);
/// Wakes threads that wait for tasks or for room.
void wake_waiters(Engine& engine);

/// Called after work was published, so that a sleeper that could run it wakes.
inline void wake_worker(Engine& engine, bool all = false) {
  const Header& header = *engine.store.header;
  Sleepers::barrier(engine.fences);
  if (Sleepers::has_any(header.parked, header.waiting)) [[unlikely]]
    wake_sleeper(engine, all);
}

}  // namespace tilewise::tasks
