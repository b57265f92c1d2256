// One device: the task engine that it hosts, its instruction issuer, its signals and its arena.
//
// Purpose: the engine's workers ask the device for tasks to submit, for tasks to admit (their signals have arrived) and
// to run a task: kernel, then signals, then completion. Callers: begin() and start() by the executor between runs;
// worker_loop() by the device's threads; signal_posted() by a worker of any device; statuses by any thread. Memory
// order: a task's writes reach its successors through the engine and other devices through the signal's lock; the
// instruction issuer passes from one worker to the next through issue_turn_.
//
// A worker advances the instruction issuer when few tasks are ready and an eighth of the window is free, so that the
// search for free slots costs little per task. Only workers make that condition true, and each re-checks it before it
// sleeps. start() is the exception: it wakes every worker.
//
// A task that moves tiles between memory and the spill file goes to the transfer queue instead of a worker. The end of
// the transfer lets the task start, which then has nothing left to do: like a wait for signals, a transfer occupies no
// worker. A task that reads tiles of a remote device requests them at the same point and resumes when they have
// arrived. A task that writes tiles of a remote device sends them after its kernel, and a worker runs it once more when
// they have landed: then it posts its signals and completes.
//
// A task waits for its signals one after the other, once its producers have completed. It is in one signal's list at a
// time, and the thread that posts that signal goes on to the task's next one (protocols/counter.h). One thread at a
// time therefore owns the task, and no count of open waits is needed.
//
// After a run's first failure, cancellation or deadline, every task that has not started is skipped on every device,
// whether or not it depends on the failed one, because the step is lost anyway. The engine itself sees no failure.
// Skipped tasks still post their signals, poison word first.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "programs/remote/remote_memory.h"
#include "programs/remote/remote_tiles.h"
#include "programs/run/instruction_issuer.h"
#include "programs/run/run_state.h"
#include "programs/run/worker.h"
#include "protocols/issue_turn.h"
#include "tasks/embed/embedded.h"

namespace tilewise::programs {

/// A task that waits for a signal, for the deadline's report.
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
  int arena_file = -1;  // memory that other processes map; -1: private memory
  int spill_file = -1;  // the same for the spill file
  bool is_remote = false;  // on another host: its memory is only a range of addresses here
};

/// Bytes that a device reserves besides its arena.
struct DeviceBytes {
  int64_t scratch = 0;
  int64_t signals = 0;
  int64_t engine = 0;
  int64_t total() const { return scratch + signals + engine; }
};
DeviceBytes bytes_needed(const DeviceOptions& options);

/// The memory of a device, possibly of another process.
std::shared_ptr<memory::Arena> make_arena(const DeviceOptions& options);

/// Everything of one run that a device reads.
struct RunContext {
  const Program* program = nullptr;
  int64_t list = 0;  // index of the call list
  const std::vector<int64_t>* symbols = nullptr;
  const std::vector<std::byte*>* arenas = nullptr;
  const std::vector<std::unique_ptr<Device>>* devices = nullptr;
  const std::vector<int64_t>* processes = nullptr;  // per device
  const std::vector<int64_t>* hosts = nullptr;  // per device
  RemoteMemory* remote = nullptr;  // memory of other hosts' devices; nullptr: all devices are on this host
  bool tracing = false;
};

class Device final : private tasks::Host {
 public:
  Device(std::shared_ptr<RunState> state, const DeviceOptions& options);

  void begin(const RunContext& run, std::vector<Injection> injections);
  /// Wakes workers for the run. Called after begin() of every device.
  void start();

  const DeviceOptions& options() const { return options_; }
  /// All bytes that this device has reserved, including its arena.
  int64_t bytes() const;
  const std::shared_ptr<memory::Arena>& arena() const { return arena_; }
  comm::SignalBoard& signals() { return signals_; }
  /// The engine: worker loop, counts, timeline.
  tasks::Embedded& engine() { return engine_; }
  const tasks::Embedded& engine() const { return engine_; }
  int64_t window_high_water() const { return window_high_water_; }
  /// Tasks that wait for a signal, oldest first. The instruction issuer pauses meanwhile.
  std::vector<BlockedWait> blocked();
  WorkerStatus status(int64_t worker) const { return workers_[worker]->status(); }
  int64_t transfers(int64_t label) const { return transfers_[label].load(std::memory_order_relaxed); }
  void enable_trace(bool enable);

 private:
  bool submit_more(uint32_t worker) override;
  bool has_more() const override;
  bool admit(uint32_t task) override;
  tasks::TraceLabel label_of(uint32_t task) const override;
  bool execute(uint32_t task, uint32_t worker) override;
  void completed() override;
  void stay() override;
  bool leave() override;

  void issue(uint32_t worker);
  void submit(uint32_t task, uint32_t worker);
  void signal_posted(uint32_t task, uint64_t poison);
  bool start_transfer(uint32_t task);
  std::optional<TravellingPost> post_to_owner(const Task& task, const RemoteRows& rows) const;
  void post_signals(const Task& task, uint64_t poison);

  std::shared_ptr<RunState> state_;
  DeviceOptions options_;
  std::shared_ptr<memory::Arena> arena_;  // outlives the device while Python has a view of it
  comm::SignalBoard signals_;
  tasks::Embedded engine_;
  std::vector<Task> tasks_;
  // Used by the worker that holds issue_turn_.
  InstructionIssuer issuer_;
  std::vector<tasks::Access> accesses_;
  int64_t window_high_water_ = 0;

  RunContext run_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::atomic<int64_t>> transfers_;  // elements per label of this run
  protocols::IssueTurn<protocols::StdMemory> issue_turn_;
};

}  // namespace tilewise::programs
