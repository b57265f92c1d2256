// See replays.h.
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

/// Helps until the last replay has ended. Idle, it gives up when none of the replay's tasks ends for as long as
/// submitting would take: what they wait for may be the caller's to do.
bool outwait(Engine& engine, InstantiatedGraph& kept, uint32_t thread) {
  uint64_t until = 0;  // its first idle moment sets this
  uint64_t num_done = 0;
  for (uint32_t n = 1; !kept.is_done(engine.store.threads_in_use()); ++n) {
    if (help(engine, thread)) continue;
    const uint64_t now = ticks();
    if (now > until) {
      const uint64_t before = std::exchange(num_done, kept.num_done(engine.store.threads_in_use()));
      if (until != 0 && num_done == before) return false;
      until = now + kTicksToSubmit * kept.num_tasks();
    }
    if (n % 256 == 0) {
      sched_yield();
    } else {
      protocols::relax();
    }
  }
  return true;
}

// The first replay after others have touched the buffers, or with other buffers. False: one of them is special.
bool enter(Engine& engine, InstantiatedGraph& kept, std::vector<pto_handle> names, uint32_t thread) {
  const Recording& recording = kept.recording;
  settle_replay(engine, kept, thread);
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
  if (names != kept.names) {
    for (size_t a = 0; a < recording.accesses.size(); ++a) {
      kept.addresses[a] = engine.store.at(handles[recording.accesses[a].buffer]->address);
    }
    kept.is_as_recorded =
        std::equal(names.begin(), names.end(), recording.buffers.begin(), recording.buffers.end(),
                   [](pto_handle name, const RecordedBuffer& buffer) { return name == buffer.handle; });
    kept.names = std::move(names);
    kept.handles = std::move(handles);
  }
  ChunkPool pool{engine, engine.thread_slot(thread)};
  try {
    for (const InstantiatedGraph::Entry& entry : kept.entries) {
      Slot& task = engine.store.slots[kept.first_slot + entry.task];
      collect(kept.handles[entry.buffer]->state, pool, entry.mode, [&](TaskRef producer) {
        if (TaskWord::has_ended(engine.store.slots[slot_of(producer)].word, generation_of(producer))) {
          if (engine.has_failures()) inherit(engine, task, producer);
          return;
        }
        if (task.more_producers == 0) kept.held_back.push_back(kept.first_slot + entry.task);
        push_ref(pool, task.more_producers, producer);
      });
    }
  } catch (...) {
    for (const InstantiatedGraph::Entry& entry : kept.entries) {
      Slot& task = engine.store.slots[kept.first_slot + entry.task];
      give_chunks(pool, task.more_producers);
      task.poison = 0;
    }
    kept.held_back.clear();
    throw;
  }
  for (size_t b = 0; b < kept.handles.size(); ++b) {
    if (recording.buffers[b].is_frozen) continue;
    kept.handles[b]->replayed_by = kept.first_slot;
    kept.handles[b]->flags |= kReplayed;
  }
  kept.num_freezes = engine.num_freezes;
  kept.is_chained = true;
  return true;
}

void begin_replay(Engine& engine, InstantiatedGraph& kept, uint32_t thread) {
  Header& header = *engine.store.header;
  ThreadSlot& me = engine.thread_slot(thread);
  const uint32_t count = kept.num_tasks();
  kept.submitter.store(thread, std::memory_order_relaxed);
  kept.generation.store(kept.generation.load(std::memory_order_relaxed) + 2, std::memory_order_relaxed);
  kept.target.store(kept.target.load(std::memory_order_relaxed) + count, std::memory_order_release);
  kept.first_sequence = header.sequence.load(std::memory_order_relaxed) + 1;
  header.sequence.store(kept.first_sequence + count - 1, std::memory_order_release);
  me.num_submitted.store(me.num_submitted.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) {
    kept.submit_ticks = ticks();
    kept.scope_depth = static_cast<int32_t>(me.depth);
  }
  // One more arrival for each that waits for tasks outside; before any other could come.
  for (const uint32_t slot : kept.held_back) Countdown::join(engine.store.slots[slot].children);
  for (const uint32_t slot : kept.held_back) start_submitted(engine, slot, thread);
  kept.held_back.clear();
}

}  // namespace

void settle_replay(Engine& engine, InstantiatedGraph& kept, uint32_t thread) {
  kept.is_chained = false;
  std::vector<TaskRef> names;
  for (size_t b = 0; b < kept.handles.size(); ++b) {
    Handle& handle = *kept.handles[b];
    if ((handle.flags & kReplayed) == 0 || handle.replayed_by != kept.first_slot) continue;
    if (names.empty()) {
      names.resize(kept.num_tasks());
      for (uint32_t t = 0; t < names.size(); ++t) names[t] = kept.name_of(t);
    }
    leave_behind(engine, kept.recording, kept.recording.buffers[b], handle, names, thread);
    handle.flags &= ~kReplayed;
  }
}

// Failures of the replay's own producers; those of others have come while the task waited for them.
void inherit_in_replay(Engine& engine, uint32_t slot) {
  Slot& task = engine.store.slots[slot];
  const InstantiatedGraph& kept = kept_in(engine, slot);
  const RecordedTask& recorded = kept.recording.tasks[slot - kept.first_slot];
  for (uint32_t p = 0; p < recorded.num_producers; ++p) {
    const uint64_t producer = kept.recording.producers[recorded.first_producer + p];
    inherit(engine, task, kept.name_of(static_cast<uint32_t>(producer >> kFlagBits)) | (producer & kFlagMask));
  }
}

// True: a replay has begun. False: the recording must be submitted.
bool replay_graph(Engine& engine, Recording& recording, const pto_handle* from, const pto_handle* to,
                  uint32_t num_handles, uint32_t thread) {
  InstantiatedGraph& kept = *recording.kept;
  if (!outwait(engine, kept, thread)) return false;
  std::optional<Busy> busy;  // until the roots are ready no slot shows the replay
  {
    const SubmitGuard guard(*engine.store.header, thread, engine.fences);
    busy.emplace(engine.thread_slot(thread));
    if (kept.is_freed) {
      throw_error(PTO_BAD_ARGUMENT,
                  "[runtime.replay] a recording must exist; got one that another thread has freed; free it last");
    }
    if (!kept.is_done(engine.store.threads_in_use())) return false;  // another thread was faster
    const bool is_chained = kept.is_chained && kept.num_freezes == engine.num_freezes && !engine.has_failures();
    if (!is_chained || num_handles != 0 || !kept.is_as_recorded) {
      std::vector<pto_handle> names = bind_recording(engine, recording, from, to, num_handles);
      if ((!is_chained || names != kept.names) && !enter(engine, kept, std::move(names), thread)) return false;
    }
    begin_replay(engine, kept, thread);
  }
  for (const uint32_t root : kept.roots) {
    if (!arrive(engine, root)) continue;
    // A full ring is not flooded: what this thread can run of it, it runs.
    const uint32_t its_class = engine.store.slots[root].type_class;
    if (engine.store.rings[thread * engine.store.header->num_classes + its_class].is_full()) {
      help(engine, thread);
    }
    make_ready(engine, root, thread);
  }
  return true;
}

}  // namespace tilewise::tasks
