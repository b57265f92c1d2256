// See instance.h.
#include "tasks/replay/instance.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "tasks/hot.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/pool.h"

namespace tilewise::tasks {

namespace {

constexpr uint64_t kTicksToSubmit = 100;  // roughly, per task
constexpr uint32_t kFewProducers = 16;

/// (producer, consumer), by consumer; without those that follow from two others. Most edges of a recording do: whoever
/// rewrites what others have read stands behind the readers, and they behind the writer.
std::vector<std::pair<uint32_t, uint32_t>> needed_edges(const Recording& recording) {
  std::vector<std::pair<uint32_t, uint32_t>> edges;
  std::vector<uint32_t> covered_by(recording.tasks.size(), kNone);
  for (uint32_t t = 0; t < recording.tasks.size(); ++t) {
    const auto for_each_producer = [&](uint32_t task, auto&& visit) {
      const RecordedTask& recorded = recording.tasks[task];
      for (uint32_t p = 0; p < recorded.num_producers; ++p) {
        visit(static_cast<uint32_t>(recording.producers[recorded.first_producer + p] >> kFlagBits));
      }
    };
    for_each_producer(t, [&](uint32_t producer) {
      if (recording.tasks[producer].num_producers > kFewProducers) return;
      for_each_producer(producer, [&](uint32_t earlier) { covered_by[earlier] = t; });
    });
    for_each_producer(t, [&](uint32_t producer) {
      if (covered_by[producer] != t) edges.emplace_back(producer, t);
    });
  }
  return edges;
}

}  // namespace

Instance::Instance(Engine& engine, Recording& its_recording, uint32_t its_first_slot)
    : recording(its_recording),
      first_slot(its_first_slot),
      addresses(its_recording.accesses.size()),
      done(engine.region().header->num_seats),
      slots_(engine.region().slots) {
  const Region& region = engine.region();
  const uint32_t count = num_tasks();
  std::vector<uint32_t> num_arrivals(count);
  std::vector<uint32_t> begin(count + 1);  // of each task's successors
  const std::vector<std::pair<uint32_t, uint32_t>> edges = needed_edges(recording);
  for (const auto& [producer, consumer] : edges) {
    ++begin[producer + 1];
    ++num_arrivals[consumer];
  }
  for (uint32_t t = 0; t < count; ++t) begin[t + 1] += begin[t];
  successors.resize(edges.size());
  std::vector<uint32_t> next = begin;
  for (const auto& [producer, consumer] : edges) successors[next[producer]++] = first_slot + consumer;
  uint64_t newest = 1;
  for (uint32_t t = 0; t < count; ++t) {
    const RecordedTask& task = recording.tasks[t];
    for (uint32_t a = task.first_param; a < task.first_param + task.num_params; ++a) {
      const Recording::Access& access = recording.accesses[a];
      if (access.meets_entry) entries.push_back({t, access.buffer, access.mode});
    }
    newest = std::max(newest, generation_in(region.slots[first_slot + t].wake.load(std::memory_order_acquire)) | 1);
  }
  generation = newest;
  for (uint32_t t = 0; t < count; ++t) {
    const RecordedTask& task = recording.tasks[t];
    Slot& slot = region.slots[first_slot + t];
    if (task.num_producers == 0) roots.push_back(first_slot + t);
    if (begin[t] == begin[t + 1]) sinks.push_back(first_slot + t);
    slot.begin(task.kernel, task.priority, task.type_class, kIsReplayed);
    slot.num_params = task.num_params;
    slot.num_scalars = task.num_scalars;
    slot.cancelled.store(0, std::memory_order_relaxed);
    slot.state.store(SlotState::kPending, std::memory_order_relaxed);
    num_arrivals[t] = std::max(num_arrivals[t], 1u);
    slot.replayed = {this,
                     engine.function_at(task.kernel),
                     addresses.data() + task.first_param,
                     recording.scalars.data() + task.first_scalar,
                     successors.data() + begin[t],
                     begin[t + 1] - begin[t],
                     num_arrivals[t],
                     0,
                     0};
    slot.children.store(num_arrivals[t], std::memory_order_relaxed);
    slot.wake.store((newest + 2) << 24, std::memory_order_release);  // as if a round had just ended
  }
}

// Room for it, if its tasks are all plain: else it is submitted task by task whenever it is replayed.
void Engine::instantiate(Recording& recording) {
  const auto count = static_cast<uint32_t>(recording.tasks.size());
  const bool is_plain =
      std::all_of(recording.tasks.begin(), recording.tasks.end(), [](const auto& task) { return task.is_plain; });
  if (count == 0 || !is_plain) return;
  reap_instances();
  uint32_t first = region_.header->num_slots - region_.header->num_replayable;
  for (const auto& other : instantiated_) {  // in the order of their slots
    const Instance& instance = *other->instance;
    if (first + count <= instance.first_slot) break;
    first = instance.first_slot + instance.num_tasks();
  }
  if (count > region_.header->num_slots - first) return;
  recording.instance = std::make_unique<Instance>(*this, recording, first);
}

/// The slots of freed recordings whose last round has ended. Under recordings_mutex_.
void Engine::reap_instances() {
  std::erase_if(instantiated_, [&](const auto& recording) {
    return recording->instance->is_freed && recording->instance->is_done(header_seats());
  });
}

// True: a round has begun. False: the recording must be submitted.
bool Engine::replay_instance(Recording& recording, const pto_handle* from, const pto_handle* to, uint32_t num_handles,
                             uint32_t seat_index) {
  Instance& instance = *recording.instance;
  if (!outwait(instance, seat_index)) return false;
  std::optional<Busy> busy;  // until the roots are ready no slot shows the round
  {
    const SubmitGuard guard(*region_.header, seat_index, fences_);
    busy.emplace(seat(seat_index));
    if (instance.is_freed) {
      raise(PTO_BAD_ARGUMENT,
            "[runtime.replay] a recording must exist; got one that another thread has freed; free it last");
    }
    if (!instance.is_done(header_seats())) return false;  // another thread was faster
    const bool is_chained = instance.is_chained && instance.num_freezes == num_freezes_ && !has_failures();
    if (!is_chained || num_handles != 0 || !instance.is_as_recorded) {
      std::vector<pto_handle> names = bind_recording(recording, from, to, num_handles);
      if ((!is_chained || names != instance.names) && !enter(instance, std::move(names), seat_index)) return false;
    }
    begin_round(instance, seat_index);
  }
  for (const uint32_t root : instance.roots) {
    if (!arrive(root)) continue;
    // A full ring is not flooded: what this thread can run of it, it runs.
    if (is_full(region_.rings[seat_index * region_.header->num_classes + region_.slots[root].type_class])) {
      help(seat_index);
    }
    make_ready(root, seat_index);
  }
  return true;
}

/// Helps until the last round has ended. Idle, it gives up when none of the round's tasks ends for as long as
/// submitting would take: what they wait for may be the caller's to do.
bool Engine::outwait(Instance& instance, uint32_t seat_index) {
  uint64_t until = 0;  // its first idle moment sets this
  uint64_t num_done = 0;
  for (uint32_t n = 1; !instance.is_done(header_seats()); ++n) {
    if (help(seat_index)) continue;
    const uint64_t now = ticks();
    if (now > until) {
      const uint64_t before = std::exchange(num_done, instance.num_done(header_seats()));
      if (until != 0 && num_done == before) return false;
      until = now + kTicksToSubmit * instance.num_tasks();
    }
    if (n % 256 == 0) {
      sched_yield();
    } else {
      protocols::relax();
    }
  }
  return true;
}

// The first round after others have touched the buffers, or with other buffers. False: one of them is special.
bool Engine::enter(Instance& instance, std::vector<pto_handle> names, uint32_t seat_index) {
  const Recording& recording = instance.recording;
  settle(instance, seat_index);
  if (has_failures()) sweep_failures_if_many(false);
  std::vector<Handle*> handles;
  for (size_t b = 0; b < names.size(); ++b) {
    Handle& handle = resolve(names[b], "replay");
    settle_buffer(handle, seat_index);
    const uint32_t expected = recording.buffers[b].is_frozen ? kUsed | kFrozen : uint32_t{kUsed};
    if (handle.flags != expected) return false;
    handles.push_back(&handle);
  }
  if (names != instance.names) {
    for (size_t a = 0; a < recording.accesses.size(); ++a) {
      instance.addresses[a] = region_.at(handles[recording.accesses[a].buffer]->address);
    }
    instance.is_as_recorded =
        std::equal(names.begin(), names.end(), recording.buffers.begin(), recording.buffers.end(),
                   [](pto_handle name, const RecordedBuffer& buffer) { return name == buffer.handle; });
    instance.names = std::move(names);
    instance.handles = std::move(handles);
  }
  SeatPool pool{*this, seat(seat_index)};
  try {
    for (const Instance::Entry& entry : instance.entries) {
      Slot& task = region_.slots[instance.first_slot + entry.task];
      collect(instance.handles[entry.buffer]->state, pool, entry.mode, [&](TaskRef producer) {
        const WakeWord word = region_.slots[slot_of(producer)].wake.load(std::memory_order_acquire);
        if (generation_in(word) != generation_of(producer)) {
          if (has_failures()) inherit(task, producer);
          return;
        }
        if (task.more_producers == 0) instance.held_back.push_back(instance.first_slot + entry.task);
        push_ref(pool, task.more_producers, producer);
      });
    }
  } catch (...) {
    for (const Instance::Entry& entry : instance.entries) {
      Slot& task = region_.slots[instance.first_slot + entry.task];
      give_chunks(pool, task.more_producers);
      task.poison = 0;
    }
    instance.held_back.clear();
    throw;
  }
  for (size_t b = 0; b < instance.handles.size(); ++b) {
    if (recording.buffers[b].is_frozen) continue;
    instance.handles[b]->replayed_by = instance.first_slot;
    instance.handles[b]->flags |= kReplayed;
  }
  instance.num_freezes = num_freezes_;
  instance.is_chained = true;
  return true;
}

void Engine::begin_round(Instance& instance, uint32_t seat_index) {
  Header& header = *region_.header;
  Seat& me = seat(seat_index);
  const uint32_t count = instance.num_tasks();
  instance.lane.store(seat_index, std::memory_order_relaxed);
  instance.generation.store(instance.generation.load(std::memory_order_relaxed) + 2, std::memory_order_relaxed);
  instance.target.store(instance.target.load(std::memory_order_relaxed) + count, std::memory_order_release);
  instance.first_sequence = header.sequence.load(std::memory_order_relaxed) + 1;
  header.sequence.store(instance.first_sequence + count - 1, std::memory_order_release);
  me.num_submitted.store(me.num_submitted.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) {
    instance.submit_ticks = ticks();
    instance.scope_depth = static_cast<int32_t>(me.depth);
  }
  // One more arrival for each that waits for tasks outside; before any other could come.
  for (const uint32_t slot : instance.held_back) region_.slots[slot].children.fetch_add(1, std::memory_order_relaxed);
  for (const uint32_t slot : instance.held_back) start_submitted(slot, seat_index);
  instance.held_back.clear();
}

/// Leaves in every buffer who accessed it last. Under the submission lock. When it fails half way, the rest keep their
/// flag for the next try, and the next replay enters anew.
void Engine::settle(Instance& instance, uint32_t seat_index) {
  instance.is_chained = false;
  std::vector<TaskRef> names;
  for (size_t b = 0; b < instance.handles.size(); ++b) {
    Handle& handle = *instance.handles[b];
    if ((handle.flags & kReplayed) == 0 || handle.replayed_by != instance.first_slot) continue;
    if (names.empty()) {
      names.resize(instance.num_tasks());
      for (uint32_t t = 0; t < names.size(); ++t) names[t] = instance.name_of(t);
    }
    leave_behind(instance.recording, instance.recording.buffers[b], handle, names, seat_index);
    handle.flags &= ~kReplayed;
  }
}

void Engine::settle_buffer(Handle& handle, uint32_t seat_index) {
  if ((handle.flags & kReplayed) != 0) settle(*region_.slots[handle.replayed_by].replayed.instance, seat_index);
}

void Engine::settle_all(uint32_t seat_index) {
  std::lock_guard guard(recordings_mutex_);
  for (const auto& recording : instantiated_) settle(*recording->instance, seat_index);
}

// Failures of the round's own producers; those of others have come while the task waited for them.
void Engine::inherit_replayed(uint32_t slot) {
  Slot& task = region_.slots[slot];
  const Instance& instance = *task.replayed.instance;
  const RecordedTask& recorded = instance.recording.tasks[slot - instance.first_slot];
  for (uint32_t p = 0; p < recorded.num_producers; ++p) {
    const uint64_t producer = instance.recording.producers[recorded.first_producer + p];
    inherit(task, instance.name_of(static_cast<uint32_t>(producer >> kFlagBits)) | (producer & kFlagMask));
  }
}

/// Rounds that a lane has begun and that have not ended; of any lane with kNone.
bool Engine::has_rounds(uint32_t seat_index) const {
  std::lock_guard guard(recordings_mutex_);
  return std::any_of(instantiated_.begin(), instantiated_.end(), [&](const auto& recording) {
    const Instance& instance = *recording->instance;
    return (seat_index == kNone || instance.lane.load(std::memory_order_relaxed) == seat_index) &&
           !instance.is_done(header_seats());
  });
}

/// Asks for a wake-up at the end of a lane's rounds; see watch().
void Engine::watch_rounds(uint32_t seat_index) {
  bool is_watched = false;
  {
    std::lock_guard guard(recordings_mutex_);
    for (const auto& recording : instantiated_) {
      const Instance& instance = *recording->instance;
      if (instance.lane.load(std::memory_order_relaxed) != seat_index && seat_index != kNone) continue;
      for (const uint32_t sink : instance.sinks) is_watched |= watch(make_ref(instance.generation, sink));
    }
  }
  // All have ended, but the last of them has yet to say so: it does at once.
  while (!is_watched && has_rounds(seat_index)) sched_yield();
}

/// Sequence numbers, first to last, of the rounds that have not ended.
std::vector<std::pair<uint64_t, uint64_t>> Engine::live_rounds() const {
  std::vector<std::pair<uint64_t, uint64_t>> rounds;
  std::lock_guard guard(recordings_mutex_);
  for (const auto& recording : instantiated_) {
    const Instance& instance = *recording->instance;
    if (instance.is_done(header_seats())) continue;
    rounds.emplace_back(instance.first_sequence, instance.first_sequence + instance.num_tasks() - 1);
  }
  return rounds;
}

/// Whether a task of some round runs, is ready or is ended from outside.
bool Engine::has_live_rounds() const {
  std::lock_guard guard(recordings_mutex_);
  for (const auto& recording : instantiated_) {
    const Instance& instance = *recording->instance;
    if (instance.is_done(header_seats())) continue;
    for (uint32_t t = 0; t < instance.num_tasks(); ++t) {
      const Slot& task = region_.slots[instance.first_slot + t];
      const bool is_left = generation_in(task.wake.load(std::memory_order_acquire)) == instance.generation;
      if (is_left && task.state.load(std::memory_order_acquire) != SlotState::kPending) return true;
    }
  }
  return false;
}

uint32_t Engine::lane_of(uint32_t slot) const {
  const Slot& task = region_.slots[slot];
  return (task.flags & kIsReplayed) == 0 ? region_.lane_of(slot)
                                         : task.replayed.instance->lane.load(std::memory_order_relaxed);
}

uint64_t Engine::sequence_of(uint32_t slot) const {
  const Slot& task = region_.slots[slot];
  if ((task.flags & kIsReplayed) == 0) return task.sequence.load(std::memory_order_relaxed);
  const Instance& instance = *task.replayed.instance;
  return instance.first_sequence + (slot - instance.first_slot);
}

uint64_t& Engine::ready_ticks_of(uint32_t slot) {
  Slot& task = region_.slots[slot];
  return (task.flags & kIsReplayed) != 0 ? task.replayed.ready_ticks : region_.args[slot].ready_ticks;
}

int32_t& Engine::status_of(uint32_t slot) {
  Slot& task = region_.slots[slot];
  return (task.flags & kIsReplayed) != 0 ? task.replayed.status : region_.args[slot].status;
}

}  // namespace tilewise::tasks
