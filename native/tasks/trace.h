// Records of what every thread did, kept while tracing is on.
//
// Purpose: one record per task and per stall. Who may call: start, end and stall by the thread of the seat; reading
// while nothing runs. Blocks: never. Memory: of the process, one ring per seat; the newest records are kept.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "rings/record_ring.h"
#include "tasks/layout.h"

namespace tilewise::tasks {

int64_t now_ns();

class Trace {
 public:
  Trace(uint32_t num_seats, uint32_t capacity) : seats_(num_seats) {
    for (auto& seat : seats_) {
      seat = std::make_unique<PerSeat>();
      seat->tasks.resize(capacity);
      seat->stalls.resize(capacity / 4 + 16);
    }
  }

  void start(uint32_t seat) { seats_[seat]->start_ns = now_ns(); }

  void end(uint32_t seat, uint32_t num_workers, uint32_t lane, TaskRef name, const Slot& task, const SlotArgs& args, int status) {
    const int32_t worker = seat < num_workers ? static_cast<int32_t>(seat) : -1 - static_cast<int32_t>(seat);
    seats_[seat]->tasks.push({name, task.kernel, worker, static_cast<int32_t>(lane), args.scope_depth, status, task.priority,
                              args.submit_ns, args.ready_ns, seats_[seat]->start_ns, now_ns()});
  }

  void stall(uint32_t seat, int32_t cause, int64_t begin_ns, int64_t end_ns, uint64_t live, uint64_t heap_bytes) {
    seats_[seat]->stalls.push({static_cast<int32_t>(seat), cause, begin_ns, end_ns, live, heap_bytes});
  }

  template <class Record, class Ring>
  static uint64_t copy(const std::vector<const Ring*>& rings, Record* records, uint64_t capacity) {
    uint64_t count = 0;
    for (const Ring* ring : rings) {
      ring->for_each([&](const Record& record) {
        if (count < capacity) records[count] = record;
        ++count;
      });
    }
    return count;
  }

  uint64_t tasks(pto_trace_task* records, uint64_t capacity) const {
    std::vector<const rings::RecordRing<pto_trace_task>*> all;
    for (const auto& seat : seats_) all.push_back(&seat->tasks);
    return copy(all, records, capacity);
  }
  uint64_t stalls(pto_trace_stall* records, uint64_t capacity) const {
    std::vector<const rings::RecordRing<pto_trace_stall>*> all;
    for (const auto& seat : seats_) all.push_back(&seat->stalls);
    return copy(all, records, capacity);
  }

 private:
  struct alignas(128) PerSeat {
    int64_t start_ns = 0;
    rings::RecordRing<pto_trace_task> tasks;
    rings::RecordRing<pto_trace_stall> stalls;
  };
  std::vector<std::unique_ptr<PerSeat>> seats_;
};

}  // namespace tilewise::tasks
