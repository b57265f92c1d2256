// Mutexes of buffers for commuting tasks: one task at a time, in any order.
//
// The word is [locked 1 | first waiter + 1]. A task takes the mutex or enters the list of waiters. The task that
// releases the mutex takes the whole list, and each waiter tries again. All tasks take several mutexes in the same
// order, so that no two tasks wait for each other. Callers: any thread that has the task. Blocks:
// never. Memory: one word of the buffer; the links are in the waiters. Memory order: unlocking releases and locking
// acquires, in both directions: the buffer's bytes reach the next task, a waiter reaches the thread that wakes it.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct TaskMutexOrders {
  static constexpr auto kTake = std::memory_order_acquire;  // what the last owner wrote
  static constexpr auto kStand = std::memory_order_release;  // publishes the waiter
  static constexpr auto kGive = std::memory_order_acq_rel;  // takes waiters, gives the bytes
};

template <class Memory, class Orders = TaskMutexOrders>
struct TaskMutexes {
  using Mutex = typename Memory::template Atomic<uint32_t>;
  static constexpr uint32_t kHeld = 1u << 31;

  /// Returns true if the task has the mutex. If false, the waiter is in the list, and another thread may run it at any
  /// time. enlist(first) must set the waiter's link to `first`; it is called before each try.
  template <class Enlist>
  static bool take(Mutex& mutex, uint32_t waiter, Enlist&& enlist) {
    uint32_t seen = mutex.load(std::memory_order_relaxed);
    while (true) {
      if ((seen & kHeld) == 0) {
        if (mutex.compare_exchange_weak(seen, kHeld, Orders::kTake, std::memory_order_relaxed)) return true;
        continue;
      }
      enlist(seen & ~kHeld);
      if (mutex.compare_exchange_weak(seen, kHeld | waiter, Orders::kStand, std::memory_order_relaxed)) return false;
    }
  }

  /// Releases the mutex and calls try_again(waiter) for every waiter. next(waiter) is the waiter's link; it is read
  /// first, because the waiter may enter another list at once.
  template <class Next, class TryAgain>
  static void give(Mutex& mutex, Next&& next, TryAgain&& try_again) {
    uint32_t waiter = mutex.exchange(0, Orders::kGive) & ~kHeld;
    while (waiter != 0) {
      const uint32_t behind = next(waiter);
      try_again(waiter);
      waiter = behind;
    }
  }
};

}  // namespace tilewise::protocols
