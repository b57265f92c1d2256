// One worker of a device: its scratch memory, its current activity, and running a task's kernel.
//
// Who may call: run_kernel and stall: the thread that is this worker; status: any thread. Blocks: for the kernel.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "memory/arena.h"
#include "programs/run/errors.h"
#include "programs/run/run_state.h"
#include "programs/run/task.h"

namespace tilewise::programs {

/// What a worker does now, for the report of a deadline.
struct WorkerStatus {
  const BoundInstr* instr;  // nullptr: idle
  int64_t index;
  int64_t since_ns;
  bool stalled;
};

/// The error of a task that has failed with `error`; worker -1: during its transfer.
TaskFailed failure_of(const Task& task, const std::string& label, int64_t device, int64_t worker,
                      const std::exception_ptr& error);

class alignas(128) Worker {
 public:
  Worker(int64_t number, int64_t scratch_bytes) : number_(number), scratch_(scratch_bytes) {}

  /// Sets the task that status() reports until end().
  void begin(const Task& task);
  void end() { instr_.store(nullptr, std::memory_order_relaxed); }
  /// Returns the poison for what depends on the task: 0, or the id of its error.
  uint64_t run_kernel(Task& task, const std::string& label, int64_t device, RunState& state);
  /// A planted fault: this worker does nothing until the run has failed.
  void stall(const RunState& state);

  WorkerStatus status() const;
  int64_t bytes() const { return scratch_.bytes() + static_cast<int64_t>(sizeof(Worker)); }

 private:
  const int64_t number_;
  memory::Arena scratch_;
  std::atomic<const BoundInstr*> instr_{nullptr};
  std::atomic<int64_t> index_{0};
  std::atomic<int64_t> since_ns_{0};
  std::atomic<bool> stalled_{false};
};

}  // namespace tilewise::programs
