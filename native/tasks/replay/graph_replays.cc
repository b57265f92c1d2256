// See graph_replays.h.
#include "tasks/replay/graph_replays.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tasks/engine/thread_slots.h"
#include "tasks/replay/leaving.h"
#include "tasks/replay/replay.h"
#include "tasks/run/link.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/wait/room.h"

namespace tilewise::tasks {

namespace {

constexpr uint64_t kTicksToSubmit = 100;  // roughly, per task

/// Helps until the last replay has ended. Returns false if it has nothing to run and none of the replay's tasks ends
/// for as long as submitting would take: they may wait for something that the caller does later.
bool await_last_replay(Engine& engine, InstantiatedGraph& graph, uint32_t thread) {
  uint64_t until = 0;  // its first idle moment sets this
  uint64_t num_done = 0;
  for (uint32_t n = 1; !graph.is_done(engine.store.threads_in_use()); ++n) {
    if (help(engine, thread)) continue;
    const uint64_t now = ticks();
    if (now > until) {
      const uint64_t before = std::exchange(num_done, graph.num_done(engine.store.threads_in_use()));
      if (until != 0 && num_done == before) return false;
      until = now + kTicksToSubmit * graph.num_tasks();
    }
    if (n % 256 == 0) {
      sched_yield();
    } else {
      protocols::relax();
    }
  }
  return true;
}

// Called for the first replay after other tasks have used the buffers, or with other buffers. Returns false if a buffer
// has a special state.
bool enter_graph(Engine& engine, InstantiatedGraph& graph, std::vector<pto_handle> names, uint32_t thread) {
  const Recording& recording = graph.recording;
  settle_replay(engine, graph, thread);
  if (engine.has_failures()) sweep_failures_if_many(engine, false);
  reclaim_chunks_if_few(engine, thread, false);
  std::vector<Handle*> handles;
  for (size_t b = 0; b < names.size(); ++b) {
    Handle& handle = resolve(engine, names[b], "replay");
    settle_buffer(engine, handle, thread);
    const uint32_t expected = recording.buffers[b].is_frozen ? kUsed | kFrozen : uint32_t{kUsed};
    if (handle.flags != expected) return false;
    handles.push_back(&handle);
  }
  if (names != graph.names) {
    for (size_t a = 0; a < recording.accesses.size(); ++a) {
      graph.addresses[a] = engine.store.at(handles[recording.accesses[a].buffer]->address);
    }
    graph.is_as_recorded =
        std::equal(names.begin(), names.end(), recording.buffers.begin(), recording.buffers.end(),
                   [](pto_handle name, const RecordedBuffer& buffer) { return name == buffer.handle; });
    graph.names = std::move(names);
    graph.handles = std::move(handles);
  }
  ChunkPool pool{engine, engine.thread_slot(thread)};
  try {
    for (const InstantiatedGraph::Entry& entry : graph.entries) {
      Slot& task = engine.store.slots[graph.first_slot + entry.task];
      collect(graph.handles[entry.buffer]->state, pool, entry.mode, [&](TaskRef producer) {
        if (TaskWord::has_ended(engine.store.slots[slot_of(producer)].word, generation_of(producer))) {
          if (engine.has_failures()) inherit(engine, task, producer);
          return;
        }
        if (task.more_producers == 0) graph.held_back.push_back(graph.first_slot + entry.task);
        push_ref(pool, task.more_producers, producer);
      });
    }
  } catch (...) {
    for (const InstantiatedGraph::Entry& entry : graph.entries) {
      Slot& task = engine.store.slots[graph.first_slot + entry.task];
      give_chunks(pool, task.more_producers);
      task.poison = 0;
    }
    graph.held_back.clear();
    throw;
  }
  for (size_t b = 0; b < graph.handles.size(); ++b) {
    if (recording.buffers[b].is_frozen) continue;
    graph.handles[b]->replayed_by = graph.first_slot;
    graph.handles[b]->flags |= kReplayed;
  }
  graph.num_freezes = engine.num_freezes;
  graph.is_chained = true;
  return true;
}

void begin_replay(Engine& engine, InstantiatedGraph& graph, uint32_t thread) {
  Header& header = *engine.store.header;
  ThreadSlot& me = engine.thread_slot(thread);
  const uint32_t count = graph.num_tasks();
  graph.submitter.store(thread, std::memory_order_relaxed);
  graph.generation.store(graph.generation.load(std::memory_order_relaxed) + 2, std::memory_order_relaxed);
  graph.target.store(graph.target.load(std::memory_order_relaxed) + count, std::memory_order_release);
  graph.first_sequence = header.sequence.load(std::memory_order_relaxed) + 1;
  header.sequence.store(graph.first_sequence + count - 1, std::memory_order_release);
  me.num_submitted.store(me.num_submitted.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) {
    graph.submit_ticks = ticks();
    graph.scope_depth = static_cast<int32_t>(me.depth);
  }
  // One more arrival for each task that waits for others; added before any arrival.
  for (const uint32_t slot : graph.held_back) Countdown::join(engine.store.slots[slot].children);
  for (const uint32_t slot : graph.held_back) start_submitted(engine, slot, thread);
  graph.held_back.clear();
}

}  // namespace

void settle_replay(Engine& engine, InstantiatedGraph& graph, uint32_t thread) {
  graph.is_chained = false;
  std::vector<TaskRef> names;
  for (size_t b = 0; b < graph.handles.size(); ++b) {
    Handle& handle = *graph.handles[b];
    if ((handle.flags & kReplayed) == 0 || handle.replayed_by != graph.first_slot) continue;
    if (names.empty()) {
      names.resize(graph.num_tasks());
      for (uint32_t t = 0; t < names.size(); ++t) names[t] = graph.name_of(t);
    }
    leave_behind(engine, graph.recording, graph.recording.buffers[b], handle, names, thread);
    handle.flags &= ~kReplayed;
  }
}

// Inherits failures of the replay's own producers; those of others were inherited while the task waited for them.
void inherit_in_replay(Engine& engine, uint32_t slot) {
  Slot& task = engine.store.slots[slot];
  const InstantiatedGraph& graph = graph_of(engine, slot);
  const RecordedTask& recorded = graph.recording.tasks[slot - graph.first_slot];
  for (uint32_t p = 0; p < recorded.num_producers; ++p) {
    const uint64_t producer = graph.recording.producers[recorded.first_producer + p];
    inherit(engine, task, graph.name_of(static_cast<uint32_t>(producer >> kFlagBits)) | (producer & kFlagMask));
  }
}

// Returns true if a replay has begun. If false, the recording must be submitted.
bool replay_graph(Engine& engine, Recording& recording, const pto_handle* from, const pto_handle* to,
                  uint32_t num_handles, uint32_t thread) {
  InstantiatedGraph& graph = *recording.graph;
  if (!await_last_replay(engine, graph, thread)) return false;
  std::optional<Busy> busy;  // until the roots are ready, no slot shows the replay
  {
    const SubmitGuard guard(*engine.store.header, thread, engine.fences);
    busy.emplace(engine.thread_slot(thread));
    if (graph.is_freed) {
      throw_error(PTO_BAD_ARGUMENT,
                  "[runtime.replay] a recording must exist; got one that another thread has freed; free it last");
    }
    if (!graph.is_done(engine.store.threads_in_use())) return false;  // another thread was faster
    const bool is_chained = graph.is_chained && graph.num_freezes == engine.num_freezes && !engine.has_failures();
    if (!is_chained || num_handles != 0 || !graph.is_as_recorded) {
      std::vector<pto_handle> names = bind_recording(engine, recording, from, to, num_handles);
      if ((!is_chained || names != graph.names) && !enter_graph(engine, graph, std::move(names), thread)) return false;
    }
    begin_replay(engine, graph, thread);
  }
  for (const uint32_t root : graph.roots) {
    if (!arrive(engine, root)) continue;
    // If the ring is full, this thread runs some of its tasks first.
    const uint32_t its_class = engine.store.slots[root].type_class;
    if (engine.store.rings[thread * engine.store.header->num_classes + its_class].is_full()) {
      help(engine, thread);
    }
    make_ready(engine, root, thread);
  }
  return true;
}

}  // namespace tilewise::tasks
