// One device: its scheduler, walker, signals and arena, and the loop its workers run.
//
// Purpose: workers take tasks, run kernels, raise signals, complete; an idle worker spins briefly, yields for a
// millisecond, then sleeps. Who may call: begin() by the executor between runs; worker_loop by its threads;
// signal_raised by any device's worker; statuses by anyone. Memory order: a task's writes reach its successors
// through the scheduler's lock, and peers through the signal's.
//
// Sleeping loses no wake-up: a worker counts itself into parked_ BEFORE it looks at the scheduler's work() for the
// last time, and who makes work looks at parked_ AFTER it has published the work; both are sequentially consistent,
// so one of the two sees the other. Both then meet under park_mutex_. runtime/protocol_model_test.cc walks it.
//
// After the first failure of a run (or a cancel, or a deadline) every task that has not started is skipped on every
// device, related or not: the step is lost anyway. Skipped tasks still raise their signals, poison word first.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "rings/record_ring.h"
#include "runtime/core.h"
#include "runtime/scheduler.h"
#include "runtime/walker.h"

namespace tilewise::runtime {

/// One task in a timeline; times in ns of the steady clock.
struct TimelineRecord {
  int64_t label;
  int64_t row_begin;
  int64_t submit_ns;
  int64_t ready_ns;
  int64_t start_ns;
  int64_t end_ns;
};

/// What a worker does now, for the report of a deadline.
struct WorkerStatus {
  const Instr* instr;  // nullptr: idle
  int64_t index;
  int64_t since_ns;
  bool stalled;
};

struct DeviceOptions {
  int64_t index = 0;
  int64_t num_workers = 1;
  int64_t arena_bytes = 0;
  int64_t num_signals = 0;
  int64_t num_handles = 0;
  int64_t window = 512;
};

/// Everything of one run that a device reads.
struct RunContext {
  const Program* program = nullptr;
  const std::vector<int64_t>* symbols = nullptr;
  const std::vector<std::byte*>* arenas = nullptr;
  const std::vector<std::unique_ptr<Device>>* devices = nullptr;
  bool tracing = false;
};

class Device {
 public:
  Device(std::shared_ptr<Core> core, const DeviceOptions& options);

  void begin(const RunContext& run, std::vector<Injection> injections);
  /// After a run that failed: nothing of it may reach the next.
  void clear_poison();
  /// Wakes workers for the run; after begin() of every device.
  void start();
  void worker_loop(int64_t worker);
  void wake_all();
  /// A signal that `slot` waited for came. Called by the raising device's worker.
  void signal_raised(int32_t slot, uint64_t poison);

  const DeviceOptions& options() const { return options_; }
  const std::shared_ptr<memory::Arena>& arena() const { return arena_; }
  comm::SignalBoard& signals() { return signals_; }
  Scheduler& scheduler() { return scheduler_; }
  int64_t num_completed() const { return completed_.load(std::memory_order_relaxed); }
  WorkerStatus status(int64_t worker) const;
  int64_t transfers(int64_t label) const { return transfers_[label].load(std::memory_order_relaxed); }
  void enable_trace(bool enable);
  const rings::RecordRing<TimelineRecord>& timeline(int64_t worker) const { return workers_[worker]->timeline; }

 private:
  struct alignas(128) Worker {
    memory::Arena scratch{kernels::kScratchBytes};
    rings::RecordRing<TimelineRecord> timeline;
    std::atomic<const Instr*> instr{nullptr};
    std::atomic<int64_t> index{0};
    std::atomic<int64_t> since_ns{0};
    std::atomic<bool> stalled{false};
  };

  void walk();
  void submit(int32_t slot);
  void execute(Worker& worker, int64_t number, int32_t slot);
  uint64_t run_kernel(Worker& worker, int64_t number, Task& task);
  void stall(Worker& worker);
  void raise_signals(const Task& task, uint64_t poison);
  void idle(int64_t* rounds, int64_t* since_ns);
  void park();
  void wake_one();

  std::shared_ptr<Core> core_;
  DeviceOptions options_;
  std::shared_ptr<memory::Arena> arena_;  // outlives the device while Python holds a view of it
  comm::SignalBoard signals_;
  Scheduler scheduler_;
  Walker walker_;
  std::vector<Access> accesses_;  // of the walking worker
  RunContext run_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::atomic<int64_t>> transfers_;  // elements per label of this run
  alignas(128) std::atomic<int64_t> completed_{0};
  alignas(128) std::atomic<int64_t> parked_{0};
  std::mutex park_mutex_;
  std::condition_variable unparked_;
};

}  // namespace tilewise::runtime
