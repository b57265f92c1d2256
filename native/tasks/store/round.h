// What the tasks of a replayed recording need of it while they run; replay/kept_recording.h has the rest.
//
// Who may call: the replaying thread writes it under the submission lock, before the round's first task is ready; the
// threads that run its tasks read it, and each counts in a cell of its own. Memory: of the process.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "protocols/rounds.h"

namespace tilewise::tasks {

using Rounds = protocols::Rounds<protocols::StdMemory>;

struct Round {
  struct alignas(64) Count {
    Rounds::Count count{0};
  };

  Round(uint32_t its_first_slot, uint32_t num_thread_slots) : first_slot(its_first_slot), done(num_thread_slots) {}

  const uint32_t first_slot;
  std::atomic<uint32_t> submitter{0};  // thread of the last replay
  uint64_t first_sequence = 0;
  uint64_t submit_ticks = 0;  // while tracing
  int32_t scope_depth = 0;
  std::vector<Count> done;  // tasks that have ended, of all rounds; per thread
};

}  // namespace tilewise::tasks
