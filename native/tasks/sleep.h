// Going to sleep and being woken, and the barrier between the two.
//
// The protocol (runtime parking): the sleeper announces itself, then looks for work; the waker publishes work, then
// looks for sleepers. Each must see the other's first step. A fence on both sides would do, but wakers are many and
// sleepers few: so the sleeper issues membarrier(2), which is a full fence on every thread of the process, and the
// waker only keeps the compiler from reordering. Across processes, and where the system lacks it, both use a fence.
#pragma once
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "rings/spin_lock.h"

namespace tilewise::tasks {

int64_t now_ns();

/// True when membarrier works here; call once before threads start.
inline bool register_membarrier() {
#if defined(__SANITIZE_THREAD__)
  return false;  // the sanitizer does not see it
#else
  return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
#endif
}

inline void heavy_barrier(bool fences) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!fences) syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
}

inline void light_barrier(bool fences) {
  if (fences) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
}

/// limit_ns < 0: for ever.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t limit_ns, bool is_shared) {
  const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  syscall(SYS_futex, &word, is_shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, expected, limit_ns < 0 ? nullptr : &limit,
          nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word, int32_t count, bool is_shared) {
  syscall(SYS_futex, &word, is_shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

/// How an idle thread passes time: it spins briefly, yields for a millisecond, then says that it should sleep.
class Idle {
 public:
  void reset() { rounds_ = 0; }
  bool should_sleep() {
    if (++rounds_ <= kSpins) {
      rings::relax();
      return false;
    }
    if (rounds_ == kSpins + 1) since_ns_ = now_ns();
    if (now_ns() - since_ns_ >= kYieldNs) return true;
    sched_yield();
    return false;
  }

 private:
  static constexpr uint32_t kSpins = 64;
  static constexpr int64_t kYieldNs = 1'000'000;
  uint32_t rounds_ = 0;
  int64_t since_ns_ = 0;
};

}  // namespace tilewise::tasks
