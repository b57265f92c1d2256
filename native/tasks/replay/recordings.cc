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
  instantiate(*recording);
  if (recording->graph != nullptr) {
    const auto is_before = [](const auto& one, const auto& two) {
      return one->graph->first_slot < two->graph->first_slot;
    };
    has_instantiated.store(true, std::memory_order_relaxed);
    instantiated_.insert(std::upper_bound(instantiated_.begin(), instantiated_.end(), recording, is_before), recording);
  }
  const pto_recording name = next_++;
  all_[name] = std::move(recording);
  return name;
}

// Running tasks of the recording continue; its graph is freed when they have ended.
void Recordings::free(pto_recording name) {
  const uint32_t thread = current_thread(engine_);
  if (running.engine == &engine_) {  // a replay may keep the submission lock until this task has ended
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.recording_free] a recording must be freed outside tasks; got a call inside one");
  }
  const SubmitGuard submit_guard(*engine_.store.header, thread, engine_.fences);
  std::shared_ptr<Recording> recording;
  {
    std::lock_guard guard(mutex_);
    const auto entry = all_.find(name);
    if (entry == all_.end()) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.recording_free] a recording must exist; got ", name, "; free it once");
    }
    recording = std::move(entry->second);
    all_.erase(entry);
  }
  if (recording->graph == nullptr) return;
  settle_replay(engine_, *recording->graph, thread);
  std::lock_guard guard(mutex_);
  recording->graph->is_freed = true;
  reap();
}

void Recordings::replay(pto_recording name, const pto_handle* from, const pto_handle* to, uint32_t num_handles) {
  const uint32_t thread = current_thread(engine_);
  if (running.engine == &engine_) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.replay] a recording must be replayed outside tasks; got a call inside one");
  }
  std::shared_ptr<Recording> recording;
  {
    std::lock_guard guard(mutex_);
    const auto entry = all_.find(name);
    if (entry == all_.end()) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.replay] a recording must exist; got ", name, "; record it first");
    }
    recording = entry->second;
  }
  Blocking let_others_run;
  const DefaultFloatModes modes;
  if (recording->graph != nullptr && replay_graph(engine_, *recording, from, to, num_handles, thread)) return;
  std::vector<pto_handle> names;
  {
    const SubmitGuard guard(*engine_.store.header, thread, engine_.fences);  // protects the recording's last binding
    names = bind_recording(engine_, *recording, from, to, num_handles);
  }
  submit_recording(engine_, *recording, std::move(names), thread);
}

void Recordings::add(uint32_t slot, const pto_task_spec& spec, uint32_t thread, uint32_t fresh) {
  if (open_[thread] == nullptr) return;
  try {
    open_[thread]->add(engine_.store, slot, spec, fresh);
  } catch (...) {  // the recording is incomplete
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

// Instantiates the recording if all its tasks are plain and there is room. Otherwise replays submit it task by task.
void Recordings::instantiate(Recording& recording) {
  const auto count = static_cast<uint32_t>(recording.tasks.size());
  const bool is_plain =
      std::all_of(recording.tasks.begin(), recording.tasks.end(), [](const auto& task) { return task.is_plain; });
  if (count == 0 || !is_plain) return;
  reap();
  uint32_t first = engine_.store.header->num_slots - engine_.store.header->num_replayable;
  for (const auto& other : instantiated_) {  // in the order of their slots
    const InstantiatedGraph& graph = *other->graph;
    if (first + count <= graph.first_slot) break;
    first = graph.first_slot + graph.num_tasks();
  }
  if (count > engine_.store.header->num_slots - first) return;
  recording.graph = std::make_unique<InstantiatedGraph>(engine_, recording, first);
}

/// Frees the graphs of freed recordings whose last replay has ended. Under mutex_.
void Recordings::reap() {
  std::erase_if(instantiated_, [&](const auto& recording) {
    return recording->graph->is_freed && recording->graph->is_done(engine_.store.threads_in_use());
  });
}

void Recordings::settle(Handle& handle, uint32_t thread) {
  settle_replay(engine_, graph_of(engine_, handle.replayed_by), thread);
}

void Recordings::settle_all(uint32_t thread) {
  std::lock_guard guard(mutex_);
  for (const auto& recording : instantiated_) settle_replay(engine_, *recording->graph, thread);
}

void Recordings::inherit(uint32_t slot) { inherit_in_replay(engine_, slot); }

const char* Recordings::name_of(uint32_t slot) const { return graph_of(engine_, slot).name_in(slot); }

bool Recordings::has_replays(uint32_t thread) const {
  std::lock_guard guard(mutex_);
  return std::any_of(instantiated_.begin(), instantiated_.end(), [&](const auto& recording) {
    const InstantiatedGraph& graph = *recording->graph;
    return (thread == kNone || graph.submitter.load(std::memory_order_relaxed) == thread) &&
           !graph.is_done(engine_.store.threads_in_use());
  });
}

void Recordings::watch_replays(uint32_t thread) {
  bool is_watched = false;
  {
    std::lock_guard guard(mutex_);
    for (const auto& recording : instantiated_) {
      const InstantiatedGraph& graph = *recording->graph;
      if (graph.submitter.load(std::memory_order_relaxed) != thread && thread != kNone) continue;
      for (const uint32_t sink : graph.sinks) is_watched |= watch(engine_, make_ref(graph.generation, sink));
    }
  }
  // All tasks have ended, but the last of them has not counted itself yet; it will at once.
  while (!is_watched && has_replays(thread)) sched_yield();
}

std::vector<std::pair<uint64_t, uint64_t>> Recordings::live_replays() const {
  std::vector<std::pair<uint64_t, uint64_t>> replays;
  std::lock_guard guard(mutex_);
  for (const auto& recording : instantiated_) {
    const InstantiatedGraph& graph = *recording->graph;
    if (graph.is_done(engine_.store.threads_in_use())) continue;
    replays.emplace_back(graph.first_sequence, graph.first_sequence + graph.num_tasks() - 1);
  }
  return replays;
}

bool Recordings::has_live_replays() const {
  std::lock_guard guard(mutex_);
  for (const auto& recording : instantiated_) {
    const InstantiatedGraph& graph = *recording->graph;
    if (graph.is_done(engine_.store.threads_in_use())) continue;
    for (uint32_t t = 0; t < graph.num_tasks(); ++t) {
      const Slot& task = engine_.store.slots[graph.first_slot + t];
      const bool is_left = !TaskWord::has_ended(task.word, graph.generation);
      if (is_left && task.state.load(std::memory_order_acquire) != SlotState::kPending) return true;
    }
  }
  return false;
}

}  // namespace tilewise::tasks
