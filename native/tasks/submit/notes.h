// Rare attributes of tasks: a name, a deadline, views of their parameters.
//
// Who may call: the submitting thread; notes, while it fills the slot. Blocks: never. Memory: the store.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Name and deadline, before anything is taken.
void check_extras(const pto_task_spec& spec);
/// Whether each view lies in its buffer or region.
void check_views(const pto_task_spec& spec, Handle* const* handles);
/// Takes down name and deadline.
void note_extras(Engine& engine, uint32_t slot, const pto_task_spec& spec);
/// What a kernel sees of one parameter; without a view of the submitter's, its bytes.
void note_view(Engine& engine, uint32_t slot, uint32_t param, const pto_param& given, uint64_t num_bytes);

}  // namespace tilewise::tasks
