// What an idle thread does before it sleeps, and the clocks that it uses. protocols/sleepers.h has sleeping and waking.
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

/// A cheap clock for durations of well under a microsecond: the time-stamp counter where there is one.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<uint64_t>(now_ns());
#endif
}

/// How an idle thread passes time: it spins briefly, looks and yields for a millisecond, then says that it should
/// sleep. A yield that comes back at once says that no other thread wants the processor: then it yields less and less
/// often, because a submitter meanwhile waits for it.
class Idle {
 public:
  void reset() { rounds_ = 0; }
  void begin() { rounds_ = 1; }
  bool is_idle() const { return rounds_ > 0; }
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
  static constexpr uint64_t kAloneTicks = 4000;  // a yield to no other thread, several times over
  static constexpr int64_t kYieldNs = 1'000'000;
  uint32_t rounds_ = 0;
  uint32_t looks_ = kLooks;  // until the next yield; kept from one idle time to the next
  uint32_t next_yield_ = 0;
  int64_t since_ns_ = 0;
};

/// How a worker that keeps up with a submitter stays a little behind it.
///
/// A worker faster than its submitter would fetch every task alone, and every line of the task would cross between the
/// cores twice: both then run at the speed of the transfers. So when it runs dry after a few short tasks while
/// submissions go on, it lets some gather before it looks again; when tasks are long it looks at once, and when few are
/// submitted it soon stops waiting: a thread may wait for one of them. (Lines that have come to rest in the other
/// core's cache cross in the background; those that the other still writes cost a round trip each: benchmarks/runtime
/// times both as chain and wavefront.)
class Pace {
 public:
  void found() { begin_ticks_ = ticks(); }
  /// It runs dry after tasks that were not submitted one by one.
  void ran_dry_of_replays(uint64_t num_completed) {
    completed_ = num_completed;
    delay_ = 0;
  }
  /// num_submitted() counts what all have submitted.
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

  static constexpr uint64_t kEnough = 256;  // tasks per visit that make a visit worth while
  static constexpr uint64_t kShortTicks = 1000;
  static constexpr uint64_t kMinTicks = 512;
  static constexpr uint64_t kMaxTicks = 32768;
  static constexpr uint64_t kFirstLookTicks = 2048;
  static constexpr uint64_t kLookTicks = 8192;  // a look takes the counters' lines from those who submit
  // Tasks submitted by the first look, and between two later ones, for which it goes on: a single one may be awaited.
  static constexpr uint64_t kPair = 2;
  static constexpr uint64_t kStream = 4;
  uint64_t begin_ticks_ = 0;
  uint64_t completed_ = 0;
  uint64_t submitted_ = 0;
  uint64_t delay_ = 0;
};

}  // namespace tilewise::tasks
