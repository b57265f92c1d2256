// One device: a task engine whose host it is, the walker, signals and arena.
//
// Purpose: the engine's workers call it for tasks to submit, for tasks to admit (their signals have come) and for
// bodies to run: kernel, then signals, then completion. Who may call: begin() and start() by the executor between runs;
// worker_loop by its threads; signal_posted by any device's worker; statuses by anyone. Memory order: a task's writes
// reach its successors through the engine, and peers through the signal's lock; the walker passes from worker to worker
// through walk_.
//
// The walker is advanced when few tasks are ready and an eighth of the window is free (so that looking for free places
// costs little a task). Whatever makes that true is done by a worker, which looks again before it sleeps; only start()
// is not, and wakes all.
//
// A task that moves tiles between memory and the file is handed to the queue of transfers where others would start; the
// end of its transfer lets it start, with nothing left to do. So it waits as it waits for signals: it holds no worker.
//
// A task that reads tiles of a remote device asks for them there, too, and is told when they have come.
//
// A task asks for its signals one after the other once its producers have completed: it stands in one signal's list at
// a time, and the thread that posts that one goes on asking (protocols/counter.h). So exactly one thread at a time has
// the task, and no count of open waits is needed.
//
// After the first failure of a run (or a cancel, or a deadline) every task that has not started is skipped on every
// device, related or not: the step is lost anyway. So the engine never hears of failures: that an error reaches what
// stands behind it follows. Skipped tasks still post their signals, poison word first.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "programs/remote/remote_memory.h"
#include "programs/run/run_state.h"
#include "programs/run/walker.h"
#include "programs/run/worker.h"
#include "protocols/walk.h"
#include "tasks/embed/embedded.h"

namespace tilewise::programs {

/// A task that waits for a signal, as the deadline's report needs it.
struct BlockedWait {
  uint64_t sequence;
  const BoundInstr* instr;
  int64_t index;
  int64_t signal;
  uint64_t expected;
};

struct DeviceOptions {
  int64_t index = 0;
  int64_t num_workers = 1;
  int64_t arena_bytes = 0;
  int64_t num_signals = 0;
  int64_t num_handles = 0;
  int64_t window = 512;
  int64_t scratch_bytes = kernels::kScratchBytes;  // per worker
  int64_t file_bytes = 0;
  std::string file_directory = {};
  int arena_file = -1;  // memory that other processes map; -1: its own
  int spill_file = -1;  // likewise, of what does not fit
  bool is_remote = false;  // another host has it: its memory is nothing but addresses here
};

/// What a device reserves besides its arena.
struct DeviceBytes {
  int64_t scratch = 0;
  int64_t signals = 0;
  int64_t engine = 0;
  int64_t total() const { return scratch + signals + engine; }
};
DeviceBytes bytes_needed(const DeviceOptions& options);

/// The memory of a device, which may be another process's.
std::shared_ptr<memory::Arena> make_arena(const DeviceOptions& options);

/// Everything of one run that a device reads.
struct RunContext {
  const Program* program = nullptr;
  int64_t list = 0;  // of the program's lists of calls
  const std::vector<int64_t>* symbols = nullptr;
  const std::vector<std::byte*>* arenas = nullptr;
  const std::vector<std::unique_ptr<Device>>* devices = nullptr;
  const std::vector<int64_t>* processes = nullptr;  // of the devices that are none here
  const std::vector<int64_t>* hosts = nullptr;  // of all devices
  RemoteMemory* remote = nullptr;  // of devices of other hosts; none: there are none
  bool tracing = false;
};

class Device final : private tasks::Host {
 public:
  Device(std::shared_ptr<RunState> state, const DeviceOptions& options);

  void begin(const RunContext& run, std::vector<Injection> injections);
  /// Wakes workers for the run; after begin() of every device.
  void start();

  const DeviceOptions& options() const { return options_; }
  /// Everything that this device has reserved, its arena included.
  int64_t bytes() const;
  const std::shared_ptr<memory::Arena>& arena() const { return arena_; }
  comm::SignalBoard& signals() { return signals_; }
  /// Its loop of workers, its counts, its timeline.
  tasks::Embedded& engine() { return engine_; }
  const tasks::Embedded& engine() const { return engine_; }
  int64_t window_high_water() const { return window_high_water_; }
  /// Tasks that wait for a signal, oldest first. Keeps the walker from moving meanwhile.
  std::vector<BlockedWait> blocked();
  WorkerStatus status(int64_t worker) const { return workers_[worker]->status(); }
  int64_t transfers(int64_t label) const { return transfers_[label].load(std::memory_order_relaxed); }
  void enable_trace(bool enable);

 private:
  bool submit_more(uint32_t worker) override;
  bool has_more() const override;
  bool admit(uint32_t task) override;
  tasks::TraceLabel label_of(uint32_t task) const override;
  void execute(uint32_t task, uint32_t worker) override;
  void completed() override;
  void stay() override;
  bool leave() override;

  void walk(uint32_t worker);
  void submit(uint32_t task, uint32_t worker);
  void signal_posted(uint32_t task, uint64_t poison);
  bool start_transfer(uint32_t task);
  void post_signals(const Task& task, uint64_t poison);

  std::shared_ptr<RunState> state_;
  DeviceOptions options_;
  std::shared_ptr<memory::Arena> arena_;  // outlives the device while Python holds a view of it
  comm::SignalBoard signals_;
  tasks::Embedded engine_;
  std::vector<Task> tasks_;
  Walker walker_;  // of the worker that holds walk_
  std::vector<tasks::Access> accesses_;  // likewise
  int64_t window_high_water_ = 0;  // likewise
  RunContext run_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::atomic<int64_t>> transfers_;  // elements per label of this run
  protocols::Walk<protocols::StdMemory> walk_;
};

}  // namespace tilewise::programs
