// The executor: all devices of this process, their worker threads, and run().
//
// A program's devices may be in several processes. Each has an executor for all devices, which creates its own devices
// and maps the memory of all on its host (comm/peers.h). Process 0 is the leader: its run() makes every process run the
// list and returns when all have ended; the others are in serve(). An error is thrown in its own process, and by run().
//
// Purpose: runs a finished tile program on every device at once and returns when all are done, failed, cancelled or
// past the deadline. Who may call: one thread at a time (a second run() at once is rejected). Blocks: run() until the
// end, calling its poll every 50 ms; close() until the workers have left. During a run, everything except memory() and
// allocated_bytes() is rejected. Memory: arenas live as long as the executor, or as a view of them.
//
// After a failure or a cancel, every device goes through its program to the end without running kernels, so that
// signals and expected values stay consistent and the next run starts clean. After a deadline this is not certain (a
// worker may never return), so the executor is broken: later runs are rejected. In a forked child, which has none of
// the workers, every run is rejected, and closing only releases memory.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "programs/program.h"
#include "programs/run/errors.h"
#include "programs/run/group.h"
#include "programs/run/options.h"

namespace tilewise::programs {

/// One timeline record with its device.
struct TimelineEntry {
  int64_t device;
  tasks::TimelineRecord record;
};

struct ExecutorStats {
  int64_t num_runs = 0;
  int64_t num_tasks = 0;
  int64_t window_high_water = 0;
  int64_t timeline_dropped = 0;
  int64_t bytes_fetched = 0;  // read by tasks from remote devices
  Traffic files = {};  // moved between memory and files since construction
};

/// A fault for the next run, in the index-th task of a label on a device.
struct PlannedInjection {
  Injected kind;
  int64_t device;
  std::string label;
  int64_t index;
};

class Executor {
 public:
  using Poll = programs::Poll;

  explicit Executor(const ExecutorOptions& options);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs the program's list of that name on every device. Calls `meanwhile` once on this thread after the devices have
  /// begun; it must not throw.
  void run(std::shared_ptr<const Program> program, std::vector<int64_t> symbols, const std::string& name = "",
           const Poll& poll = {}, const std::function<void()>& meanwhile = {}, int64_t program_number = 0);
  /// In a process that does not lead: runs those of the programs that the leader orders by number, until call_peers().
  void serve(const std::vector<std::shared_ptr<const Program>>& programs);
  /// Lets serve() return in all other processes.
  void call_peers();
  void close();

  std::byte* memory(int64_t device, int64_t offset, int64_t bytes) const;
  std::shared_ptr<memory::Arena> arena(int64_t device) const;
  /// Copies between host memory and a device's file, or a remote device's memory or file.
  void move(memory::SpillFile::Way way, int64_t device, int64_t offset, std::byte* memory, int64_t bytes) const;

  void trace(bool enable);
  std::vector<TimelineEntry> timeline() const;  // of the last run, by start time
  const std::vector<std::string>& timeline_labels() const;
  const std::map<std::string, std::vector<int64_t>>& transfers() const;
  void reset_transfers();
  /// Bytes reserved per device: arena, scratch of its workers, signals, task engine.
  std::vector<int64_t> allocated_bytes() const;
  ExecutorStats stats() const;
  /// Plants a fault into the next run only.
  void inject(Injected kind, int64_t device, std::string label, int64_t index);

 private:
  class Running {
   public:
    explicit Running(Executor& executor);
    ~Running() { running_.store(false); }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    std::atomic<bool>& running_;
  };
  /// name: the list's, for messages.
  void check_run(const Program& program, int64_t list, const std::string& name,
                 const std::vector<int64_t>& symbols) const;
  void begin_run(std::shared_ptr<const Program> program, int64_t list, std::vector<int64_t> symbols, bool clears_poison,
                 uint64_t number);
  /// Waits for the end of the run. Returns its first error, if any, and sets broken_ and failed_.
  std::exception_ptr end_run(const Poll& poll);
  void count_transfers();
  void check_device(int64_t device, const char* where) const;
  void check_idle(const char* where) const;

  ExecutorOptions options_;
  std::shared_ptr<DeviceGroup> group_;
  std::vector<std::shared_ptr<memory::Arena>> arenas_;  // per device
  std::vector<std::thread> threads_;
  std::vector<PlannedInjection> injections_;
  std::map<std::string, std::vector<int64_t>> transfers_;  // elements per label and device
  pid_t process_;
  std::atomic<bool> running_{false};
  bool closed_ = false;
  bool broken_ = false;
  bool failed_ = false;  // the last run has failed
  bool tracing_ = false;
  int64_t num_runs_ = 0;
};

}  // namespace tilewise::programs
