// A lock for critical sections of well under a microsecond.
//
// Purpose: guards slots and handles of one device, and one signal. Who may call: any thread; not recursive.
// Blocks: spins briefly, then yields the processor, so that a preempted holder runs when threads outnumber cores.
// Memory order: lock acquires, unlock releases. Memory: one byte inside what it guards.
#pragma once
#include <sched.h>

#include <atomic>

namespace tilewise::rings {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

class SpinLock {
 public:
  void lock() {
    while (held_.exchange(true, std::memory_order_acquire)) {
      for (int spins = 0; held_.load(std::memory_order_relaxed); ++spins) {
        if (spins < kSpins) {
          relax();
        } else {
          sched_yield();
        }
      }
    }
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  static constexpr int kSpins = 64;
  std::atomic<bool> held_{false};
};

}  // namespace tilewise::rings
