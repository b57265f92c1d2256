// Records of the tasks and stalls of every thread while tracing.
//
// Purpose: one record per task and per stall. Who may call: start, end and stall: the thread that owns the slot;
// reading: while nothing runs. Blocks: never. Memory: of the process; each thread's records grow up to a limit, then
// the newest replace the oldest. With two processes, the workers' records are in the store, so that the other process
// can read them. Tasks are stamped with ticks(), at a third of the cost of the system's clock. Ticks are converted to
// ns when they are read, by two distant readings of both clocks.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "tasks/sched/sleep.h"
#include "tasks/store/layout.h"

namespace tilewise::tasks {

class Trace {
 public:
  Trace(const Store& store, uint32_t capacity) : capacity_(capacity), first_ticks_(ticks()), first_ns_(now_ns()) {
    for (uint32_t s = 0; s < store.header->num_thread_slots; ++s) {
      thread_slots_.push_back(std::make_unique<PerThread>());
      if (store.traces != nullptr && s < store.header->num_workers) thread_slots_[s]->shared = &store.traces[s];
    }
  }

  void start(uint32_t thread) { thread_slots_[thread]->start_ticks = ticks(); }

  /// The data of a task before it starts.
  struct Before {
    uint32_t submitter;
    int32_t scope_depth;
    uint64_t submit_ticks;
    uint64_t ready_ticks;
    const char* name;
  };

  /// kernel: for a tile program's task its label; its first row is then in the name.
  void end(uint32_t thread, uint32_t num_workers, TaskRef name, int32_t kernel, int32_t priority, const Before& before,
           int status) {
    const int32_t worker = thread < num_workers ? static_cast<int32_t>(thread) : -1 - static_cast<int32_t>(thread);
    PerThread& mine = *thread_slots_[thread];
    const auto submitter = static_cast<int32_t>(before.submitter);
    pto_trace_task record{name,
                          kernel,
                          worker,
                          submitter,
                          before.scope_depth,
                          status,
                          priority,
                          static_cast<int64_t>(before.submit_ticks),
                          static_cast<int64_t>(before.ready_ticks),
                          static_cast<int64_t>(mine.start_ticks),
                          static_cast<int64_t>(ticks()),
                          {}};
    std::memcpy(record.name, before.name, strnlen(before.name, sizeof(record.name) - 1));
    if (mine.shared == nullptr) return push(mine.tasks, mine.num_tasks++, capacity_, record);
    const uint64_t number = mine.shared->num_tasks.load(std::memory_order_relaxed);
    mine.shared->tasks[number % kSharedTraceTasks] = record;
    mine.shared->num_tasks.store(number + 1, std::memory_order_relaxed);
  }

  void stall(uint32_t thread, int32_t cause, int64_t begin_ns, int64_t end_ns, uint64_t live, uint64_t heap_bytes) {
    PerThread& mine = *thread_slots_[thread];
    push(mine.stalls, mine.num_stalls++, capacity_,
         pto_trace_stall{static_cast<int32_t>(thread), cause, begin_ns, end_ns, live, heap_bytes});
  }

  /// Copies up to `capacity` records, their times in ns; returns how many there are.
  uint64_t tasks(pto_trace_task* records, uint64_t capacity) const {
    const double ns_per_tick = tick_ns();
    const auto to_ns = [&](int64_t& time) {
      if (time == 0) return;  // never happened
      const auto passed = static_cast<double>(static_cast<int64_t>(static_cast<uint64_t>(time) - first_ticks_));
      time = first_ns_ + static_cast<int64_t>(passed * ns_per_tick);
    };
    uint64_t count = 0;
    const auto copy = [&](const pto_trace_task& record) {
      if (count < capacity) {
        records[count] = record;
        to_ns(records[count].submit_ns);
        to_ns(records[count].ready_ns);
        to_ns(records[count].start_ns);
        to_ns(records[count].end_ns);
      }
      ++count;
    };
    for (const auto& own : thread_slots_) {
      for (const pto_trace_task& record : own->tasks) copy(record);
      if (own->shared == nullptr) continue;
      const uint64_t num_tasks = std::min(own->shared->num_tasks.load(std::memory_order_acquire), kSharedTraceTasks);
      for (uint64_t t = 0; t < num_tasks; ++t) copy(own->shared->tasks[t]);
    }
    return count;
  }

  /// Records of tasks that newer ones have replaced.
  uint64_t num_dropped() const {
    uint64_t total = 0;
    for (const auto& own : thread_slots_) total += own->num_tasks - own->tasks.size();
    return total;
  }

  uint64_t stalls(pto_trace_stall* records, uint64_t capacity) const {
    uint64_t count = 0;
    for (const auto& own : thread_slots_) {
      for (const pto_trace_stall& record : own->stalls) {
        if (count < capacity) records[count] = record;
        ++count;
      }
    }
    return count;
  }

 private:
  struct alignas(128) PerThread {
    uint64_t start_ticks = 0;
    uint64_t num_tasks = 0;
    uint64_t num_stalls = 0;
    std::vector<pto_trace_task> tasks;
    std::vector<pto_trace_stall> stalls;
    SharedTrace* shared = nullptr;
  };

  template <class Record>
  static void push(std::vector<Record>& records, uint64_t number, uint64_t capacity, const Record& record) {
    if (records.size() < capacity) {
      records.push_back(record);
    } else {
      records[number % capacity] = record;
    }
  }

  /// The length of a tick, measured once, so that repeated reads of a record give the same times.
  double tick_ns() const {
    double tick = tick_ns_.load(std::memory_order_relaxed);
    if (tick != 0) return tick;
    while (now_ns() - first_ns_ < kCalibrationNs) sched_yield();
    tick = static_cast<double>(now_ns() - first_ns_) / static_cast<double>(ticks() - first_ticks_);
    double none = 0;
    return tick_ns_.compare_exchange_strong(none, tick) ? tick : none;
  }

  static constexpr int64_t kCalibrationNs = 10'000'000;
  uint64_t capacity_;
  uint64_t first_ticks_;
  int64_t first_ns_;
  mutable std::atomic<double> tick_ns_{0};
  std::vector<std::unique_ptr<PerThread>> thread_slots_;
};

}  // namespace tilewise::tasks
