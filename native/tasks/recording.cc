// Record and replay. See recording.h.
#include "tasks/recording.h"

#include <algorithm>
#include <mutex>

#include "tasks/boxes.h"
#include "tasks/hot.h"
#include "tasks/pool.h"
#include "tasks/submit_lock.h"
#include "tasks/thread_state.h"

namespace tilewise::tasks {

namespace {

constexpr uint32_t kRecordedBoxes = 1 << 14;

/// Of (address, bytes); those without bytes are nowhere.
bool any_overlap(std::vector<std::pair<uint64_t, uint64_t>> ranges) {
  std::erase_if(ranges, [](const auto& range) { return range.second == 0; });
  std::sort(ranges.begin(), ranges.end());
  for (size_t r = 1; r < ranges.size(); ++r) {
    if (ranges[r].first < ranges[r - 1].first + ranges[r - 1].second) return true;
  }
  return false;
}

bool overlap(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

}  // namespace

uint32_t Recording::Pool::take() {
  if (!free.empty()) {
    const uint32_t index = free.back();
    free.pop_back();
    return index;
  }
  chunks.emplace_back();
  return static_cast<uint32_t>(chunks.size());
}

Recording::Recording(const Engine& engine) {
  const Region& region = engine.region();
  for (uint32_t e = 0; e < region.header->max_events; ++e) {
    event_values.push_back(region.events[e].value.load(std::memory_order_acquire));
  }
}

uint32_t Recording::buffer_of(Engine& engine, uint32_t index, bool is_new) {
  const Handle& handle = engine.region().handles[index];
  const uint64_t name = uint64_t{handle.generation.load()} << 32 | (index + 1);
  const auto [found, is_first] = buffer_by_name_.try_emplace(name, static_cast<uint32_t>(buffers.size()));
  if (is_first) {
    Buffer buffer{};
    buffer.handle = is_new ? 0 : name;
    buffer.index = index;
    buffer.address = handle.address;
    buffer.bytes = handle.bytes;
    buffer.is_frozen = (handle.flags & kFrozen) != 0;
    buffers.push_back(std::move(buffer));
  }
  return found->second;
}

void Recording::add(Engine& engine, uint32_t slot, const pto_task_spec& spec, uint32_t fresh) {
  const Region& region = engine.region();
  const Slot& live = region.slots[slot];
  const SlotArgs& args = region.args[slot];
  const auto number = static_cast<uint32_t>(tasks.size());
  const TaskRef self = make_ref(1, number);
  task_by_name_[make_ref(generation_in(live.wake.load(std::memory_order_relaxed)), slot)] = number;
  Task task{};
  task.kernel = spec.kernel;
  task.priority = spec.priority;
  task.type_class = live.type_class;
  task.flags = static_cast<uint8_t>(live.flags & (kUsesTokens | kIsParent | kHasTarget));
  task.num_params = live.num_params;
  task.num_scalars = live.num_scalars;
  task.target_worker = static_cast<uint32_t>(spec.target_worker);
  task.first_param = static_cast<uint32_t>(accesses.size());
  task.first_scalar = static_cast<uint32_t>(scalars.size());
  task.first_producer = static_cast<uint32_t>(producers.size());
  task.first_wait = static_cast<uint32_t>(waits.size());
  scalars.insert(scalars.end(), args.scalars, args.scalars + live.num_scalars);
  for (uint32_t w = 0; w < spec.num_waits; ++w) {
    const uint64_t event = spec.waits[w].event & 0xFFFFFFFF;
    waits.push_back({event, spec.waits[w].value - event_values[event]});
  }
  task.num_waits = spec.num_waits;
  std::vector<uint64_t> found;
  for (uint32_t a = 0; a < spec.num_after; ++a) {
    const auto earlier = task_by_name_.find(spec.after[a]);
    if (earlier != task_by_name_.end()) found.push_back(uint64_t{earlier->second} << kFlagBits | kCarriesPoison);
  }
  std::vector<std::pair<uint32_t, Access>> touched;
  const auto touch = [&](uint32_t index, int mode, const pto_region* box, bool is_new) {
    const uint32_t buffer = buffer_of(engine, index, is_new);
    // A buffer that each replay makes anew has no handle that could hold the token: its tasks keep their order instead.
    if (mode == PTO_COMMUTE && buffers[buffer].handle == 0) mode = PTO_INOUT;
    const auto number = static_cast<uint32_t>(boxes.size());
    if (box != nullptr) boxes.push_back(*box);
    const uint64_t offset = box != nullptr ? box->offset : 0;
    touched.push_back({buffer, {buffer, static_cast<uint8_t>(mode), box != nullptr, false, number, offset}});
    return buffer;
  };
  std::vector<const pto_region*> touched_boxes;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const Param& param = args.params[p];
    touched_boxes.push_back(spec.params[p].region);
    if (param.handle == kNone) {
      touched.push_back({kNone, {kNone, param.mode, false, false, 0, param.address}});
    } else {
      touch(param.handle, param.mode, spec.params[p].region, (fresh >> p & 1) != 0);
    }
  }
  if (spec.predicate != 0) {
    task.predicate = touch(static_cast<uint32_t>(spec.predicate & 0xFFFFFFFF) - 1, PTO_INPUT, nullptr, false) + 1;
    touched_boxes.push_back(nullptr);
  }
  for (size_t t = 0; t < touched.size(); ++t) {
    auto& [buffer, access] = touched[t];
    if (buffer != kNone && access.mode != PTO_NO_DEP && !buffers[buffer].is_frozen) {
      analyse(buffer, access, touched_boxes[t], self, found);
    }
    accesses.push_back(access);
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  // The same producer with and without the flag: the one with it stands first.
  found.erase(std::unique(found.begin(), found.end(), [](uint64_t a, uint64_t b) { return a >> kFlagBits == b >> kFlagBits; }),
              found.end());
  std::reverse(found.begin(), found.end());
  producers.insert(producers.end(), found.begin(), found.end());
  task.num_producers = static_cast<uint32_t>(found.size());
  task.is_plain = spec.num_waits == 0 && spec.predicate == 0 && spec.target_worker == 0 &&
                  std::all_of(touched.begin(), touched.end(), [&](const auto& touch) {
                    const auto& [buffer, access] = touch;
                    return buffer != kNone && buffers[buffer].handle != 0 && !access.is_region && access.mode <= PTO_INOUT;
                  });
  tasks.push_back(task);
}

// Finds the recorded producers of one access and whether it also meets what stood there before.
void Recording::analyse(uint32_t number, Access& access, const pto_region* region, TaskRef self,
                        std::vector<uint64_t>& found) {
  Buffer& buffer = buffers[number];
  const auto sink = [&](TaskRef ref) {
    if (without_flags(ref) != self) found.push_back(uint64_t{slot_of(ref)} << kFlagBits | (ref & kFlagMask));
  };
  const bool writes = kind_of(access.mode) != Kind::kRead;
  if (region == nullptr && !buffer.has_regions) {
    // Behind a write everything older is ordered already; beside or before it is not.
    access.meets_entry = buffer.handle != 0 && !buffer.is_written;
    if (buffer.state.kind == Kind::kCommute && access.mode == PTO_COMMUTE) access.meets_entry = buffer.handle != 0;
    collect(buffer.state, pool, access.mode, sink);
    record(buffer.state, pool, access.mode, self);
    buffer.is_written |= writes;
    return;
  }
  if (boxes_ == nullptr) {
    box_memory_.resize(RegionIndex::bytes_needed(kRecordedBoxes) + 64);
    auto* memory = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(box_memory_.data()) + 63) & ~uintptr_t{63});
    boxes_ = std::make_unique<RegionIndex>(memory, kRecordedBoxes, true);
  }
  Handle shadow{};
  shadow.bytes = buffer.bytes;
  shadow.tree = buffer.tree;
  shadow.flags = buffer.has_regions ? uint32_t{kHasRegions} : 0u;
  shadow.state = buffer.state;
  if (!begin_boxes(*boxes_, number, shadow) || !ensure_box(*boxes_, number, shadow, box_of(shadow, region))) {
    raise(PTO_NO_MEMORY, "[runtime.record] a recording may use at most ", kRecordedBoxes, " boxes at once; got more; ",
          "record a smaller part");
  }
  buffer.has_regions = true;
  access.meets_entry = buffer.handle != 0;
  collect_boxes(*boxes_, number, shadow, region, access.mode, pool, sink);
  record_box(*boxes_, number, shadow, region, access.mode, pool, self);
  buffer.tree = shadow.tree;
  buffer.state = {};
  buffer.is_written |= writes;
  buffer.users.push_back(slot_of(self));
}

void Engine::begin_recording() {
  const uint32_t seat_index = seat_here();
  if (open_recordings_[seat_index] != nullptr) {
    raise(PTO_BAD_ARGUMENT, "[runtime.record_begin] one recording at a time per thread; got a second; end the first");
  }
  open_recordings_[seat_index] = std::make_unique<Recording>(*this);
  num_observers_.fetch_add(1);
}

pto_recording Engine::end_recording() {
  const uint32_t seat_index = seat_here();
  if (open_recordings_[seat_index] == nullptr) {
    raise(PTO_BAD_ARGUMENT, "[runtime.record_end] a recording must be open; got none; call pto_record_begin first");
  }
  std::lock_guard guard(recordings_mutex_);
  const pto_recording name = recordings_.empty() ? 1 : recordings_.rbegin()->first + 1;
  recordings_[name] = std::move(open_recordings_[seat_index]);
  num_observers_.fetch_sub(1);
  return name;
}

void Engine::free_recording(pto_recording name) {
  std::lock_guard guard(recordings_mutex_);
  if (recordings_.erase(name) == 0) {
    raise(PTO_BAD_ARGUMENT, "[runtime.recording_free] a recording must exist; got ", name, "; free it once");
  }
}

// Names of buffers at this replay; what was two buffers stays two, and what overlapped still does.
std::vector<pto_handle> Engine::bind_recording(Recording& recording, const pto_handle* from, const pto_handle* to,
                                               uint32_t num_handles) {
  std::vector<pto_handle> names;
  for (const Recording::Buffer& buffer : recording.buffers) names.push_back(buffer.handle);
  for (uint32_t h = 0; h < num_handles; ++h) {
    const auto found = std::find_if(recording.buffers.begin(), recording.buffers.end(),
                                    [&](const auto& buffer) { return buffer.handle != 0 && buffer.handle == from[h]; });
    if (found == recording.buffers.end()) {
      raise(PTO_BAD_ARGUMENT, "[runtime.replay] `from` must name buffers of the recording; got handle ",
            from[h] & 0xFFFFFFFF, ", which no recorded task uses; drop it");
    }
    names[static_cast<size_t>(found - recording.buffers.begin())] = to[h];
  }
  if (names == recording.bound) return names;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (size_t b = 0; b < names.size(); ++b) {
    const Recording::Buffer& buffer = recording.buffers[b];
    if (names[b] == 0) {
      ranges.emplace_back(0, 0);
      continue;
    }
    const Handle& handle = resolve(names[b], "replay");
    if (handle.bytes != buffer.bytes) {
      raise(PTO_BAD_ARGUMENT, "[runtime.replay] a buffer must be replaced by one of the same size; got ", handle.bytes,
            " bytes for ", buffer.bytes, "; register the right part");
    }
    ranges.emplace_back(handle.address, handle.bytes);
  }
  std::vector<std::pair<uint64_t, uint64_t>> recorded;
  for (const Recording::Buffer& buffer : recording.buffers) {
    recorded.emplace_back(buffer.address, buffer.handle != 0 ? buffer.bytes : 0);
  }
  // Mostly nothing overlaps, before or now: two buffers are then two, and need not be compared pair by pair.
  const bool compares_pairs = any_overlap(recorded) || any_overlap(ranges);
  for (size_t a = 0; compares_pairs && a < names.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      if (names[a] == 0 || names[b] == 0) continue;
      const Recording::Buffer& one = recording.buffers[a];
      const Recording::Buffer& two = recording.buffers[b];
      const bool was = overlap(one.address, one.bytes, two.address, two.bytes);
      const bool is = overlap(ranges[a].first, ranges[a].second, ranges[b].first, ranges[b].second);
      if (was == is && (names[a] == names[b]) == (one.handle == two.handle)) continue;
      raise(PTO_BAD_ARGUMENT, "[runtime.replay] buffers that were apart must stay apart, and those that overlapped must ",
            "overlap; got buffers ", b, " and ", a, " of the recording bound otherwise; bind distinct memory");
    }
  }
  recording.bound = names;
  return names;
}

// A slot with all that does not depend on the replay's buffers.
inline uint32_t Engine::begin_replayed(Replay& run, uint32_t number, const Recording::Task& recorded) {
  const uint32_t slot = take_slot(run.seat);
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  Header& header = *region_.header;
  run.tasks[number] = make_ref(generation_in(task.wake.load(std::memory_order_relaxed)), slot);
  task.kernel = recorded.kernel;
  task.priority = recorded.priority;
  task.next_waiter = 0;
  task.parent = 0;
  task.poison = 0;
  task.more_producers = 0;
  task.type_class = recorded.type_class;
  task.num_producers = 0;
  task.num_params = recorded.num_params;
  task.num_scalars = recorded.num_scalars;
  task.flags = recorded.flags;
  task.num_tokens = 0;
  task.num_tokens_held = 0;
  const uint64_t sequence = header.sequence.load(std::memory_order_relaxed) + 1;
  task.sequence.store(sequence, std::memory_order_relaxed);
  header.sequence.store(sequence, std::memory_order_release);
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) [[unlikely]] note_submission(args, run.seat);
  for (uint32_t s = 0; s < recorded.num_scalars; ++s) args.scalars[s] = run.recording.scalars[recorded.first_scalar + s];
  return slot;
}

// What nearly every recorded task is; see submit_plain. False when a buffer has become special since.
inline bool Engine::replay_plain(Replay& run, uint32_t number, const Recording::Task& recorded) {
  const Recording::Access* const accesses = run.recording.accesses.data() + recorded.first_param;
  Handle* const* const handles = run.handles.data();
  for (uint32_t a = 0; a < recorded.num_params; ++a) {
    if (handles[accesses[a].buffer]->flags != kUsed) return false;
  }
  const uint32_t slot = begin_replayed(run, number, recorded);
  SlotArgs& args = region_.args[slot];
  SeatPool pool{*this, seat(run.seat)};
  const auto sink = [&](TaskRef producer) { order_after(slot, producer, run.seat); };
  for (uint32_t a = 0; a < recorded.num_params; ++a) {
    Handle& handle = *handles[accesses[a].buffer];
    args.params[a] = {handle.address, index_of(handle), 0, accesses[a].mode, 0};
    if (accesses[a].meets_entry) collect(handle.state, pool, accesses[a].mode, sink);
  }
  const uint64_t* const producers = run.recording.producers.data() + recorded.first_producer;
  for (uint32_t p = 0; p < recorded.num_producers; ++p) {
    sink(run.tasks[producers[p] >> kFlagBits] | (producers[p] & kFlagMask));
  }
  start_submitted(slot, run.seat);
  return true;
}

inline void Engine::replay_task(Replay& run, uint32_t number) {
  const Recording::Task& recorded = run.recording.tasks[number];
  if (recorded.is_plain && replay_plain(run, number, recorded)) [[likely]] return;
  const uint32_t slot = begin_replayed(run, number, recorded);
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  Header& header = *region_.header;
  if (recorded.target_worker != 0) args.target_worker = recorded.target_worker;
  for (uint32_t w = 0; w < recorded.num_waits; ++w) {
    const Recording::Wait& wait = run.recording.waits[recorded.first_wait + w];
    if (run.event_values.empty()) {
      for (uint32_t e = 0; e < header.max_events; ++e) run.event_values.push_back(region_.events[e].value.load());
    }
    add_producer(slot, run.event_values[wait.event] + wait.offset, run.seat);
    add_producer(slot, wait.event << 32 | kIsEvent, run.seat);
  }
  const uint32_t num_accesses = recorded.num_params + (recorded.predicate != 0 ? 1u : 0u);
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
    if (access.mode == PTO_COMMUTE && param.handle != kNone) args.tokens[task.num_tokens++] = param.handle;
    if (lies_in_heap(address)) {
      use_heap(address, run.seat);
      task.flags |= kUsesHeap;
    }
  }
  if (task.num_tokens > 1) {
    std::sort(args.tokens, args.tokens + task.num_tokens);
    task.num_tokens = static_cast<uint8_t>(std::unique(args.tokens, args.tokens + task.num_tokens) - args.tokens);
  }
  for (uint32_t p = 0; p < recorded.num_producers; ++p) {
    const uint64_t producer = run.recording.producers[recorded.first_producer + p];
    const TaskRef ref = run.tasks[producer >> kFlagBits] | (producer & kFlagMask);
    order_after(slot, ref, run.seat);
  }
  start_submitted(slot, run.seat);
}
// The submission lock is held throughout: no other lane sees half a replay. Waiting for a slot under it is safe,
// because completing tasks, and children of tasks, never need it.
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
  Replay run{*recording, bind_recording(*recording, from, to, num_handles), {}, {}, {}, {}, seat_index};
  Blocking let_others_run;
  for (size_t b = 0; b < recording->buffers.size(); ++b) {
    const Recording::Buffer& buffer = recording->buffers[b];
    run.handles.push_back(buffer.handle != 0 ? &resolve(run.names[b], "replay") : nullptr);
    run.addresses.push_back(buffer.handle != 0 ? run.handles[b]->address
                                               : allocate_heap(seat_index, aligned(buffer.bytes)));
  }
  run.tasks.resize(recording->tasks.size());
  const SubmitGuard guard(*region_.header, seat_index, fences_);
  const auto num_tasks = static_cast<uint32_t>(recording->tasks.size());
  for (uint32_t t = 0; t < num_tasks; ++t) replay_task(run, t);
  Seat& me = seat(seat_index);
  me.num_submitted.store(me.num_submitted.load(std::memory_order_relaxed) + num_tasks, std::memory_order_relaxed);
  size_t number = 0;
  for (const Recording::Buffer& buffer : recording->buffers) leave_behind(run, buffer, number++);
}

// What later submissions find in a buffer: the recording's last accesses, by the names of this replay.
void Engine::leave_behind(Replay& run, const Recording::Buffer& buffer, size_t number) {
  if (buffer.handle == 0 || buffer.is_frozen) return;
  Handle& handle = *run.handles[number];
  SeatPool pool{*this, seat(run.seat)};
  const auto renamed = [&](TaskRef ref) { return run.tasks[slot_of(ref)] | (ref & kFlagMask); };
  if (buffer.has_regions || (handle.flags & kHasRegions) != 0) {
    if ((handle.flags & kHasRegions) != 0) {
      std::lock_guard guard(region_.header->boxes_lock);
      sweep_boxes(boxes_, index_of(handle), handle, pool, true);
      handle.flags &= ~kHasRegions;
    }
    give_chunks(pool, handle.state.more_now);
    give_chunks(pool, handle.state.more_before);
    handle.state = {};
    // Several last writers at once: whoever comes next waits for all of them.
    handle.state.kind = Kind::kWrite;
    const auto leave = [&](TaskRef ref) {
      if (handle.state.now[0] == 0) {
        handle.state.now[0] = ref;
      } else {
        push_ref(pool, handle.state.more_now, ref);
        ++handle.state.num_more;
      }
    };
    for (const uint32_t user : buffer.users) leave(run.tasks[user]);
    for_each_now(buffer.state, run.recording.pool, [&](TaskRef ref) { leave(renamed(ref)); });
    return;
  }
  if (!buffer.is_written) {
    for_each_now(buffer.state, run.recording.pool,
                 [&](TaskRef ref) { record(handle.state, pool, PTO_INPUT, without_flags(renamed(ref))); });
    return;
  }
  if (handle.state.more_now != 0) give_chunks(pool, handle.state.more_now);
  if (handle.state.more_before != 0) give_chunks(pool, handle.state.more_before);
  handle.state = {};
  handle.state.kind = buffer.state.kind;
  for (int i = 0; i < 2; ++i) {
    if (buffer.state.now[i] != 0) handle.state.now[i] = renamed(buffer.state.now[i]);
  }
  if (buffer.state.before != 0) handle.state.before = renamed(buffer.state.before);
  if ((buffer.state.more_now | buffer.state.more_before) == 0) return;
  for_each_in(run.recording.pool, buffer.state.more_now, [&](TaskRef ref) {
    push_ref(pool, handle.state.more_now, renamed(ref));
    ++handle.state.num_more;
  });
  for_each_in(run.recording.pool, buffer.state.more_before,
              [&](TaskRef ref) { push_ref(pool, handle.state.more_before, renamed(ref)); });
}

}  // namespace tilewise::tasks
