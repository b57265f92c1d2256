// From a specification to a task that is ready or waits.
//
// Most tasks take the fast path (submit_plain.cc); the general one (submit.cc) handles everything unusual. Who may
// call: any thread; a kernel only with PTO_SUBMITS. Blocks: when window, heap, handles or boxes are full. A failed
// submission has no effect.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Submits a task; returns its id.
pto_task submit(Engine& engine, const pto_task_spec& spec);
/// The general path.
pto_task submit_any(Engine& engine, const pto_task_spec& spec, uint32_t thread);
/// Runs a submitted task on this thread, for PTO_RUN_HERE. Returns false, and does nothing, if the task waits for
/// others or this thread may not run it.
bool run_here(Engine& engine, uint32_t slot, uint32_t thread);
/// Frees a slot that was taken for a task which is not visible yet.
void abandon(Engine& engine, uint32_t slot);
/// Undoes a submission that failed. is_recorded: buffers' states may name the task.
void take_back(Engine& engine, uint32_t slot, uint32_t thread, bool is_recorded);
/// Records a submission while tracing.
void note_submission(Engine& engine, SlotArgs& args, uint32_t thread);
/// The handle that tracks a thread's accesses: inside a task its children have a separate one.
Handle& tracked(Engine& engine, Handle& handle, int mode, const pto_region* box, uint32_t thread);

}  // namespace tilewise::tasks
