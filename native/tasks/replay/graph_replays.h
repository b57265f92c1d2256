// Replays of instantiated graphs: beginning one, and what it leaves in its buffers.
//
// Who may call: a replaying thread; settle_replay and inherit_in_replay as replays.h says. Blocks: replay_graph until
// the last replay has ended, and helps to run it meanwhile.
#pragma once
#include "tasks/replay/instantiated_graph.h"

namespace tilewise::tasks {

/// The instantiated graph to which a slot belongs.
inline InstantiatedGraph& graph_of(const Engine& engine, uint32_t slot) {
  return static_cast<InstantiatedGraph&>(*engine.store.slots[slot].replayed.replay);
}

/// Returns true if a replay has begun. If false, the recording must be submitted.
bool replay_graph(Engine& engine, Recording& recording, const pto_handle* from, const pto_handle* to,
                  uint32_t num_handles, uint32_t thread);

/// Records in every buffer's state the replay's last accesses. Under the submission lock. If it fails half way, the
/// remaining buffers keep their flag for the next try.
void settle_replay(Engine& engine, InstantiatedGraph& graph, uint32_t thread);
/// Inherits failures of the replay's own producers; those of others were inherited while the task waited for them.
void inherit_in_replay(Engine& engine, uint32_t slot);

}  // namespace tilewise::tasks
