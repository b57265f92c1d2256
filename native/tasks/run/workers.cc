// See workers.h.
#include "tasks/run/workers.h"

#include <poll.h>

#include <algorithm>
#include <cfenv>

#include "tasks/engine/thread_slots.h"
#include "tasks/run/link.h"
#include "tasks/run/run.h"

namespace tilewise::tasks {

namespace {

constexpr int64_t kPeerSliceNs = 50'000'000;  // interval of checks whether the other process is alive

/// In the workers' process: applies the trace switch before the next task.
void follow_trace(Engine& engine) {
  const uint32_t limit = engine.store.header->trace_limit.load(std::memory_order_acquire);
  if ((limit != 0) == (engine.active_trace.load(std::memory_order_relaxed) != nullptr)) return;
  std::lock_guard guard(engine.trace_mutex);  // one worker switches for all
  if ((limit != 0) == (engine.active_trace.load(std::memory_order_relaxed) != nullptr)) return;
  if (engine.trace == nullptr) engine.trace = std::make_unique<Trace>(engine.store, limit);
  engine.active_trace.store(limit != 0 ? engine.trace.get() : nullptr);
}

}  // namespace

void check_peer(Engine& engine) {
  if (engine.peer.fd < 0) return;
  pollfd poll_peer{engine.peer.fd, POLLIN, 0};
  if (poll(&poll_peer, 1, 0) > 0) engine.peer.is_lost.store(true, std::memory_order_relaxed);
}

void park_worker(Engine& engine, uint32_t worker) {
  Header& header = *engine.store.header;
  const bool is_shared = header.is_shared != 0;
  const auto stays_awake = [&] {
    return has_work(engine, worker) || (engine.host != nullptr && engine.host->has_more()) ||
           header.closing.load(std::memory_order_seq_cst) != 0;
  };
  const auto limit_ns = [&] {
    const int64_t deadline = header.next_deadline_ns.load(std::memory_order_acquire);
    if (deadline == 0) return is_shared ? kPeerSliceNs : int64_t{-1};
    const int64_t left = std::max<int64_t>(deadline - now_ns(), 1);
    return is_shared ? std::min(kPeerSliceNs, left) : left;
  };
  if (engine.host != nullptr && !engine.host->leave()) return;
  header.parked.sleep(header.parked.look(), engine.fences, is_shared, stays_awake, limit_ns);
  if (engine.host != nullptr) engine.host->stay();
  expire_overdue(engine, worker);
  if (header.is_shared != 0 && worker == 0) check_peer(engine);
}

void worker_loop(Engine& engine, uint32_t worker) {
  std::fesetenv(
      FE_DFL_ENV);  // a thread inherits its creator's rounding and denormal modes, on which results must not depend
  Header& header = *engine.store.header;
  Idle idle;
  Pace pace;
  bool is_replayed = false;  // the last task was a replayed one
  Host* const host = engine.host;
  if (host != nullptr) host->stay();
  while (header.closing.load(std::memory_order_acquire) == 0 && !engine.peer.is_lost.load(std::memory_order_relaxed)) {
    // Submit until enough tasks are ready; otherwise others would sleep while this worker runs its task.
    bool has_submitted = false;
    while (host != nullptr && host->submit_more(worker)) has_submitted = true;
    uint32_t slot = take(engine, worker, true);
    if (slot == kNone && idle.has_spun()) slot = take_preferring(engine, worker);
    if (slot != kNone) {
      if (engine.peer.is_worker_side) [[unlikely]]
        follow_trace(engine);
      if (idle.is_idle()) pace.begin_visit();
      is_replayed = (engine.store.slots[slot].flags & kIsReplayed) != 0;
      idle.reset();
      run(engine, slot, worker, true);
    } else if (has_submitted) {
      idle.reset();
    } else if (!idle.is_idle()) {
      const uint64_t num_run = engine.store.thread_slots[worker].num_completed.load(std::memory_order_relaxed);
      if (is_replayed) {
        pace.ran_dry_of_replays(num_run);
      } else {
        pace.ran_dry(num_run, [&] { return num_submitted(engine); });
      }
      idle.begin();
    } else if (idle.should_sleep()) {
      park_worker(engine, worker);
      idle.reset();
    }
  }
  while (host != nullptr && !host->leave()) {
  }
}

}  // namespace tilewise::tasks
