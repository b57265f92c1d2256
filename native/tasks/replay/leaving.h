// Records in a buffer's state, for later submissions, the last accesses of a replay.
//
// Who may call: a replaying thread, or one that settles a replay, with the submission lock. Blocks: for boxes_lock.
#pragma once
#include "tasks/engine/engine.h"
#include "tasks/replay/recording.h"

namespace tilewise::tasks {

void leave_behind(Engine& engine, Recording& recording, const RecordedBuffer& buffer, Handle& handle,
                  const std::vector<TaskRef>& names, uint32_t thread);
/// Replaces a buffer's state by several last writers, all of which the next task waits for.
void leave_writers(Engine& engine, Handle& handle, const std::vector<TaskRef>& writers, uint32_t thread);

}  // namespace tilewise::tasks
