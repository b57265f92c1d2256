// Replays: by a round of the instance where there is one (instance.h), else task by task, as submissions with known
// order.
#include <algorithm>
#include <mutex>

#include "tasks/hot.h"
#include "tasks/order/boxes.h"
#include "tasks/replay/instance.h"
#include "tasks/replay/recording.h"
#include "tasks/sched/float_modes.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/pool.h"

namespace tilewise::tasks {

// A slot with all that does not depend on the replay's buffers.
inline uint32_t Engine::begin_replayed(Replay& run, uint32_t number, const Recording::Task& recorded) {
  const uint32_t slot = take_slot(run.seat);
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  Header& header = *region_.header;
  run.tasks[number] = name_at(slot);
  // Which tokens it uses is found with its buffers: those that every replay makes anew have none.
  const auto flags = static_cast<uint16_t>(recorded.flags & ~kUsesTokens);
  task.begin(recorded.kernel, recorded.priority, recorded.type_class, flags);
  task.num_scalars = recorded.num_scalars;
  const uint64_t sequence = header.sequence.load(std::memory_order_relaxed) + 1;
  task.sequence.store(sequence, std::memory_order_relaxed);
  header.sequence.store(sequence, std::memory_order_release);
  if (recorded.name != 0 || recorded.deadline_s != 0) {
    pto_task_spec extras{};
    if (recorded.name != 0) extras.name = run.recording.names[recorded.name - 1].c_str();
    extras.deadline_s = recorded.deadline_s;
    note_extras(slot, extras);
  }
  if (recorded.first_view != 0) {
    const pto_view* seen = &run.recording.views[recorded.first_view - 1];
    std::copy_n(seen, recorded.num_params, region_.notes[slot].views);
    task.flags |= kHasViews;
  }
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    note_submission(args, run.seat);
  uint64_t* const scalars = args.scalars(recorded.num_params);
  for (uint32_t s = 0; s < recorded.num_scalars; ++s) {
    scalars[s] = run.recording.scalars[recorded.first_scalar + s];
  }
  return slot;
}

void Engine::replay_task(Replay& run, uint32_t number) {
  const uint32_t slot = begin_replayed(run, number, run.recording.tasks[number]);
  try {
    bind_replayed(run, number, slot);
  } catch (...) {
    abandon(slot);
    throw;
  }
  start_submitted(slot, run.seat);
}

inline void Engine::bind_replayed(Replay& run, uint32_t number, uint32_t slot) {
  const RecordedTask& recorded = run.recording.tasks[number];
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  Header& header = *region_.header;
  if (recorded.target_worker != 0) args.target_worker = recorded.target_worker;
  for (uint32_t w = 0; w < recorded.num_waits; ++w) {
    const Recording::Wait& wait = run.recording.waits[recorded.first_wait + w];
    if (run.event_values.empty()) {
      for (uint32_t e = 0; e < header.max_events; ++e) run.event_values.push_back(region_.events[e].value.load());
    }
    add_producer(task, run.event_values[wait.event] + wait.offset, run.seat);
    add_producer(task, wait.event << 32 | kIsEvent, run.seat);
  }
  const uint32_t num_accesses = recorded.num_params + (recorded.predicate != 0 ? 1u : 0u);
  uint32_t num_tokens = 0;
  for (uint32_t a = 0; a < num_accesses; ++a) {
    const Recording::Access& access = run.recording.accesses[recorded.first_param + a];
    const uint64_t address = access.buffer == kNone ? access.offset : run.addresses[access.buffer] + access.offset;
    if (access.buffer != kNone && access.meets_entry) {
      Handle& handle = *run.handles[access.buffer];
      if ((handle.flags & kHasRegions) != 0) {
        std::lock_guard boxes_guard(header.boxes_lock);
        collect_param(slot, run.seat, handle, nullptr, access.mode);
      } else {
        collect_param(slot, run.seat, handle, nullptr, access.mode);
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
    param.handle = handle == nullptr ? kNone : index_of(*handle);
    param.mode = access.mode;
    param.is_region = access.is_region;
    if (access.is_region) region_.declared[uint64_t{slot} * PTO_MAX_PARAMS + a] = run.recording.boxes[access.box];
    param.shadow = 0;
    if (access.mode == PTO_COMMUTE && param.handle != kNone) args.tokens[num_tokens++] = param.handle;
    if (lies_in_heap(address)) {
      use_heap(address, run.seat);
      task.flags |= kUsesHeap;
    }
    task.num_params = static_cast<uint8_t>(a + 1);
  }
  if (num_tokens > 0) use_tokens(task, args, num_tokens);
  for (uint32_t p = 0; p < recorded.num_producers; ++p) {
    const uint64_t producer = run.recording.producers[recorded.first_producer + p];
    const TaskRef ref = run.tasks[producer >> kFlagBits] | (producer & kFlagMask);
    order_after(task, ref, run.seat);
  }
}

void Engine::replay(pto_recording name, const pto_handle* from, const pto_handle* to, uint32_t num_handles) {
  const uint32_t seat_index = seat_here();
  if (running.engine == this) {
    raise(PTO_BAD_ARGUMENT, "[runtime.replay] a recording is replayed outside tasks; got a call inside one");
  }
  std::shared_ptr<Recording> recording;
  {
    std::lock_guard guard(recordings_mutex_);
    const auto found = recordings_.find(name);
    if (found == recordings_.end()) {
      raise(PTO_BAD_ARGUMENT, "[runtime.replay] a recording must exist; got ", name, "; record it first");
    }
    recording = found->second;
  }
  Blocking let_others_run;
  const DefaultFloatModes modes;
  if (recording->instance != nullptr && replay_instance(*recording, from, to, num_handles, seat_index)) return;
  std::vector<pto_handle> names;
  {
    const SubmitGuard guard(*region_.header, seat_index, fences_);  // of what the recording remembers
    names = bind_recording(*recording, from, to, num_handles);
  }
  submit_recording(*recording, std::move(names), seat_index);
}

// The submission lock is held throughout: no other lane sees half a replay. Waiting for a slot under it is safe,
// because completing tasks, and children of tasks, never need it.
void Engine::submit_recording(Recording& recording, std::vector<pto_handle> names, uint32_t seat_index) {
  Replay run{recording, std::move(names), {}, {}, {}, {}, seat_index};
  for (size_t b = 0; b < recording.buffers.size(); ++b) {
    const RecordedBuffer& buffer = recording.buffers[b];
    run.handles.push_back(buffer.handle != 0 ? &resolve(run.names[b], "replay") : nullptr);
    const bool is_frozen = buffer.handle != 0 && (run.handles[b]->flags & kFrozen) != 0;
    if (buffer.is_frozen != is_frozen && (buffer.is_frozen || buffer.is_written)) {
      raise(PTO_BAD_ARGUMENT, "[runtime.replay] a buffer must be as it was recorded; got one that is ",
            is_frozen ? "frozen now and written by the recording" : "no longer frozen",
            "; freeze or unfreeze it, or record again");
    }
    run.addresses.push_back(buffer.handle != 0 ? run.handles[b]->address
                                               : allocate_heap(seat_index, aligned(buffer.bytes)));
  }
  run.tasks.resize(recording.tasks.size());
  const SubmitGuard guard(*region_.header, seat_index, fences_);
  for (Handle* handle : run.handles) {
    if (handle != nullptr) settle_buffer(*handle, seat_index);
  }
  const auto num_tasks = static_cast<uint32_t>(recording.tasks.size());
  Seat& me = seat(seat_index);
  const auto count = [&](uint32_t submitted) {
    me.num_submitted.store(me.num_submitted.load(std::memory_order_relaxed) + submitted, std::memory_order_relaxed);
  };
  uint32_t t = 0;
  try {
    for (; t < num_tasks; ++t) replay_task(run, t);
  } catch (...) {  // interrupted while it waited for a slot, or out of references
    count(t);
    leave_or_await(run, t, [&] { leave_part(run, t); });
    throw;
  }
  count(num_tasks);
  leave_or_await(run, num_tasks, [&] {
    for (size_t b = 0; b < recording.buffers.size(); ++b) {
      const RecordedBuffer& buffer = recording.buffers[b];
      if (buffer.handle == 0 || buffer.is_frozen) continue;
      leave_behind(recording, buffer, *run.handles[b], run.tasks, seat_index);
    }
  });
}

/// When no references are left to write down who used the buffers, the tasks must end before anybody else comes.
template <class Leave>
void Engine::leave_or_await(const Replay& run, uint32_t count, Leave&& leave) {
  try {
    leave();
  } catch (const StatusError& error) {
    if (error.status != PTO_NO_MEMORY) throw;
    for (uint32_t t = 0; t < count; ++t) {
      while (!is_complete(run.tasks[t]) && !peer_lost_.load(std::memory_order_relaxed)) {
        if (!help(run.seat)) sched_yield();
        check_peer();
      }
    }
  }
}

/// After the first `count` tasks alone: whoever comes next to one of their buffers waits for all of them, and for all
/// that stood there before.
void Engine::leave_part(Replay& run, uint32_t count) {
  SeatPool pool{*this, seat(run.seat)};
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
      std::lock_guard guard(region_.header->boxes_lock);
      collect_boxes(boxes_, index_of(handle), handle, nullptr, PTO_OUTPUT, pool, note);
    } else {
      collect(handle.state, pool, PTO_OUTPUT, note);
    }
    leave_writers(handle, users[b], run.seat);
  }
}

/// Makes these all that is known of a buffer: several last writers at once, for whoever comes next.
void Engine::leave_writers(Handle& handle, const std::vector<TaskRef>& writers, uint32_t seat_index) {
  AccessState state;
  state.kind = Kind::kWrite;
  SeatPool pool{*this, seat(seat_index)};
  try {
    for (const TaskRef writer : writers) {
      if (state.now[0] == 0) {
        state.now[0] = writer;
      } else {
        push_ref(pool, state.more_now, writer);
        ++state.num_more;
      }
    }
  } catch (...) {
    give_chunks(pool, state.more_now);
    throw;
  }
  forget_accesses(handle, seat_index);
  handle.flags &= ~kHasRegions;
  handle.state = state;
}

// What later submissions find in a buffer: the recording's last accesses, by the names of this replay.
void Engine::leave_behind(Recording& recording, const RecordedBuffer& buffer, Handle& handle,
                          const std::vector<TaskRef>& names, uint32_t seat_index) {
  SeatPool pool{*this, seat(seat_index)};
  const auto renamed = [&](TaskRef ref) { return names[slot_of(ref)] | (ref & kFlagMask); };
  if (buffer.has_regions || (handle.flags & kHasRegions) != 0) {
    std::vector<TaskRef> writers;
    for (const uint32_t user : buffer.users) writers.push_back(names[user]);
    for_each_now(buffer.state, recording.pool, [&](TaskRef ref) { writers.push_back(renamed(ref)); });
    return leave_writers(handle, writers, seat_index);
  }
  if (!buffer.is_written) {
    for_each_now(buffer.state, recording.pool,
                 [&](TaskRef ref) { record(handle.state, pool, PTO_INPUT, without_flags(renamed(ref))); });
    return;
  }
  AccessState state;
  state.kind = buffer.state.kind;
  std::transform(std::begin(buffer.state.now), std::end(buffer.state.now), std::begin(state.now),
                 [&](TaskRef ref) { return ref != 0 ? renamed(ref) : 0; });
  if (buffer.state.before != 0) state.before = renamed(buffer.state.before);
  try {
    for_each_in(recording.pool, buffer.state.more_now, [&](TaskRef ref) {
      push_ref(pool, state.more_now, renamed(ref));
      ++state.num_more;
    });
    for_each_in(recording.pool, buffer.state.more_before,
                [&](TaskRef ref) { push_ref(pool, state.more_before, renamed(ref)); });
  } catch (...) {
    give_chunks(pool, state.more_now);
    give_chunks(pool, state.more_before);
    throw;
  }
  if (handle.state.more_now != 0) give_chunks(pool, handle.state.more_now);
  if (handle.state.more_before != 0) give_chunks(pool, handle.state.more_before);
  handle.state = state;
}

}  // namespace tilewise::tasks
