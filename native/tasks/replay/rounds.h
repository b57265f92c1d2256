// Rounds of recordings that are kept ready: beginning one, and what it leaves in its buffers.
//
// Who may call: a replaying thread; settle_round and inherit_in_round as replays.h says. Blocks: replay_round until the
// last round has ended, helping, as long as that goes on.
#pragma once
#include "tasks/replay/kept_recording.h"

namespace tilewise::tasks {

/// The kept recording to which a slot belongs.
inline KeptRecording& kept_in(const Engine& engine, uint32_t slot) {
  return static_cast<KeptRecording&>(*engine.store.slots[slot].replayed.round);
}

/// True: a round has begun. False: the recording must be submitted.
bool replay_round(Engine& engine, Recording& recording, const pto_handle* from, const pto_handle* to,
                  uint32_t num_handles, uint32_t thread);

/// Leaves in every buffer the tasks that accessed it last. Under the submission lock. When it fails half way, the rest
/// keep their flag for the next try, and the next replay enters anew.
void settle_round(Engine& engine, KeptRecording& kept, uint32_t thread);
/// Failures of the round's own producers; those of others have come while the task waited for them.
void inherit_in_round(Engine& engine, uint32_t slot);

}  // namespace tilewise::tasks
