// What later submissions find in a buffer after a replay: the recording's last accesses, as tasks of that replay.
//
// Who may call: a replaying thread, or one that settles a replay, with the submission lock. Blocks: for boxes_lock.
#pragma once
#include "tasks/engine/engine.h"
#include "tasks/replay/recording.h"

namespace tilewise::tasks {

void leave_behind(Engine& engine, Recording& recording, const RecordedBuffer& buffer, Handle& handle,
                  const std::vector<TaskRef>& names, uint32_t thread);
/// Makes these all that is known of a buffer: several last writers at once, for the task that comes next.
void leave_writers(Engine& engine, Handle& handle, const std::vector<TaskRef>& writers, uint32_t thread);

}  // namespace tilewise::tasks
