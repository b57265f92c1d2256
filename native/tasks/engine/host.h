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
  /// Submits more tasks if there are any, there is room and few are ready. True when it did, or could have.
  virtual bool submit_more(uint32_t worker) = 0;
  /// A worker about to sleep asks: submit_more would find something to do.
  virtual bool has_more() const = 0;
  /// Every producer of the task has completed. False: it waits for something else; the thread that brings that about
  /// calls Embedded::resume (perhaps before this call has returned, so nothing of the task may be touched after it was
  /// registered).
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
