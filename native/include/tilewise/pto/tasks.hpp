/// Submitted tasks of tilewise/pto.hpp: handles, groups, events, and hints for the scheduler.
///
/// Include tilewise/pto.hpp, which says who may call and gives the units. Only functions named wait..., exception and
/// as_completed block; all of these take a timeout. A handle is two words; a group holds handles.
#pragma once
#include <chrono>
#include <cstddef>
#include <deque>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "tilewise/pto/params.hpp"

namespace tilewise::pto {

/// Hints for the scheduler. A hint that cannot be followed is an Error of submit, never silently ignored.
struct TaskExecutionHints {
  int target_node = -1;         // the device; a runtime is device 0, so -1 (any) or 0
  int target_worker = -1;       // the worker that must run it; -1: any of its type
  int32_t priority = 0;         // higher first; 0 is the fast path
  bool prefetch_inputs = true;  // no effect: workers read this device's memory in place
  List<pto_handle> prefetch_handles = {};  // the same for further buffers, which must be alive
};

/// Where and when a task may run, beyond what its data says.
struct TaskOptions {
  pto_worker_type worker_type = PTO_VECTOR;
  List<pto_task> after = {};         // TaskHandle::id() of tasks that end first; completed ones are fine
  List<pto_wait_for> wait_for = {};  // Event::at_least(value); occupies no worker
  pto_handle predicate = 0;          // a buffer that begins with a uint32_t: 0 skips the kernel
  const char* name = nullptr;        // for traces, graphs and errors; copied; below PTO_MAX_NAME bytes
  float deadline_s = 0;              // from now; a task not started by then fails with PTO_TIMEOUT; 0: none
};

namespace detail {

inline void check_hints(PTORuntime* runtime, const TaskExecutionHints& hints) {
  if (hints.target_node < -1 || hints.target_node > 0 || hints.target_worker < -1 || hints.target_worker == INT32_MAX)
      [[unlikely]] {
    refuse(
        "[pto.submit] target_node must be this runtime's device, 0, and target_worker a worker's number; "
        "got another; pass -1 for any, or submit to the other device's runtime");
  }
  for (const pto_handle handle : hints.prefetch_handles) check_id(pto_address(runtime, handle));
}

/// A specification without kernel, parameters and scalars. Always inline, as submit is.
[[gnu::always_inline]] inline pto_task_spec spec_of(const TaskExecutionHints& hints, const TaskOptions& options) {
  pto_task_spec spec{};
  spec.worker_type = options.worker_type;
  spec.after = options.after.data();
  spec.num_after = options.after.size();
  spec.num_waits = options.wait_for.size();
  spec.waits = options.wait_for.data();
  spec.priority = hints.priority;
  spec.target_worker = hints.target_worker + 1;
  spec.predicate = options.predicate;
  spec.flags = PTO_KEEP;  // until the handle is destroyed
  spec.name = options.name;
  spec.deadline_s = options.deadline_s;
  return spec;
}

}  // namespace detail

/// A counter that rises from 0; tasks wait for its values without occupying a worker. Only an id: copied freely, used
/// by any thread and kernel, never blocks.
class Event {
 public:
  Event(PTORuntime* runtime, pto_event event) : runtime_(runtime), event_(event) {}
  void post(uint64_t by = 1) const { detail::check(pto_event_post(runtime_, event_, by)); }
  uint64_t value() const { return pto_event_value(runtime_, event_); }
  /// For TaskOptions::wait_for.
  pto_wait_for at_least(uint64_t value) const { return {event_, value}; }

 private:
  PTORuntime* runtime_;
  pto_event event_;
};

/// A submitted task. Move-only, because it keeps the task's error; several threads may wait on one at once.
///
/// The destructor never blocks or cancels; it only lets the runtime drop the error. If it waited, a dropped result
/// would be a barrier, exceptions would be delayed, and a task whose event is posted later would hang for ever. No wait
/// is needed: the data orders tasks, and a Buffer waits for its own tasks.
class TaskHandle {
 public:
  TaskHandle() = default;
  TaskHandle(PTORuntime* runtime, pto_task task) : runtime_(runtime), task_(task) {}
  TaskHandle(TaskHandle&& other) noexcept : runtime_(other.runtime_), task_(std::exchange(other.task_, 0)) {}
  TaskHandle& operator=(TaskHandle&& other) noexcept {
    if (this == &other) return *this;
    detach();
    runtime_ = other.runtime_;
    task_ = std::exchange(other.task_, 0);
    return *this;
  }
  ~TaskHandle() { detach(); }

  /// Whether it has a task: false if moved from or detached. All calls below except detach need one.
  explicit operator bool() const noexcept { return task_ != 0; }
  /// For TaskOptions::after and the C calls; never reused for another task.
  pto_task id() const {
    if (task_ == 0) {
      detail::refuse(
          "[pto.TaskHandle] a handle must name a task; got one that was moved from, detached or never "
          "submitted; check `if (handle)` first");
    }
    return task_;
  }
  PTORuntime* runtime() const noexcept { return runtime_; }
  /// Whether it has ended, successfully or not. Does not block.
  bool is_complete() const {
    const int answer = pto_is_complete(runtime_, id());
    detail::check(answer);
    return answer != 0;
  }
  /// Waits for this task only. Throws PTO_TASK_FAILED or PTO_CANCELLED if it, or a task that it depends on, did not
  /// succeed; PTO_TIMEOUT if it has not ended. May be called again.
  void wait(double timeout_s = kForever) const {
    if (const std::optional<Error> error = exception(timeout_s)) throw *error;
  }
  /// Waits, then returns why the task did not succeed; nullopt if it did. Throws if it has not ended in time.
  std::optional<Error> exception(double timeout_s = kForever) const {
    return exception_within(timeout_s, timeout_s, "TaskHandle.wait");
  }
  /// PTO_OK also while it runs. Does not block.
  int status() const { return pto_task_status(runtime_, id()); }
  /// Skips the task and those that depend on it if it has not started, also if it waits for an event. A running kernel
  /// can check should_stop().
  void cancel() const { detail::check(pto_cancel(runtime_, id())); }
  /// Detaches from the task, which continues: no call reports its error. Does not block.
  void detach() noexcept {
    if (task_ != 0) pto_task_release(runtime_, std::exchange(task_, 0));
  }

 private:
  friend class TaskGroup;
  /// left_s: the rest of the whole timeout, which error messages give.
  std::optional<Error> exception_within(double left_s, double timeout_s, const char* call) const {
    const int status = pto_wait(runtime_, id(), left_s);
    if (status == PTO_OK) return std::nullopt;
    if (status == PTO_TIMEOUT) detail::raise_timeout(call, timeout_s);
    if (status != PTO_TASK_FAILED && status != PTO_CANCELLED) detail::throw_last();
    char text[1024] = "";
    pto_task_error(runtime_, task_, text, sizeof(text));
    return Error(status, text);
  }
  PTORuntime* runtime_ = nullptr;
  pto_task task_ = 0;
};

/// Tasks of one runtime that are waited for together. Like its handles', its destructor never blocks.
///
/// `for (TaskHandle& task : group)` visits all tasks in order of adding, ended or not. wait_any and as_completed return
/// each task once; wait_all waits for all. One thread at a time. References to its handles stay valid while others are
/// added.
class TaskGroup {
 public:
  TaskGroup() = default;
  TaskGroup(TaskGroup&&) noexcept = default;
  TaskGroup& operator=(TaskGroup&&) noexcept = default;

  TaskHandle& add(TaskHandle task) {
    const pto_task id = task.id();
    if (!tasks_.empty() && tasks_.front().runtime() != task.runtime()) {
      detail::refuse(
          "[pto.TaskGroup.add] a group's tasks must belong to one runtime; got one of another; make a group "
          "for each");
    }
    tasks_.push_back(std::move(task));
    pending_.push_back(id);
    places_.push_back(tasks_.size() - 1);
    return tasks_.back();
  }
  size_t size() const noexcept { return tasks_.size(); }
  bool empty() const noexcept { return tasks_.empty(); }
  /// In order of adding.
  TaskHandle& operator[](size_t place) { return tasks_[place]; }

  /// Waits for all, then throws the first failure in order of adding. `timeout_s` is for all together.
  void wait_all(double timeout_s = kForever) const {
    const detail::Deadline deadline(timeout_s);
    std::optional<Error> first;
    for (const TaskHandle& task : tasks_) {
      std::optional<Error> error = task.exception_within(deadline.left_s(), timeout_s, "TaskGroup.wait_all");
      if (error && !first) first = std::move(error);
    }
    if (first) throw *first;
  }
  /// The index of the next task that has ended, successfully or not. Throws if all were returned, or none ended in
  /// time.
  size_t wait_any(double timeout_s = kForever) { return next(timeout_s, timeout_s, "TaskGroup.wait_any"); }
  /// Skips every task that has not started.
  void cancel() const {
    for (const TaskHandle& task : tasks_) task.cancel();
  }

  class Iterator;
  class AsCompleted;
  /// The tasks not yet returned, as they end; `timeout_s` is for all together; throws when it has passed.
  AsCompleted as_completed(double timeout_s = kForever);
  /// In order of adding.
  std::deque<TaskHandle>::iterator begin() { return tasks_.begin(); }
  std::deque<TaskHandle>::iterator end() { return tasks_.end(); }

 private:
  /// wait_any with the rest of the whole timeout.
  size_t next(double left_s, double timeout_s, const char* call) {
    if (pending_.empty()) {
      detail::refuse(
          "[pto.TaskGroup.wait_any] a task must be left to wait for; got a group whose tasks have all "
          "been returned; add one");
    }
    constexpr uint32_t kNone = UINT32_MAX;
    uint32_t index = kNone;
    const int status =
        pto_wait_any(tasks_.front().runtime(), pending_.data(), static_cast<uint32_t>(pending_.size()), left_s, &index);
    if (index == kNone && status == PTO_TIMEOUT) detail::raise_timeout(call, timeout_s);
    if (index == kNone) detail::throw_last();
    const size_t place = places_[index];
    pending_.erase(pending_.begin() + index);
    places_.erase(places_.begin() + index);
    return place;
  }
  std::deque<TaskHandle> tasks_;
  std::vector<pto_task> pending_;  // not yet returned, in order of adding
  std::vector<size_t> places_;     // their indices in tasks_
};

/// Waits in its constructor and in ++.
class TaskGroup::Iterator {
 public:
  using value_type = TaskHandle;
  using difference_type = std::ptrdiff_t;
  Iterator(TaskGroup* group, const detail::Deadline& deadline) : group_(group), deadline_(deadline) { ++*this; }
  TaskHandle& operator*() const { return group_->tasks_[place_]; }
  Iterator& operator++() {
    is_done_ = group_->pending_.empty();
    if (!is_done_) place_ = group_->next(deadline_.left_s(), deadline_.timeout_s(), "TaskGroup.as_completed");
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return is_done_; }

 private:
  TaskGroup* group_;
  detail::Deadline deadline_;
  size_t place_ = 0;
  bool is_done_ = false;
};

class TaskGroup::AsCompleted {
 public:
  AsCompleted(TaskGroup* group, double timeout_s) : group_(group), deadline_(timeout_s) {}
  Iterator begin() const { return {group_, deadline_}; }
  std::default_sentinel_t end() const { return {}; }

 private:
  TaskGroup* group_;
  detail::Deadline deadline_;
};

inline TaskGroup::AsCompleted TaskGroup::as_completed(double timeout_s) { return {this, timeout_s}; }

}  // namespace tilewise::pto
