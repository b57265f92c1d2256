// Commuting tasks on one buffer: one at a time, in any order.
//
// [held 1 | first waiter + 1]. A task takes the mutex, or stands in the list of those that want it; the task that gives
// it up takes the whole list, and has each of them try again. A task that needs several takes them in one order that
// all share, so that no two wait for each other. Who may call: any thread that has the task. Blocks: never. Memory: one
// word of the buffer; the links lie in the waiters. Memory order: giving releases, taking acquires, in both directions:
// the buffer's bytes to the next task, a waiter to the thread that wakes it.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct TaskMutexOrders {
  static constexpr auto kTake = std::memory_order_acquire;  // what the last holder wrote
  static constexpr auto kStand = std::memory_order_release;  // the waiter is handed over
  static constexpr auto kGive = std::memory_order_acq_rel;  // takes waiters, gives the bytes
  static constexpr bool kWakesWaiters = true;
  static constexpr bool kReadsNextFirst = true;
};

template <class Memory, class Orders = TaskMutexOrders>
struct TaskMutexes {
  using Mutex = typename Memory::template Atomic<uint32_t>;
  static constexpr uint32_t kHeld = 1u << 31;

  /// True: the task has the mutex. False: it stands in the list, and may be any thread's. enlist(first): `first` stands
  /// behind it; called before each try.
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

  /// Calls try_again(waiter) for all that stand in the list. next(waiter) is its link.
  template <class Next, class TryAgain>
  static void give(Mutex& mutex, Next&& next, TryAgain&& try_again) {
    uint32_t waiter = mutex.exchange(0, Orders::kGive) & ~kHeld;
    while (Orders::kWakesWaiters && waiter != 0) {
      uint32_t behind = 0;
      if constexpr (Orders::kReadsNextFirst) behind = next(waiter);
      try_again(waiter);
      if constexpr (!Orders::kReadsNextFirst) behind = next(waiter);
      waiter = behind;
    }
  }
};

}  // namespace tilewise::protocols
