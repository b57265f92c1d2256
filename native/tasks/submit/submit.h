// From a specification to a task that is ready or waits.
//
// Most tasks take the fast path (submit_plain.cc); the general one (submit.cc) handles everything unusual. Who may
// call: any thread; a kernel only with PTO_SUBMITS. Blocks: when window, heap, handles or boxes are full. A failed
// submission has no effect.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Returns the task's name.
pto_task submit(Engine& engine, const pto_task_spec& spec);
/// The general way.
pto_task submit_any(Engine& engine, const pto_task_spec& spec, uint32_t thread);
/// A slot was taken for a task, of which nothing is visible yet: it is given back.
void abandon(Engine& engine, uint32_t slot);
/// A submission that failed, for want of references at the latest. is_recorded: buffers may know it.
void take_back(Engine& engine, uint32_t slot, uint32_t thread, bool is_recorded);
/// While tracing.
void note_submission(Engine& engine, SlotArgs& args, uint32_t thread);
/// The handle under which a thread's accesses are tracked: inside a task its children have one of their own.
Handle& tracked(Engine& engine, Handle& handle, int mode, const pto_region* box, uint32_t thread);

}  // namespace tilewise::tasks
