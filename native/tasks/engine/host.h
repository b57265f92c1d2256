// The interface of the code that contains an embedded engine. See embed/embedded.h.
//
// Who may call: the engine's workers; admit also threads that post what a task waits for.
#pragma once
#include <cstdint>

namespace tilewise::tasks {

/// The identification of a task in a trace.
struct TraceLabel {
  int32_t label;
  int64_t row_begin;
};

class Host {
 public:
  /// Submits more tasks if there are any, there is room and few are ready. Returns whether it did or could have.
  virtual bool submit_more(uint32_t worker) = 0;
  /// Whether submit_more would submit; checked by a worker that is about to sleep.
  virtual bool has_more() const = 0;
  /// Called when every producer of the task has completed. Returns false if the task waits for something else. Then the
  /// thread that ends this wait calls Embedded::resume, possibly before this call has returned, so the task must not be
  /// accessed after it was registered.
  virtual bool admit(uint32_t task) = 0;
  /// Returns false if the task is not complete: some thread calls Embedded::resume, possibly before this call has
  /// returned, and a worker executes the task once more.
  virtual bool execute(uint32_t task, uint32_t worker) = 0;
  /// Called while tracing, after execute.
  virtual TraceLabel label_of(uint32_t task) const = 0;
  /// Called when the task's successors have been notified and its place is free.
  virtual void completed() = 0;
  /// Called when a worker starts or wakes: it will call submit_more between any two tasks.
  virtual void stay() {}
  /// Called when a worker is about to sleep or end. Returns false if something has arrived and it must stay awake.
  virtual bool leave() { return true; }

 protected:
  ~Host() = default;
};

}  // namespace tilewise::tasks
