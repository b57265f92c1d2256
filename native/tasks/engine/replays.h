// The runtime's interface to recordings, open ones and those being replayed. Implemented by replay/.
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

  /// Called when a task has been linked: an open recording of this thread records it. `fresh`: mask of the parameters
  /// whose buffers were made for it.
  virtual void add(uint32_t slot, const pto_task_spec& spec, uint32_t thread, uint32_t fresh) = 0;
  /// Called when a thread has ended; drops its open recording.
  virtual void leave(uint32_t thread) = 0;

  /// For a buffer with kReplayed: records in its state the tasks of the replay that accessed it last. Under the
  /// submission lock.
  virtual void settle(Handle& handle, uint32_t thread) = 0;
  virtual void settle_all(uint32_t thread) = 0;
  /// Called when a task of a replay is about to become ready and some task has failed.
  virtual void inherit(uint32_t slot) = 0;
  virtual const char* name_of(uint32_t slot) const = 0;

  /// Whether replays of this submitter have not ended; kNone: of any submitter.
  virtual bool has_replays(uint32_t thread) const = 0;
  /// Requests a wake-up at the end of these replays.
  virtual void watch_replays(uint32_t thread) = 0;
  /// Whether a task of any replay runs, is ready or will be ended from outside.
  virtual bool has_live_replays() const = 0;
  /// The ranges [first, last] of sequence numbers of replays that have not ended.
  virtual std::vector<std::pair<uint64_t, uint64_t>> live_replays() const = 0;

  std::atomic<bool> has_instantiated{false};  // whether there ever was an instantiated graph
};

}  // namespace tilewise::tasks
