// What the runtime needs of recordings: the open ones, and those being replayed. Implemented by replay/.
//
// Purpose: submitting, waiting and failing only know that a task may belong to a replay. Who may call: see each
// function; `thread` is the calling thread's.
#pragma once
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "tasks/store/layout.h"

namespace tilewise::tasks {

class Replays {
 public:
  virtual ~Replays() = default;

  /// A task has just been linked: an open recording of this thread takes it down. `fresh`: mask of the parameters whose
  /// buffers were made for it.
  virtual void add(uint32_t slot, const pto_task_spec& spec, uint32_t thread, uint32_t fresh) = 0;
  /// A thread has ended; its open recording ends with it.
  virtual void leave(uint32_t thread) = 0;

  /// A buffer carries kReplayed: leaves in it, by name, the tasks of the replay that accessed it last. Under the
  /// submission lock.
  virtual void settle(Handle& handle, uint32_t thread) = 0;
  virtual void settle_all(uint32_t thread) = 0;
  /// A task of a replay is about to become ready after something has failed.
  virtual void inherit(uint32_t slot) = 0;
  virtual const char* name_of(uint32_t slot) const = 0;

  /// Replays that a submitter has begun and that have not ended; of any submitter with kNone.
  virtual bool has_replays(uint32_t thread) const = 0;
  /// Asks for a wake-up at their end.
  virtual void watch_replays(uint32_t thread) = 0;
  /// Whether a task of some replay runs, is ready or is ended from outside.
  virtual bool has_live_replays() const = 0;
  /// Sequence numbers, first to last, of the replays that have not ended.
  virtual std::vector<std::pair<uint64_t, uint64_t>> live_replays() const = 0;

  std::atomic<bool> has_kept{false};  // ever
};

}  // namespace tilewise::tasks
