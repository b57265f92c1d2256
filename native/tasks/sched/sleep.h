// How an idle thread passes the time before it sleeps, and the clocks that it uses. protocols/sleepers.h has sleeping
// and waking.
//
// Who may call: the idle thread, each with its own Idle and Pace. Blocks: for a few microseconds at a time.
#pragma once
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "base/clock.h"
#include "protocols/memory.h"

namespace tilewise::tasks {

/// A cheap clock for durations of well under a microsecond: the time-stamp counter if there is one.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<uint64_t>(now_ns());
#endif
}

/// The stages of idle time: the thread spins briefly, checks and yields for a millisecond, then should sleep. If a
/// yield returns at once, no other thread needs the processor; then it yields less and less often, because a submitter
/// may wait for it meanwhile.
class Idle {
 public:
  void reset() { rounds_ = 0; }
  void begin() { rounds_ = 1; }
  bool is_idle() const { return rounds_ > 0; }
  /// Whether the brief spinning is over: work that suits the thread has not come at once.
  bool has_spun() const { return rounds_ > kSpins; }
  bool should_sleep() {
    protocols::relax();
    if (++rounds_ <= kSpins) return false;
    if (rounds_ == kSpins + 1) {
      since_ns_ = now_ns();
      next_yield_ = rounds_ + looks_;
    }
    if (rounds_ < next_yield_) return false;
    next_yield_ = rounds_ + looks_;
    if (now_ns() - since_ns_ >= kYieldNs) return true;
    const uint64_t begin = ticks();
    sched_yield();
    looks_ = ticks() - begin < kAloneTicks ? std::min(2 * looks_, kMaxLooks) : kLooks;
    return false;
  }

 private:
  static constexpr uint32_t kSpins = 64;
  static constexpr uint32_t kLooks = 16;
  static constexpr uint32_t kMaxLooks = 512;
  static constexpr uint64_t kAloneTicks = 4000;  // several times the duration of a yield to no other thread
  static constexpr int64_t kYieldNs = 1'000'000;
  uint32_t rounds_ = 0;
  uint32_t looks_ = kLooks;  // checks until the next yield; carries over to the next idle time
  uint32_t next_yield_ = 0;
  int64_t since_ns_ = 0;
};

/// Delays a worker that is faster than its submitter.
///
/// Such a worker would fetch every task singly, and every cache line of the task would move between the cores twice:
/// both would then run at the speed of these transfers. So a worker that runs out of work after a few short tasks while
/// submissions continue waits until some have gathered. With long tasks it checks at once, and with few submissions it
/// soon stops waiting, because a thread may wait for one of them. (Lines that are settled in the other core's cache
/// move in the background; those that the other core still writes cost a round trip each. benchmarks/runtime times both
/// as chain and wavefront.)
class Pace {
 public:
  void begin_visit() { begin_ticks_ = ticks(); }
  /// Called when the worker runs out of work after replayed tasks, which are not submitted one by one.
  void ran_dry_of_replays(uint64_t num_completed) {
    completed_ = num_completed;
    delay_ = 0;
  }
  /// Called when the worker runs out of other work. num_submitted() counts the submissions of all threads.
  template <class Count>
  void ran_dry(uint64_t num_completed, Count&& num_submitted) {
    const uint64_t ran = num_completed - completed_;
    const uint64_t spent = ticks() - begin_ticks_;
    completed_ = num_completed;
    const bool is_short = ran > 0 && ran < kEnough && spent < ran * kShortTicks;
    const bool is_fed = since_last_look(num_submitted()) > 0;
    if (!is_fed) delay_ = 0;
    delay_ = is_short && is_fed ? std::min(std::max(2 * delay_, kMinTicks), kMaxTicks) : delay_ / 2;
    uint64_t look = kFirstLookTicks;
    for (uint64_t left = delay_; left > 0;) {
      const uint64_t until = ticks() + std::min(left, look);
      while (ticks() < until) protocols::relax();
      left -= std::min(left, look);
      const uint64_t enough = look == kFirstLookTicks ? kPair : kStream;
      look = kLookTicks;
      if (left == 0 || since_last_look(num_submitted()) >= enough) continue;
      delay_ = 0;
      return;
    }
  }

 private:
  uint64_t since_last_look(uint64_t num_submitted) {
    const uint64_t more = num_submitted - submitted_;
    submitted_ = num_submitted;
    return more;
  }

  static constexpr uint64_t kEnough = 256;  // tasks per visit that need no delay
  static constexpr uint64_t kShortTicks = 1000;
  static constexpr uint64_t kMinTicks = 512;
  static constexpr uint64_t kMaxTicks = 32768;
  static constexpr uint64_t kFirstLookTicks = 2048;
  static constexpr uint64_t kLookTicks = 8192;  // a check takes the counters' cache lines from the submitters
  // Submissions before the first check, and between later ones, for which the worker keeps waiting. A single one may be
  // one that a thread waits for.
  static constexpr uint64_t kPair = 2;
  static constexpr uint64_t kStream = 4;
  uint64_t begin_ticks_ = 0;
  uint64_t completed_ = 0;
  uint64_t submitted_ = 0;
  uint64_t delay_ = 0;
};

}  // namespace tilewise::tasks
