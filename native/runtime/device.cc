// See device.h.
#include "runtime/device.h"

#include <sched.h>

#include <cfenv>
#include <chrono>
#include <sstream>
#include <thread>

#include "rings/spin_lock.h"
#include "runtime/errors.h"

namespace tilewise::runtime {

namespace {

constexpr int64_t kWalkBatch = 32;          // submissions per advance
constexpr int64_t kSpinRounds = 64;         // then yield
constexpr int64_t kYieldNs = 1'000'000;     // then sleep
constexpr int64_t kTimelineRecords = 1 << 16;

}  // namespace

Device::Device(std::shared_ptr<Core> core, const DeviceOptions& options)
    : core_(std::move(core)),
      options_(options),
      arena_(std::make_shared<memory::Arena>(options.arena_bytes)),
      signals_(options.num_signals),
      scheduler_(options.window, options.num_handles + options.num_signals, 2 * options.num_workers + 2) {
  for (int64_t w = 0; w < options.num_workers; ++w) {
    workers_.push_back(std::make_unique<Worker>());
  }
}

void Device::begin(const RunContext& run, std::vector<Injection> injections) {
  run_ = run;
  const ExpandContext context{run.program, options_.index, run.symbols, run.arenas, options_.num_handles};
  walker_.begin(context, signals_, std::move(injections));
  transfers_ = std::vector<std::atomic<int64_t>>(run.program->labels().size());
  if (run.tracing) {
    for (auto& worker : workers_) worker->timeline.clear();
  }
}

void Device::clear_poison() {
  for (int64_t s = 0; s < signals_.size(); ++s) signals_[s].clear_poison();
}

void Device::start() {
  scheduler_.open(run_.tracing);
  wake_all();
}

void Device::enable_trace(bool enable) {
  for (auto& worker : workers_) worker->timeline.resize(enable ? kTimelineRecords : 0);
}

void Device::worker_loop(int64_t number) {
  std::fesetenv(FE_DFL_ENV);  // a thread inherits its maker's rounding and denormal modes; bits must not
  Worker& worker = *workers_[number];
  int64_t rounds = 0;
  int64_t idle_since = 0;
  while (!core_->closing()) {
    int32_t slot = rings::kNone;
    switch (scheduler_.take(&slot)) {
      case Scheduler::Next::kTask:
        if (scheduler_.work() > 0) wake_one();
        execute(worker, number, slot);
        rounds = 0;
        break;
      case Scheduler::Next::kWalk:
        walk();
        rounds = 0;
        break;
      case Scheduler::Next::kNothing:
        idle(&rounds, &idle_since);
        break;
    }
  }
}

void Device::idle(int64_t* rounds, int64_t* since_ns) {
  if (++*rounds <= kSpinRounds) {
    rings::relax();
    return;
  }
  if (*rounds == kSpinRounds + 1) *since_ns = now_ns();
  if (now_ns() - *since_ns < kYieldNs) {
    sched_yield();
    return;
  }
  park();
  *rounds = 0;
}

void Device::park() {
  std::unique_lock guard(park_mutex_);
  parked_.fetch_add(1, std::memory_order_seq_cst);
  while (scheduler_.work() == 0 && !core_->closing()) unparked_.wait(guard);
  parked_.fetch_sub(1, std::memory_order_seq_cst);
}

void Device::wake_one() {
  if (parked_.load(std::memory_order_seq_cst) == 0) return;
  std::lock_guard guard(park_mutex_);
  unparked_.notify_one();
}

void Device::wake_all() {
  std::lock_guard guard(park_mutex_);
  unparked_.notify_all();
}

void Device::walk() {
  bool done = false;
  for (int64_t n = 0; n < kWalkBatch; ++n) {
    done = !walker_.prepare();
    if (done) break;
    const int32_t slot = scheduler_.acquire();
    if (slot == rings::kNone) break;
    submit(slot);
  }
  if (scheduler_.end_walk(done)) core_->device_finished();
}

void Device::submit(int32_t slot) {
  Task& task = scheduler_.task(slot);
  walker_.fill(task, accesses_);
  task.submit_ns = run_.tracing ? now_ns() : 0;
  for (TaskWait& wait : task.waits) {
    wait.device = this;
    wait.slot = slot;
    wait.on_raised = [](comm::Waiter* waiter, uint64_t poison) {
      auto* raised = static_cast<TaskWait*>(waiter);
      raised->device->signal_raised(raised->slot, poison);
    };
  }
  const auto num_waits = static_cast<int64_t>(task.waits.size());
  bool is_ready = scheduler_.submit(slot, accesses_, num_waits);
  if (num_waits > 0) {
    int64_t met = 0;
    uint64_t poison = 0;
    for (TaskWait& wait : task.waits) {
      uint64_t left = 0;
      if (!signals_[wait.signal].wait(&wait, &left)) continue;
      ++met;
      if (poison == 0) poison = left;
    }
    is_ready = scheduler_.satisfy(slot, met + 1, poison);  // + 1: the guard
  }
  if (is_ready) wake_one();
}

void Device::signal_raised(int32_t slot, uint64_t poison) {
  if (scheduler_.satisfy(slot, 1, poison)) wake_one();
}

void Device::execute(Worker& worker, int64_t number, int32_t slot) {
  Task& task = scheduler_.task(slot);
  const bool tracing = run_.tracing;
  uint64_t poison = scheduler_.poison(slot);
  const int64_t start_ns = now_ns();
  worker.index.store(task.index, std::memory_order_relaxed);
  worker.since_ns.store(start_ns, std::memory_order_relaxed);
  worker.instr.store(task.instr, std::memory_order_release);
  if (task.injected == Injected::kStall) stall(worker);
  if (poison == 0) poison = core_->stopped();
  if (poison == 0) poison = run_kernel(worker, number, task);
  raise_signals(task, poison);
  if (tracing) {
    worker.timeline.push({task.instr->label, task.row_begin, task.submit_ns, scheduler_.ready_ns(slot), start_ns,
                          now_ns()});
  }
  worker.instr.store(nullptr, std::memory_order_relaxed);
  completed_.fetch_add(1, std::memory_order_relaxed);
  if (scheduler_.complete(slot, poison).finished) core_->device_finished();
}

uint64_t Device::run_kernel(Worker& worker, int64_t number, Task& task) {
  const Instr& instr = *task.instr;
  const std::string& label = run_.program->labels()[instr.label];
  const auto failed = [&](const char* what) {
    std::ostringstream text;
    text << "[runtime.Executor.run] a task must not fail; got '" << what << "' from kernel '" << instr.kernel
         << "' in '" << label << "'[" << task.index << "] on device " << options_.index << ", worker " << number
         << "; check its operands, or the kernel";
    const TaskFailed error(text.str(), label, task.index, number, options_.index);
    return core_->fail(std::make_exception_ptr(error));
  };
  try {
    if (task.injected == Injected::kThrow) throw std::runtime_error("injected failure");
    if (instr.fn == nullptr) return 0;
    instr.fn({task.views(), task.num_views(), instr.ints.data(), static_cast<int64_t>(instr.ints.size()),
              instr.floats.data(), static_cast<int64_t>(instr.floats.size()), task.row_begin,
              {worker.scratch.data(), kernels::kScratchBytes}});
  } catch (const std::exception& error) {
    return failed(error.what());
  } catch (...) {
    return failed("an unknown exception");
  }
  if (task.transfers > 0) transfers_[instr.label].fetch_add(task.transfers, std::memory_order_relaxed);
  return 0;
}

// A planted fault: this worker takes no further task until the run is given up.
void Device::stall(Worker& worker) {
  worker.stalled.store(true, std::memory_order_relaxed);
  while (core_->stopped() == 0 && !core_->closing()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  worker.stalled.store(false, std::memory_order_relaxed);
}

void Device::raise_signals(const Task& task, uint64_t poison) {
  for (const Notify& notify : task.instr->notifies) {
    Device& target = *(*run_.devices)[notify.device];
    target.signals()[notify.signal_base + (notify.per_index ? task.index : 0)].raise(poison);
  }
}

WorkerStatus Device::status(int64_t number) const {
  const Worker& worker = *workers_[number];
  return {worker.instr.load(std::memory_order_acquire), worker.index.load(std::memory_order_relaxed),
          worker.since_ns.load(std::memory_order_relaxed), worker.stalled.load(std::memory_order_relaxed)};
}

}  // namespace tilewise::runtime
