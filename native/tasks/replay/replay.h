// Replays a recording by submitting its tasks again, with known order.
//
// Who may call: a replaying thread, outside of tasks. Blocks: for slots, under the submission lock, so that no other
// submitter sees half a replay.
#pragma once
#include "tasks/engine/engine.h"
#include "tasks/replay/recording.h"

namespace tilewise::tasks {

/// The checked handles of buffers at this replay. Distinct buffers must stay distinct, and overlapping ones
/// overlapping. Under the submission lock, because the recording stores the last binding.
std::vector<pto_handle> bind_recording(Engine& engine, Recording& recording, const pto_handle* from,
                                       const pto_handle* to, uint32_t num_handles);
void submit_recording(Engine& engine, Recording& recording, std::vector<pto_handle> names, uint32_t thread);

}  // namespace tilewise::tasks
