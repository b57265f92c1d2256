// Workers: threads that take and run tasks until their runtime is closed.
//
// Who may call: worker_loop: the thread that is this worker; check_peer: any. Blocks: a worker sleeps while there is
// nothing to do.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Returns when the runtime closes, or the other process has died.
void worker_loop(Engine& engine, uint32_t worker);
/// Checks whether the other process of a shared file is alive.
void check_peer(Engine& engine);
/// Sleeps until there may be work.
void park_worker(Engine& engine, uint32_t worker);

}  // namespace tilewise::tasks
