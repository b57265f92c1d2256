// See recordings.h.
#include "tasks/replay/recordings.h"

#include <algorithm>

#include "tasks/engine/thread_slots.h"
#include "tasks/replay/graph_replays.h"
#include "tasks/replay/replay.h"
#include "tasks/sched/float_modes.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/wait/wait.h"

namespace tilewise::tasks {

Recordings::Recordings(Engine& engine) : engine_(engine), open_(engine.store.header->num_thread_slots) {}

void Recordings::begin() {
  const uint32_t thread = current_thread(engine_);
  if (open_[thread] != nullptr) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.record_begin] one recording at a time per thread; got a second; end the first");
  }
  open_[thread] = std::make_unique<Recording>(engine_.store);
  engine_.num_observers.fetch_add(1);
}

pto_recording Recordings::end() {
  const uint32_t thread = current_thread(engine_);
  if (open_[thread] == nullptr) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.record_end] a recording must be open; got none; call pto_record_begin first");
  }
  std::shared_ptr<Recording> recording = std::move(open_[thread]);
  engine_.num_observers.fetch_sub(1);
  std::lock_guard guard(mutex_);
  keep(*recording);
  if (recording->kept != nullptr) {
    const auto is_before = [](const auto& one, const auto& two) {
      return one->kept->first_slot < two->kept->first_slot;
    };
    has_kept.store(true, std::memory_order_relaxed);
    kept_.insert(std::upper_bound(kept_.begin(), kept_.end(), recording, is_before), recording);
  }
  const pto_recording name = next_++;
  all_[name] = std::move(recording);
  return name;
}

// Its tasks go on: what they need of it stays until they have ended.
void Recordings::free(pto_recording name) {
  const uint32_t thread = current_thread(engine_);
  if (running.engine == &engine_) {  // a replay may hold the submission lock until this very task has ended
    throw_error(PTO_BAD_ARGUMENT, "[runtime.recording_free] a recording is freed outside tasks; got a call inside one");
  }
  const SubmitGuard submit_guard(*engine_.store.header, thread, engine_.fences);
  std::shared_ptr<Recording> recording;
  {
    std::lock_guard guard(mutex_);
    const auto found = all_.find(name);
    if (found == all_.end()) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.recording_free] a recording must exist; got ", name, "; free it once");
    }
    recording = std::move(found->second);
    all_.erase(found);
  }
  if (recording->kept == nullptr) return;
  settle_replay(engine_, *recording->kept, thread);
  std::lock_guard guard(mutex_);
  recording->kept->is_freed = true;
  reap();
}

void Recordings::replay(pto_recording name, const pto_handle* from, const pto_handle* to, uint32_t num_handles) {
  const uint32_t thread = current_thread(engine_);
  if (running.engine == &engine_) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.replay] a recording is replayed outside tasks; got a call inside one");
  }
  std::shared_ptr<Recording> recording;
  {
    std::lock_guard guard(mutex_);
    const auto found = all_.find(name);
    if (found == all_.end()) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.replay] a recording must exist; got ", name, "; record it first");
    }
    recording = found->second;
  }
  Blocking let_others_run;
  const DefaultFloatModes modes;
  if (recording->kept != nullptr && replay_graph(engine_, *recording, from, to, num_handles, thread)) return;
  std::vector<pto_handle> names;
  {
    const SubmitGuard guard(*engine_.store.header, thread, engine_.fences);  // of what the recording remembers
    names = bind_recording(engine_, *recording, from, to, num_handles);
  }
  submit_recording(engine_, *recording, std::move(names), thread);
}

void Recordings::add(uint32_t slot, const pto_task_spec& spec, uint32_t thread, uint32_t fresh) {
  if (open_[thread] == nullptr) return;
  try {
    open_[thread]->add(engine_.store, slot, spec, fresh);
  } catch (...) {  // half of the task is no recording
    leave(thread);
    throw;
  }
}

void Recordings::leave(uint32_t thread) {
  if (open_[thread] == nullptr) return;
  open_[thread] = nullptr;
  engine_.num_observers.fetch_sub(1);
}

// GraphReplays.

// Room for it, if its tasks are all plain: else it is submitted task by task whenever it is replayed.
void Recordings::keep(Recording& recording) {
  const auto count = static_cast<uint32_t>(recording.tasks.size());
  const bool is_plain =
      std::all_of(recording.tasks.begin(), recording.tasks.end(), [](const auto& task) { return task.is_plain; });
  if (count == 0 || !is_plain) return;
  reap();
  uint32_t first = engine_.store.header->num_slots - engine_.store.header->num_replayable;
  for (const auto& other : kept_) {  // in the order of their slots
    const InstantiatedGraph& kept = *other->kept;
    if (first + count <= kept.first_slot) break;
    first = kept.first_slot + kept.num_tasks();
  }
  if (count > engine_.store.header->num_slots - first) return;
  recording.kept = std::make_unique<InstantiatedGraph>(engine_, recording, first);
}

/// The slots of freed recordings whose last replay has ended. Under recordings_mutex_.
void Recordings::reap() {
  std::erase_if(kept_, [&](const auto& recording) {
    return recording->kept->is_freed && recording->kept->is_done(engine_.store.threads_in_use());
  });
}

void Recordings::settle(Handle& handle, uint32_t thread) {
  settle_replay(engine_, kept_in(engine_, handle.replayed_by), thread);
}

void Recordings::settle_all(uint32_t thread) {
  std::lock_guard guard(mutex_);
  for (const auto& recording : kept_) settle_replay(engine_, *recording->kept, thread);
}

void Recordings::inherit(uint32_t slot) { inherit_in_replay(engine_, slot); }

const char* Recordings::name_of(uint32_t slot) const { return kept_in(engine_, slot).name_in(slot); }

bool Recordings::has_replays(uint32_t thread) const {
  std::lock_guard guard(mutex_);
  return std::any_of(kept_.begin(), kept_.end(), [&](const auto& recording) {
    const InstantiatedGraph& kept = *recording->kept;
    return (thread == kNone || kept.submitter.load(std::memory_order_relaxed) == thread) &&
           !kept.is_done(engine_.store.threads_in_use());
  });
}

void Recordings::watch_replays(uint32_t thread) {
  bool is_watched = false;
  {
    std::lock_guard guard(mutex_);
    for (const auto& recording : kept_) {
      const InstantiatedGraph& kept = *recording->kept;
      if (kept.submitter.load(std::memory_order_relaxed) != thread && thread != kNone) continue;
      for (const uint32_t sink : kept.sinks) is_watched |= watch(engine_, make_ref(kept.generation, sink));
    }
  }
  // All have ended, but the last of them has yet to say so: it does at once.
  while (!is_watched && has_replays(thread)) sched_yield();
}

std::vector<std::pair<uint64_t, uint64_t>> Recordings::live_replays() const {
  std::vector<std::pair<uint64_t, uint64_t>> replays;
  std::lock_guard guard(mutex_);
  for (const auto& recording : kept_) {
    const InstantiatedGraph& kept = *recording->kept;
    if (kept.is_done(engine_.store.threads_in_use())) continue;
    replays.emplace_back(kept.first_sequence, kept.first_sequence + kept.num_tasks() - 1);
  }
  return replays;
}

bool Recordings::has_live_replays() const {
  std::lock_guard guard(mutex_);
  for (const auto& recording : kept_) {
    const InstantiatedGraph& kept = *recording->kept;
    if (kept.is_done(engine_.store.threads_in_use())) continue;
    for (uint32_t t = 0; t < kept.num_tasks(); ++t) {
      const Slot& task = engine_.store.slots[kept.first_slot + t];
      const bool is_left = !TaskWord::has_ended(task.word, kept.generation);
      if (is_left && task.state.load(std::memory_order_acquire) != SlotState::kPending) return true;
    }
  }
  return false;
}

}  // namespace tilewise::tasks
