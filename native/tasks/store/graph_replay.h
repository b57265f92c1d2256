// The part of an instantiated graph that its running tasks use; replay/instantiated_graph.h has the rest.
//
// Who may call: the replaying thread writes it with the submission lock, before the replay's first task is ready;
// threads that run its tasks read it, and each counts in its own counter. Memory: of the process.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "protocols/graph_replays.h"

namespace tilewise::tasks {

using GraphReplays = protocols::GraphReplays<protocols::StdMemory>;

struct GraphReplay {
  struct alignas(64) Count {
    GraphReplays::Count count{0};
  };

  GraphReplay(uint32_t its_first_slot, uint32_t num_thread_slots)
      : first_slot(its_first_slot), done(num_thread_slots) {}

  const uint32_t first_slot;
  std::atomic<uint32_t> submitter{0};  // thread of the last replay
  uint64_t first_sequence = 0;
  uint64_t submit_ticks = 0;  // while tracing
  int32_t scope_depth = 0;
  std::vector<Count> done;  // per thread: tasks that have ended, over all replays
};

}  // namespace tilewise::tasks
