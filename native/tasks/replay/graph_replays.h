// Replays of instantiated graphs: beginning one, and what it leaves in its buffers.
//
// Who may call: a replaying thread; settle_replay and inherit_in_replay as replays.h says. Blocks: replay_graph until
// the last replay has ended, and helps to run it meanwhile.
#pragma once
#include "tasks/replay/instantiated_graph.h"

namespace tilewise::tasks {

/// The instantiated graph to which a slot belongs.
inline InstantiatedGraph& kept_in(const Engine& engine, uint32_t slot) {
  return static_cast<InstantiatedGraph&>(*engine.store.slots[slot].replayed.replay);
}

/// True: a replay has begun. False: the recording must be submitted.
bool replay_graph(Engine& engine, Recording& recording, const pto_handle* from, const pto_handle* to,
                  uint32_t num_handles, uint32_t thread);

/// Leaves in every buffer the tasks that accessed it last. Under the submission lock. When it fails half way, the rest
/// keep their flag for the next try, and the next replay enters anew.
void settle_replay(Engine& engine, InstantiatedGraph& kept, uint32_t thread);
/// Failures of the replay's own producers; those of others have come while the task waited for them.
void inherit_in_replay(Engine& engine, uint32_t slot);

}  // namespace tilewise::tasks
