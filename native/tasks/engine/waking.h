// Waking threads that sleep: workers for want of tasks, others for what they wait for.
//
// The protocol is in protocols/sleepers.h: the sleeper announces itself, then looks; the waker publishes, then looks
// for sleepers. Who may call: any thread, after it has published what a sleeper looks for. Blocks: never.
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
  const Header& header = *engine.region.header;
  Sleepers::barrier(engine.fences);
  if (Sleepers::has_any(header.parked, header.waiting)) [[unlikely]]
    wake_sleeper(engine, all);
}

}  // namespace tilewise::tasks
