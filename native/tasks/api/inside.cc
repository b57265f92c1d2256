// See inside.h.
#include "tasks/api/inside.h"

#include <algorithm>
#include <mutex>

#include "tasks/engine/thread_slots.h"
#include "tasks/run/ready.h"
#include "tasks/sched/submit_lock.h"

namespace tilewise::tasks {

void stats(Engine& engine, pto_stats* stats) {
  const Header& header = *engine.store.header;
  *stats = {};
  uint32_t stocked = 0;
  for (uint32_t s = 0; s < engine.store.threads_in_use(); ++s) {
    const ThreadSlot& thread_slot = engine.store.thread_slots[s];
    stats->num_submitted += thread_slot.num_submitted.load(std::memory_order_relaxed);
    stats->num_failed += thread_slot.num_failed.load(std::memory_order_relaxed);
    stats->num_helped += thread_slot.num_helped.load(std::memory_order_relaxed);
    stats->stall_ns += thread_slot.stall_ns.load(std::memory_order_relaxed);
    stats->num_stalls += thread_slot.num_stalls.load(std::memory_order_relaxed);
    stats->window_high = std::max(stats->window_high, thread_slot.window_high.load(std::memory_order_relaxed));
    stocked += thread_slot.num_free_handles;
  }
  stats->num_completed = num_completed(engine);
  stats->window = header.window;
  stats->heap_bytes = uint64_t{header.num_segments} * kSegmentBytes;
  stats->heap_high_bytes = uint64_t{header.heap_use.high.load()} * kSegmentBytes;
  stats->handles_high = header.pools.fresh_handles.load(std::memory_order_relaxed);
  {
    std::lock_guard guard(engine.store.header->pools.lock);
    stats->handles = stats->handles_high - stocked - header.pools.num_free_handles;
  }
  std::lock_guard guard(engine.store.header->boxes_lock);
  stats->regions = engine.boxes.num_live();
  stats->regions_high = engine.boxes.high_water();
  stats->metadata_bytes = resident_bytes(engine.store.base, header.heap);
}

// A thread is busy from taking a task until it has queued the tasks that became ready.
bool is_idle(const Engine& engine) {
  for (uint32_t s = 0; s < engine.store.threads_in_use(); ++s) {
    if (engine.store.thread_slots[s].is_busy.load(std::memory_order_acquire) != 0 || has_work(engine, s)) return false;
  }
  return true;
}

void enable_trace(Engine& engine, uint32_t max_records) {
  if (max_records != 0 && engine.active_trace.load() != nullptr) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.trace_enable] one trace at a time; got a second; end the first");
  }
  engine.active_trace.store(nullptr);
  if (max_records != 0) {  // otherwise keep the records for reading
    engine.trace = std::make_unique<Trace>(engine.store, max_records);
    engine.active_trace.store(engine.trace.get());
  }
  if (engine.store.traces == nullptr || engine.peer.is_worker_side) return;
  for (uint32_t w = 0; w < engine.store.header->num_workers && max_records != 0; ++w)
    engine.store.traces[w].num_tasks.store(0);
  engine.store.header->trace_limit.store(max_records, std::memory_order_release);
}

uint64_t trace_tasks(const Engine& engine, pto_trace_task* records, uint64_t capacity) {
  return engine.trace == nullptr ? 0 : engine.trace->tasks(records, capacity);
}

uint64_t trace_stalls(const Engine& engine, pto_trace_stall* records, uint64_t capacity) {
  return engine.trace == nullptr ? 0 : engine.trace->stalls(records, capacity);
}

void begin_graph(Engine& engine) {
  const SubmitGuard guard(*engine.store.header, current_thread(engine), engine.fences);
  if (engine.graph != nullptr) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.graph_begin] one graph at a time; got a second; end the first");
  }
  engine.num_observers.fetch_add(1);
  engine.graph = std::make_unique<GraphLog>();
}

void end_graph(Engine& engine, const char* json_path) {
  std::unique_ptr<GraphLog> log;
  {
    const SubmitGuard guard(*engine.store.header, current_thread(engine), engine.fences);
    log = std::move(engine.graph);
    if (log != nullptr) engine.num_observers.fetch_sub(1);
  }
  if (log == nullptr) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.graph_end] a graph must have been begun; got none; call pto_graph_begin first");
  }
  log->write(json_path);
}

}  // namespace tilewise::tasks
