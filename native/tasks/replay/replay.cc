// See replay.h.
#include "tasks/replay/replay.h"

#include <algorithm>
#include <mutex>

#include "tasks/engine/thread_slots.h"
#include "tasks/order/boxes.h"
#include "tasks/replay/leaving.h"
#include "tasks/run/link.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/submit/notes.h"
#include "tasks/submit/submit.h"
#include "tasks/wait/room.h"

namespace tilewise::tasks {

namespace {

/// A replay during its submission.
struct Replay {
  Recording& recording;
  std::vector<pto_handle> names;  // per buffer
  std::vector<uint64_t> addresses;  // per buffer
  std::vector<Handle*> handles;  // per buffer; nullptr: a buffer that the replay allocates
  std::vector<TaskRef> tasks;  // per recorded task
  std::vector<uint64_t> event_values;
  uint32_t thread;
};

/// Whether any of the ranges (address, bytes) overlap; empty ranges do not.
bool any_overlap(std::vector<std::pair<uint64_t, uint64_t>> ranges) {
  std::erase_if(ranges, [](const auto& range) { return range.second == 0; });
  std::sort(ranges.begin(), ranges.end());
  for (size_t r = 1; r < ranges.size(); ++r) {
    if (ranges[r].first < ranges[r - 1].first + ranges[r - 1].second) return true;
  }
  return false;
}

bool overlap(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

// Takes a slot and sets everything that does not depend on the replay's buffers.
inline uint32_t begin_replayed(Engine& engine, Replay& run, uint32_t number, const Recording::Task& recorded) {
  const uint32_t slot = take_slot(engine, run.thread);
  Slot& task = engine.store.slots[slot];
  SlotArgs& args = engine.store.args[slot];
  Header& header = *engine.store.header;
  run.tasks[number] = engine.store.name_at(slot);
  // The task's mutexes are set with its buffers, because buffers that replays allocate need none.
  const auto flags = static_cast<uint16_t>(recorded.flags & ~kUsesMutexes);
  task.begin(recorded.kernel, recorded.priority, recorded.type_class, flags);
  task.num_scalars = recorded.num_scalars;
  const uint64_t sequence = header.sequence.load(std::memory_order_relaxed) + 1;
  task.sequence.store(sequence, std::memory_order_relaxed);
  header.sequence.store(sequence, std::memory_order_release);
  if (recorded.name != 0 || recorded.deadline_s != 0) {
    pto_task_spec extras{};
    if (recorded.name != 0) extras.name = run.recording.names[recorded.name - 1].c_str();
    extras.deadline_s = recorded.deadline_s;
    note_extras(engine, slot, extras);
  }
  if (recorded.first_view != 0) {
    const pto_view* seen = &run.recording.views[recorded.first_view - 1];
    std::copy_n(seen, recorded.num_params, engine.store.notes[slot].views);
    task.flags |= kHasViews;
  }
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    note_submission(engine, args, run.thread);
  uint64_t* const scalars = args.scalars(recorded.num_params);
  for (uint32_t s = 0; s < recorded.num_scalars; ++s) {
    scalars[s] = run.recording.scalars[recorded.first_scalar + s];
  }
  return slot;
}

inline void bind_replayed(Engine& engine, Replay& run, uint32_t number, uint32_t slot) {
  const RecordedTask& recorded = run.recording.tasks[number];
  Slot& task = engine.store.slots[slot];
  SlotArgs& args = engine.store.args[slot];
  Header& header = *engine.store.header;
  if (recorded.target_worker != 0) args.target_worker = recorded.target_worker;
  for (uint32_t w = 0; w < recorded.num_waits; ++w) {
    const Recording::Wait& wait = run.recording.waits[recorded.first_wait + w];
    if (run.event_values.empty()) {
      for (uint32_t e = 0; e < header.max_events; ++e)
        run.event_values.push_back(engine.store.events[e].counter.load());
    }
    add_producer(engine, task, run.event_values[wait.event] + wait.offset, run.thread);
    add_producer(engine, task, wait.event << 32 | kIsEvent, run.thread);
  }
  const uint32_t num_accesses = recorded.num_params + (recorded.predicate != 0 ? 1u : 0u);
  uint32_t num_mutexes = 0;
  for (uint32_t a = 0; a < num_accesses; ++a) {
    const Recording::Access& access = run.recording.accesses[recorded.first_param + a];
    const uint64_t address = access.buffer == kNone ? access.offset : run.addresses[access.buffer] + access.offset;
    if (access.buffer != kNone && access.meets_entry) {
      Handle& handle = *run.handles[access.buffer];
      if ((handle.flags & kHasRegions) != 0) {
        std::lock_guard boxes_guard(header.boxes_lock);
        collect_param(engine, slot, run.thread, handle, nullptr, access.mode);
      } else {
        collect_param(engine, slot, run.thread, handle, nullptr, access.mode);
      }
    }
    if (a == recorded.num_params) {
      args.predicate = address;
      task.flags |= kHasPredicate;
      continue;
    }
    Param& param = args.params[a];
    param.address = address;
    const Handle* handle = access.buffer == kNone ? nullptr : run.handles[access.buffer];
    param.handle = handle == nullptr ? kNone : engine.store.index_of(*handle);
    param.mode = access.mode;
    param.is_region = access.is_region;
    if (access.is_region) engine.store.declared[uint64_t{slot} * PTO_MAX_PARAMS + a] = run.recording.boxes[access.box];
    param.shadow = 0;
    if (access.mode == PTO_COMMUTE && param.handle != kNone) args.mutexes[num_mutexes++] = param.handle;
    if (engine.store.lies_in_heap(address)) {
      use_heap(engine.store, address, run.thread);
      task.flags |= kUsesHeap;
    }
    task.num_params = static_cast<uint8_t>(a + 1);
  }
  if (num_mutexes > 0) use_mutexes(task, args, num_mutexes);
  for (uint32_t p = 0; p < recorded.num_producers; ++p) {
    const uint64_t producer = run.recording.producers[recorded.first_producer + p];
    const TaskRef ref = run.tasks[producer >> kFlagBits] | (producer & kFlagMask);
    order_after(engine, task, ref, run.thread);
  }
}

void replay_task(Engine& engine, Replay& run, uint32_t number) {
  const uint32_t slot = begin_replayed(engine, run, number, run.recording.tasks[number]);
  try {
    bind_replayed(engine, run, number, slot);
  } catch (...) {
    abandon(engine, slot);
    throw;
  }
  start_submitted(engine, slot, run.thread);
}

/// If the pool of task references is exhausted, the buffers cannot record which tasks used them. So this waits until
/// these tasks have ended.
template <class Leave>
void leave_or_await(Engine& engine, const Replay& run, uint32_t count, Leave&& leave) {
  try {
    leave();
  } catch (const StatusError& error) {
    if (error.status != PTO_NO_MEMORY) throw;
    for (uint32_t t = 0; t < count; ++t) {
      while (!is_complete(engine, run.tasks[t]) && !engine.peer.is_lost.load(std::memory_order_relaxed)) {
        if (!help(engine, run.thread)) sched_yield();
        check_peer(engine);
      }
    }
  }
}

/// Called if only the first `count` tasks were submitted: the next task on one of their buffers waits for all of them,
/// and for all earlier ones.
void leave_part(Engine& engine, Replay& run, uint32_t count) {
  ChunkPool pool{engine, engine.thread_slot(run.thread)};
  std::vector<std::vector<TaskRef>> users(run.handles.size());
  for (uint32_t t = 0; t < count; ++t) {
    const RecordedTask& task = run.recording.tasks[t];
    for (uint32_t a = 0; a < task.num_params + (task.predicate != 0 ? 1u : 0u); ++a) {
      const uint32_t buffer = run.recording.accesses[task.first_param + a].buffer;
      if (buffer != kNone) users[buffer].push_back(run.tasks[t]);
    }
  }
  for (size_t b = 0; b < users.size(); ++b) {
    if (users[b].empty() || run.handles[b] == nullptr || run.recording.buffers[b].is_frozen) continue;
    Handle& handle = *run.handles[b];
    const auto note = [&](TaskRef ref) { users[b].push_back(without_flags(ref)); };
    if ((handle.flags & kHasRegions) != 0) {
      std::lock_guard guard(engine.store.header->boxes_lock);
      collect_boxes(engine.boxes, engine.store.index_of(handle), handle, nullptr, PTO_OUTPUT, pool, note);
    } else {
      collect(handle.state, pool, PTO_OUTPUT, note);
    }
    leave_writers(engine, handle, users[b], run.thread);
  }
}

}  // namespace

// The handles of buffers at this replay. Distinct buffers must stay distinct, and overlapping ones overlapping.
std::vector<pto_handle> bind_recording(Engine& engine, Recording& recording, const pto_handle* from,
                                       const pto_handle* to, uint32_t num_handles) {
  std::vector<pto_handle> names;
  for (const RecordedBuffer& buffer : recording.buffers) names.push_back(buffer.handle);
  for (uint32_t h = 0; h < num_handles; ++h) {
    const uint32_t buffer = recording.find_buffer(from[h]);
    if (buffer == kNone) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.replay] `from` must name buffers of the recording; got handle ",
                  from[h] & 0xFFFFFFFF, ", which no recorded task uses; drop it");
    }
    names[buffer] = to[h];
  }
  if (names == recording.bound) return names;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (size_t b = 0; b < names.size(); ++b) {
    const RecordedBuffer& buffer = recording.buffers[b];
    if (names[b] == 0) {
      ranges.emplace_back(0, 0);
      continue;
    }
    const Handle& handle = resolve(engine, names[b], "replay");
    if (handle.bytes != buffer.bytes) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.replay] a buffer must be replaced by one of the same size; got ",
                  handle.bytes, " bytes for ", buffer.bytes, "; register the right part");
    }
    ranges.emplace_back(handle.address, handle.bytes);
  }
  std::vector<std::pair<uint64_t, uint64_t>> recorded;
  for (const RecordedBuffer& buffer : recording.buffers) {
    recorded.emplace_back(buffer.address, buffer.handle != 0 ? buffer.bytes : 0);
  }
  // Usually nothing overlaps, before or now; then pairs need not be compared.
  const bool compares_pairs = any_overlap(recorded) || any_overlap(ranges);
  for (size_t a = 0; compares_pairs && a < names.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      if (names[a] == 0 || names[b] == 0) continue;
      const RecordedBuffer& one = recording.buffers[a];
      const RecordedBuffer& two = recording.buffers[b];
      const bool was = overlap(one.address, one.bytes, two.address, two.bytes);
      const bool is = overlap(ranges[a].first, ranges[a].second, ranges[b].first, ranges[b].second);
      if (was == is && (names[a] == names[b]) == (one.handle == two.handle)) continue;
      throw_error(PTO_BAD_ARGUMENT,
                  "[runtime.replay] buffers that were apart must stay apart, and those that overlapped must ",
                  "overlap; got other memory for buffers ", b, " and ", a, " of the recording; bind distinct memory");
    }
  }
  recording.bound = names;
  return names;
}

// Keeps the submission lock throughout, so that no other submitter sees half a replay. Waiting for a slot under it is
// safe, because completing tasks and children of tasks never need it.
void submit_recording(Engine& engine, Recording& recording, std::vector<pto_handle> names, uint32_t thread) {
  Replay run{recording, std::move(names), {}, {}, {}, {}, thread};
  for (size_t b = 0; b < recording.buffers.size(); ++b) {
    const RecordedBuffer& buffer = recording.buffers[b];
    run.handles.push_back(buffer.handle != 0 ? &resolve(engine, run.names[b], "replay") : nullptr);
    const bool is_frozen = buffer.handle != 0 && (run.handles[b]->flags & kFrozen) != 0;
    if (buffer.is_frozen != is_frozen && (buffer.is_frozen || buffer.is_written)) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.replay] a buffer must be as it was recorded; got one that is ",
                  is_frozen ? "frozen now and written by the recording" : "no longer frozen",
                  "; freeze or unfreeze it, or record again");
    }
    run.addresses.push_back(buffer.handle != 0 ? run.handles[b]->address
                                               : allocate_heap(engine, thread, aligned(buffer.bytes)));
  }
  run.tasks.resize(recording.tasks.size());
  const SubmitGuard guard(*engine.store.header, thread, engine.fences);
  reclaim_chunks_if_few(engine, thread, false);
  for (Handle* handle : run.handles) {
    if (handle != nullptr) settle_buffer(engine, *handle, thread);
  }
  const auto num_tasks = static_cast<uint32_t>(recording.tasks.size());
  ThreadSlot& me = engine.thread_slot(thread);
  const auto count = [&](uint32_t submitted) {
    me.num_submitted.store(me.num_submitted.load(std::memory_order_relaxed) + submitted, std::memory_order_relaxed);
  };
  uint32_t t = 0;
  try {
    for (; t < num_tasks; ++t) replay_task(engine, run, t);
  } catch (...) {  // interrupted while waiting for a slot, or out of references
    count(t);
    leave_or_await(engine, run, t, [&] { leave_part(engine, run, t); });
    throw;
  }
  count(num_tasks);
  leave_or_await(engine, run, num_tasks, [&] {
    for (size_t b = 0; b < recording.buffers.size(); ++b) {
      const RecordedBuffer& buffer = recording.buffers[b];
      if (buffer.handle == 0 || buffer.is_frozen) continue;
      leave_behind(engine, recording, buffer, *run.handles[b], run.tasks, thread);
    }
  });
}

}  // namespace tilewise::tasks
