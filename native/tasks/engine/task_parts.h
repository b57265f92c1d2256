// The parts of a task that submitted tasks and replayed tasks store in different places.
//
// Who may call: see the fields in store/slots.h.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

inline uint32_t submitter_of(const Engine& engine, uint32_t slot) {
  const Slot& task = engine.store.slots[slot];
  return (task.flags & kIsReplayed) == 0 ? engine.store.submitter_of(slot)
                                         : task.replayed.replay->submitter.load(std::memory_order_relaxed);
}

/// The task's place in the order of submission.
inline uint64_t sequence_of(const Engine& engine, uint32_t slot) {
  const Slot& task = engine.store.slots[slot];
  if ((task.flags & kIsReplayed) == 0) return task.sequence.load(std::memory_order_relaxed);
  const GraphReplay& replay = *task.replayed.replay;
  return replay.first_sequence + (slot - replay.first_slot);
}

inline uint64_t& ready_ticks_of(Engine& engine, uint32_t slot) {
  Slot& task = engine.store.slots[slot];
  return (task.flags & kIsReplayed) != 0 ? task.replayed.ready_ticks : engine.store.args[slot].ready_ticks;
}

/// The status of a task that is ended from outside or waits for its children.
inline int32_t& status_of(Engine& engine, uint32_t slot) {
  Slot& task = engine.store.slots[slot];
  return (task.flags & kIsReplayed) != 0 ? task.replayed.status : engine.store.args[slot].status;
}

/// The name that its submitter gave it; "" for most tasks.
inline const char* task_name(const Engine& engine, uint32_t slot) {
  const Slot& task = engine.store.slots[slot];
  if ((task.flags & kIsReplayed) != 0) return engine.replays->name_of(slot);
  return (task.flags & kHasName) != 0 ? engine.store.notes[slot].name : "";
}

inline bool is_leaf(const Slot& task) { return (task.flags & kIsParent) == 0; }

}  // namespace tilewise::tasks
