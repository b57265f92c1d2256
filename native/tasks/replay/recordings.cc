// See recordings.h.
#include "tasks/replay/recordings.h"

#include <algorithm>

#include "tasks/engine/seats.h"
#include "tasks/replay/replay.h"
#include "tasks/replay/rounds.h"
#include "tasks/sched/float_modes.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/wait/wait.h"

namespace tilewise::tasks {

Recordings::Recordings(Engine& engine) : engine_(engine), open_(engine.region.header->num_seats) {}

void Recordings::begin() {
  const uint32_t seat_index = seat_here(engine_);
  if (open_[seat_index] != nullptr) {
    raise(PTO_BAD_ARGUMENT, "[runtime.record_begin] one recording at a time per thread; got a second; end the first");
  }
  open_[seat_index] = std::make_unique<Recording>(engine_.region);
  engine_.num_observers.fetch_add(1);
}

pto_recording Recordings::end() {
  const uint32_t seat_index = seat_here(engine_);
  if (open_[seat_index] == nullptr) {
    raise(PTO_BAD_ARGUMENT, "[runtime.record_end] a recording must be open; got none; call pto_record_begin first");
  }
  std::shared_ptr<Recording> recording = std::move(open_[seat_index]);
  engine_.num_observers.fetch_sub(1);
  std::lock_guard guard(mutex_);
  instantiate(*recording);
  if (recording->instance != nullptr) {
    const auto is_before = [](const auto& one, const auto& two) {
      return one->instance->first_slot < two->instance->first_slot;
    };
    has_instances.store(true, std::memory_order_relaxed);
    instantiated_.insert(std::upper_bound(instantiated_.begin(), instantiated_.end(), recording, is_before), recording);
  }
  const pto_recording name = next_++;
  all_[name] = std::move(recording);
  return name;
}

// Its tasks go on: what they need of it stays until they have ended.
void Recordings::free(pto_recording name) {
  const uint32_t seat_index = seat_here(engine_);
  if (running.engine == &engine_) {  // a replay may hold the submission lock until this very task has ended
    raise(PTO_BAD_ARGUMENT, "[runtime.recording_free] a recording is freed outside tasks; got a call inside one");
  }
  const SubmitGuard submit_guard(*engine_.region.header, seat_index, engine_.fences);
  std::shared_ptr<Recording> recording;
  {
    std::lock_guard guard(mutex_);
    const auto found = all_.find(name);
    if (found == all_.end()) {
      raise(PTO_BAD_ARGUMENT, "[runtime.recording_free] a recording must exist; got ", name, "; free it once");
    }
    recording = std::move(found->second);
    all_.erase(found);
  }
  if (recording->instance == nullptr) return;
  settle_round(engine_, *recording->instance, seat_index);
  std::lock_guard guard(mutex_);
  recording->instance->is_freed = true;
  reap();
}

void Recordings::replay(pto_recording name, const pto_handle* from, const pto_handle* to, uint32_t num_handles) {
  const uint32_t seat_index = seat_here(engine_);
  if (running.engine == &engine_) {
    raise(PTO_BAD_ARGUMENT, "[runtime.replay] a recording is replayed outside tasks; got a call inside one");
  }
  std::shared_ptr<Recording> recording;
  {
    std::lock_guard guard(mutex_);
    const auto found = all_.find(name);
    if (found == all_.end()) {
      raise(PTO_BAD_ARGUMENT, "[runtime.replay] a recording must exist; got ", name, "; record it first");
    }
    recording = found->second;
  }
  Blocking let_others_run;
  const DefaultFloatModes modes;
  if (recording->instance != nullptr && replay_round(engine_, *recording, from, to, num_handles, seat_index)) return;
  std::vector<pto_handle> names;
  {
    const SubmitGuard guard(*engine_.region.header, seat_index, engine_.fences);  // of what the recording remembers
    names = bind_recording(engine_, *recording, from, to, num_handles);
  }
  submit_recording(engine_, *recording, std::move(names), seat_index);
}

void Recordings::add(uint32_t slot, const pto_task_spec& spec, uint32_t seat, uint32_t fresh) {
  if (open_[seat] == nullptr) return;
  try {
    open_[seat]->add(engine_.region, slot, spec, fresh);
  } catch (...) {  // half of the task is no recording
    leave(seat);
    throw;
  }
}

void Recordings::leave(uint32_t seat) {
  if (open_[seat] == nullptr) return;
  open_[seat] = nullptr;
  engine_.num_observers.fetch_sub(1);
}

// Rounds.

// Room for it, if its tasks are all plain: else it is submitted task by task whenever it is replayed.
void Recordings::instantiate(Recording& recording) {
  const auto count = static_cast<uint32_t>(recording.tasks.size());
  const bool is_plain =
      std::all_of(recording.tasks.begin(), recording.tasks.end(), [](const auto& task) { return task.is_plain; });
  if (count == 0 || !is_plain) return;
  reap();
  uint32_t first = engine_.region.header->num_slots - engine_.region.header->num_replayable;
  for (const auto& other : instantiated_) {  // in the order of their slots
    const Instance& instance = *other->instance;
    if (first + count <= instance.first_slot) break;
    first = instance.first_slot + instance.num_tasks();
  }
  if (count > engine_.region.header->num_slots - first) return;
  recording.instance = std::make_unique<Instance>(engine_, recording, first);
}

/// The slots of freed recordings whose last round has ended. Under recordings_mutex_.
void Recordings::reap() {
  std::erase_if(instantiated_, [&](const auto& recording) {
    return recording->instance->is_freed && recording->instance->is_done(engine_.region.seats_in_use());
  });
}

void Recordings::settle(Handle& handle, uint32_t seat) {
  settle_round(engine_, instance_in(engine_, handle.replayed_by), seat);
}

void Recordings::settle_all(uint32_t seat) {
  std::lock_guard guard(mutex_);
  for (const auto& recording : instantiated_) settle_round(engine_, *recording->instance, seat);
}

void Recordings::inherit(uint32_t slot) { inherit_in_round(engine_, slot); }

const char* Recordings::name_of(uint32_t slot) const { return instance_in(engine_, slot).name_in(slot); }

bool Recordings::has_rounds(uint32_t seat_index) const {
  std::lock_guard guard(mutex_);
  return std::any_of(instantiated_.begin(), instantiated_.end(), [&](const auto& recording) {
    const Instance& instance = *recording->instance;
    return (seat_index == kNone || instance.lane.load(std::memory_order_relaxed) == seat_index) &&
           !instance.is_done(engine_.region.seats_in_use());
  });
}

void Recordings::watch_rounds(uint32_t seat_index) {
  bool is_watched = false;
  {
    std::lock_guard guard(mutex_);
    for (const auto& recording : instantiated_) {
      const Instance& instance = *recording->instance;
      if (instance.lane.load(std::memory_order_relaxed) != seat_index && seat_index != kNone) continue;
      for (const uint32_t sink : instance.sinks) is_watched |= watch(engine_, make_ref(instance.generation, sink));
    }
  }
  // All have ended, but the last of them has yet to say so: it does at once.
  while (!is_watched && has_rounds(seat_index)) sched_yield();
}

std::vector<std::pair<uint64_t, uint64_t>> Recordings::live_rounds() const {
  std::vector<std::pair<uint64_t, uint64_t>> rounds;
  std::lock_guard guard(mutex_);
  for (const auto& recording : instantiated_) {
    const Instance& instance = *recording->instance;
    if (instance.is_done(engine_.region.seats_in_use())) continue;
    rounds.emplace_back(instance.first_sequence, instance.first_sequence + instance.num_tasks() - 1);
  }
  return rounds;
}

bool Recordings::has_live_rounds() const {
  std::lock_guard guard(mutex_);
  for (const auto& recording : instantiated_) {
    const Instance& instance = *recording->instance;
    if (instance.is_done(engine_.region.seats_in_use())) continue;
    for (uint32_t t = 0; t < instance.num_tasks(); ++t) {
      const Slot& task = engine_.region.slots[instance.first_slot + t];
      const bool is_left = !Wake::has_ended(task.wake, instance.generation);
      if (is_left && task.state.load(std::memory_order_acquire) != SlotState::kPending) return true;
    }
  }
  return false;
}

}  // namespace tilewise::tasks
