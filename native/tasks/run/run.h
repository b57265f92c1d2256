// Runs tasks, and releases their successors on completion.
//
// Who may call: workers, and submitters that wait. Blocks: for what kernels block for. Memory order: the exchange of
// the task state word publishes a task's writes to its successors.
#pragma once
#include "tasks/engine/engine.h"
#include "tasks/sched/thread_state.h"

namespace tilewise::tasks {

/// Runs a task, then successors that its completion made ready, one after the other. Returns the number of tasks run.
uint32_t run(Engine& engine, uint32_t slot, uint32_t thread, bool is_worker);
/// Runs a task that its submitter found ready, and queues what its completion makes ready.
void run_alone(Engine& engine, uint32_t slot, uint32_t thread);
/// Completes a task that has ended with this status. Returns a successor for this thread to run next, or kNone.
uint32_t complete(Engine& engine, uint32_t slot, uint32_t thread, int status, bool is_worker);
/// pto_task_complete: ends a task whose kernel returns PTO_LATER.
void complete_external(Engine& engine, pto_task name, int status);

}  // namespace tilewise::tasks
