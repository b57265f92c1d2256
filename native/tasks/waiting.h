// The loop of every wait: help, spin, yield, sleep. See engine.h.
#pragma once
#include <algorithm>

#include "tasks/engine.h"
#include "tasks/sched/float_modes.h"
#include "tasks/sched/sleep.h"
#include "tasks/sched/thread_state.h"

namespace tilewise::tasks {

inline constexpr double kLongestWait = 1e9;      // seconds; what is longer is for ever
inline constexpr int64_t kSliceNs = 50'000'000;  // a sleeper looks up this often: for the other process

// done: what is waited for. watch: sees to it that somebody wakes us; false when it is no longer needed.
template <class Done, class Watch>
bool Engine::wait_until(Done&& done, Watch&& watch_it, double timeout_s, bool helps) {
  if (done()) return true;
  if (timeout_s <= 0) return false;
  // Who only sleeps needs no lane; but a leaf kernel must not wait, and is told so.
  const uint32_t seat_index = helps || running.engine == this ? seat_here() : 0;
  Header& header = *region_.header;
  Blocking let_others_run;
  const DefaultFloatModes modes;  // of what it helps to run, as on a worker
  const bool is_endless = timeout_s > kLongestWait;
  const int64_t deadline = is_endless ? INT64_MAX : now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  Idle idle;
  int64_t asked_ns = hooks.interrupted != nullptr ? now_ns() : 0;
  while (!done()) {
    check_open();
    check_interrupted(&asked_ns);
    const int64_t next_deadline = header.next_deadline_ns.load(std::memory_order_acquire);
    if (next_deadline != 0 && now_ns() >= next_deadline && has_lane()) expire_overdue(seat_here());
    if (helps && help(seat_index)) {
      idle.reset();
      continue;
    }
    if (deadline != INT64_MAX && now_ns() >= deadline) return done();
    if (!idle.should_sleep()) continue;
    const uint32_t word = header.wait_word.load(std::memory_order_acquire);
    header.num_waiting.fetch_add(1, std::memory_order_seq_cst);
    watch_it();
    heavy_barrier(fences_);
    if (done() || (helps && has_work(seat_index))) {
      sched_yield();
    } else {
      const int64_t left =
          deadline == INT64_MAX ? kSliceNs : std::min(kSliceNs, std::max<int64_t>(deadline - now_ns(), 1));
      futex_wait(header.wait_word, word, left, header.is_shared != 0);
    }
    header.num_waiting.fetch_sub(1, std::memory_order_seq_cst);
    check_peer();
  }
  return true;
}

}  // namespace tilewise::tasks
