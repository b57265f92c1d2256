// An instantiated graph: a recording whose tasks have their own slots, with their successors stored.
//
// Purpose: a replay costs only the running of its tasks. A submitted task takes a slot, asks its buffers for earlier
// accesses, and is queued behind its producers. Here all of that is done once. A replay begins by releasing the tasks
// without producers. A task that ends decrements the counters of its successors, and resets itself for the next replay
// before it counts itself as done. So only one replay runs at a time. A replay that is requested while another runs
// helps it; if none of its tasks ends for as long as submitting would take, the replay is submitted task by task
// instead (replay.cc).
//
// Other tasks: while no other task accesses its buffers, a replay needs nothing of them, because it follows the one
// before. Their handles have the flag kReplayed. A submitter that finds this flag first calls settle, which records in
// every buffer the task that accessed it last, as [generation of the replay | slot], a TaskRef like any other. The
// first replay after that waits, task by task, for the tasks in the buffers' states (enter_graph).
//
// Who may call: replaying threads; everything except the tasks' own steps and is_done() with the submission lock.
// Blocks: never. Memory order: a replay's writes reach its end through `done`; its beginning reaches the tasks through
// their arrivals. Memory: of the process; the slots are in the store.
#pragma once
#include <memory>
#include <vector>

#include "tasks/engine/engine.h"
#include "tasks/replay/recording.h"
#include "tasks/store/graph_replay.h"

namespace tilewise::tasks {

class InstantiatedGraph : public GraphReplay {
 public:
  /// Every task of the recording must be plain (RecordedTask). first_slot: the first of `recording.tasks.size()` free
  /// ones.
  InstantiatedGraph(Engine& engine, Recording& recording, uint32_t first_slot);

  uint32_t num_tasks() const { return static_cast<uint32_t>(recording.tasks.size()); }
  TaskRef name_of(uint32_t task) const { return make_ref(generation, first_slot + task); }

  /// Whether the last replay has ended; if so, the caller sees its writes.
  bool is_done(uint32_t num_thread_slots) const {
    // The last task usually ends last. Reading its state word takes no cache line from other threads, unlike reading
    // the counters.
    const uint32_t last = first_slot + num_tasks() - 1;
    const auto has_last_ended = [&] { return TaskWord::generation(slots_[last].word) != generation; };
    return GraphReplays::is_over(has_last_ended, target.load(std::memory_order_relaxed), num_thread_slots,
                                 [this](uint32_t thread) -> const GraphReplays::Count& { return done[thread].count; });
  }
  /// The number of tasks that have ended, over all replays.
  uint64_t num_done(uint32_t num_thread_slots) const {
    return GraphReplays::num_done(num_thread_slots,
                                  [this](uint32_t thread) -> const GraphReplays::Count& { return done[thread].count; });
  }

  const char* name_in(uint32_t slot) const {
    const uint32_t name = recording.tasks[slot - first_slot].name;
    return name != 0 ? recording.names[name - 1].c_str() : "";
  }

  struct Entry {
    uint32_t task;
    uint32_t buffer;
    uint8_t mode;
  };
  Recording& recording;
  std::atomic<uint64_t> generation;  // of the last replay's tasks
  std::atomic<uint64_t> target{0};   // tasks of all replays so far
  bool is_chained = false;           // no other task has used the buffers since the last replay
  uint64_t num_freezes = 0;  // the engine's count at the last entry, because frozen buffers have no kReplayed flag
  bool is_as_recorded = false;  // the last replay used the recorded buffers
  bool is_freed = false;
  std::vector<pto_handle> names;  // per buffer of the recording: the handle that the last replay used
  std::vector<Handle*> handles;
  std::vector<uint32_t> roots;  // slots of tasks without producers
  std::vector<uint32_t> sinks;  // slots of tasks without successors
  std::vector<uint32_t> held_back;  // slots of tasks that wait for tasks outside the replay
  std::vector<Entry> entries;  // accesses that depend on tasks before the recording
  std::vector<void*> addresses;  // per access
  std::vector<uint32_t> successors;

 private:
  const Slot* slots_;
};

}  // namespace tilewise::tasks
