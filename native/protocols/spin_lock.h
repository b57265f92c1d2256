// A lock for critical sections of well under a microsecond.
//
// Purpose: guards slots and handles of one device, and one signal. Who may call: any thread; not recursive.
// Blocks: spins briefly, then yields the processor, so that a preempted holder runs when threads outnumber cores.
// Memory order: lock acquires, unlock releases. Memory: one byte inside what it guards.
#pragma once
#include <sched.h>

#include <atomic>

namespace tilewise::protocols {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// Begins to fetch a cache line that this thread will write. A plain prefetch would fetch it shared, and the store
/// would have to ask the other core a second time.
inline void prefetch_for_write(const void* address) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
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
  bool try_lock() { return !held_.load(std::memory_order_relaxed) && !held_.exchange(true, std::memory_order_acquire); }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  static constexpr int kSpins = 64;
  std::atomic<bool> held_{false};
};

}  // namespace tilewise::protocols
