// A task engine inside other native code, which submits from its own workers and runs its own task bodies.
//
// Purpose: the planner's tile programs order and run their tasks with it; see programs/device.h. A Host provides the
// bodies, and submits more tasks when few are ready; there is no thread for submitting alone. An object is what tasks
// read and write, known here only by a number. The engine does not have the other parts of a stand-alone engine:
// kernels by name, registered buffers, a heap, scopes and failures, which the host handles itself. Who may call:
// take_task and submit: one worker at a time, inside Host::submit_more; resume, queries and close: any thread. Blocks:
// worker_loop sleeps while there is nothing to do. Memory order: a task's writes are visible to its successors. Memory:
// an engine's store, and the states of the objects, which tasks name by index.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "tasks/engine/host.h"
#include "tasks/regions/access.h"

namespace tilewise::tasks {

struct Engine;

/// kAfterAll: the task waits for all readers and writers of the object, but later tasks do not wait for this use. It is
/// for a task that reuses the object's memory for another object.
enum class Use : uint8_t { kRead, kWrite, kAfterAll };

struct Access {
  uint32_t object;
  Use use;
};

/// Which worker runs a task: any (0), or 1 + the worker's number. A preferred worker gets the task first, and a worker
/// that has been idle for some microseconds may take it instead.
struct Target {
  uint32_t worker = 0;
  bool is_preference = false;
};

/// One task in a timeline; times in ns of CLOCK_MONOTONIC. If the host executed it several times: of the last time.
struct TimelineRecord {
  int64_t worker;
  int64_t label;
  int64_t row_begin;
  int64_t submit_ns;
  int64_t ready_ns;
  int64_t start_ns;
  int64_t end_ns;
  int64_t priority;
  int64_t target;  // 1 + the worker that it was for; negative: a preference; 0: any worker
};

class __attribute__((visibility("default"))) Embedded {
 public:
  static constexpr uint32_t kMaxWorkers = 255;
  static constexpr uint32_t kMaxWindow = 4096;  // every task may wait for all others

  /// window: tasks between submission and completion; rounded up to a power of two.
  Embedded(Host& host, uint32_t num_workers, uint32_t window, uint32_t num_objects);
  ~Embedded();
  Embedded(const Embedded&) = delete;
  Embedded& operator=(const Embedded&) = delete;

  uint32_t window() const { return window_; }
  /// Bytes that an engine of this size reserves; pages that no task touches use no memory.
  static uint64_t bytes_needed(uint32_t num_workers, uint32_t window, uint32_t num_objects);
  /// Bytes that this engine has reserved.
  uint64_t bytes() const;

  /// The number of an unused task, less than window(); kNone if all are in use.
  uint32_t take_task();
  /// Orders a taken task after earlier tasks that use the same objects. Among ready tasks with a priority above 0, the
  /// highest priority starts first, and the oldest among equals. So devices that exchange data stay at about the same
  /// place of their programs. Then come tasks of priority 0; the worker that made one ready usually runs it next. Tasks
  /// below 0 come last.
  /// `worker` is the caller; `target` must be a worker of this engine.
  void submit(uint32_t task, const std::vector<Access>& accesses, int32_t priority, uint32_t worker,
              Target target = {});
  /// Makes a task ready that the host did not admit when its dependencies had completed, or did not complete when it
  /// executed it.
  void resume(uint32_t task);

  void worker_loop(uint32_t worker);
  /// Wakes all workers, after another thread has made the host's has_more() true.
  void wake_all();
  /// Lets the workers leave their loops; tasks that have not started never will.
  void close();

  /// Records the tasks from now on, the last max_records of each worker. 0 stops recording and drops the records. May
  /// be called only while nothing runs, like timeline and timeline_dropped.
  void trace(uint32_t max_records);
  std::vector<TimelineRecord> timeline() const;
  int64_t timeline_dropped() const;

  /// About how many tasks this worker could start at once.
  uint64_t num_ready(uint32_t worker) const;
  uint64_t num_completed() const;
  bool is_live(uint32_t task) const;
  uint64_t sequence(uint32_t task) const;  // of a live task: order of submission

 private:
  struct Objects;

  Host& host_;
  uint32_t window_;
  uint32_t first_slot_;
  int32_t kernel_ = 0;
  std::unique_ptr<Engine, void (*)(Engine*)> engine_;
  std::unique_ptr<Objects> objects_;
};

}  // namespace tilewise::tasks
