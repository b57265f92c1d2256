// Rare attributes of tasks: a name, a deadline, views of their parameters.
//
// Who may call: the submitting thread; note_*: while it fills the slot. Blocks: never. Memory: the store.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Checks name and deadline before anything is allocated.
void check_extras(const pto_task_spec& spec);
/// Checks that each view is inside its buffer or region.
void check_views(const pto_task_spec& spec, Handle* const* handles);
/// Records name and deadline.
void note_extras(Engine& engine, uint32_t slot, const pto_task_spec& spec);
/// Records the view that a kernel gets for one parameter; if the submitter passed none, the parameter's bytes.
void note_view(Engine& engine, uint32_t slot, uint32_t param, const pto_param& parameter, uint64_t num_bytes);

}  // namespace tilewise::tasks
