// A lock for critical sections of well under a microsecond.
//
// Purpose: guards slots and handles of one device, and one signal. Callers: any thread; not recursive. Blocks: spins
// briefly, then yields the processor, so that a preempted owner can run when there are more threads than cores.
// Memory order: lock acquires, unlock releases. Memory: one byte inside what it guards.
#pragma once
#include "protocols/memory.h"

namespace tilewise::protocols {

struct SpinLockOrders {
  static constexpr auto kTake = std::memory_order_acquire;
  static constexpr auto kTry = std::memory_order_acquire;
  static constexpr auto kGive = std::memory_order_release;
};

template <class Memory, class Orders = SpinLockOrders>
class BasicSpinLock {
 public:
  void lock() {
    while (locked_.exchange(true, Orders::kTake)) {
      for (int spins = 0; locked_.load(std::memory_order_relaxed); ++spins) {
        if (spins < kSpins) {
          Memory::relax();
        } else {
          Memory::yield();
        }
      }
    }
  }
  bool try_lock() { return !locked_.load(std::memory_order_relaxed) && !locked_.exchange(true, Orders::kTry); }
  void unlock() { locked_.store(false, Orders::kGive); }

 private:
  static constexpr int kSpins = 64;
  typename Memory::template Atomic<bool> locked_{false};
};

using SpinLock = BasicSpinLock<StdMemory>;

}  // namespace tilewise::protocols
