// Checks of a specification before anything is allocated.
//
// Who may call: the submitting thread. Blocks: never. Throws PTO_BAD_ARGUMENT with a message.
#pragma once
#include "tasks/engine/handles.h"

namespace tilewise::tasks {

/// The buffers that check_spec() resolved.
struct Resolved {
  Handle* handles[PTO_MAX_PARAMS];  // nullptr: no buffer, or none yet
  uint32_t fresh;                   // mask of parameters whose buffers were made for this task; with kHasOutputs
};
enum Traits : uint32_t { kHasMore = 1, kHasOutputs = 2, kHasBoxes = 4, kHasReductions = 8, kSeesViews = 16 };

/// Checks the whole specification; returns Traits.
uint32_t check_spec(Engine& engine, const pto_task_spec& spec, Resolved& buffers);
/// Checks the bytes that a built-in kernel would access.
void check_builtin(Engine& engine, const pto_task_spec& spec);
/// param: the parameter's number; -1: the call has no parameters.
void check_region(const Handle& handle, const pto_region& box, const char* where, int param);

}  // namespace tilewise::tasks
