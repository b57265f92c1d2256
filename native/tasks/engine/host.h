// The interface of the code that contains an embedded engine. See embed/embedded.h.
//
// Who may call: the engine's workers; admit also threads that post what a task waits for.
#pragma once
#include <cstdint>

namespace tilewise::tasks {

/// What a trace says of a task besides its times.
struct TraceLabel {
  int32_t label;
  int64_t row_begin;
};

class Host {
 public:
  /// Submits more tasks if there are any, there is room and few are ready. False: all are submitted, or enough are
  /// ready. True: call it again; this call or another worker's submits some.
  virtual bool submit_more(uint32_t worker) = 0;
  /// Whether tasks are left to submit; called by a worker that is about to sleep.
  virtual bool has_more() const = 0;
  /// Called when every producer of the task has completed. True: the task may start. False: the host has registered it
  /// to wait for something else, such as a signal; the thread that completes this wait calls Embedded::resume, perhaps
  /// before admit has returned. So admit must not touch the task after registering it.
  virtual bool admit(uint32_t task) = 0;
  virtual void execute(uint32_t task, uint32_t worker) = 0;
  /// While tracing, after execute.
  virtual TraceLabel label_of(uint32_t task) const = 0;
  /// The task's successors have been notified and its place is free.
  virtual void completed() = 0;
  /// A worker begins, or goes on after sleep: it will call submit_more between any two tasks.
  virtual void stay() {}
  /// It is about to sleep, or to end. False: something has come, and it stays.
  virtual bool leave() { return true; }

 protected:
  ~Host() = default;
};

}  // namespace tilewise::tasks
