// A counter that rises, and those that wait for a value of it without holding a thread.
//
// Purpose: signals between devices (comm/signal.h) and external events of the engine. No wake-up can be lost: a waiter
// compares and registers in ONE critical section of the counter's lock, and a raise adds and detaches in ONE critical
// section of it. Either the waiter's section comes first and the raise finds it in the list, or the raise's comes first
// and the waiter sees the new value. What the raise has detached it wakes outside the lock; a woken waiter may be used
// again at once, so its link is read before. Who may call: any thread. Blocks: for the lock. Memory: wherever it lies;
// all-zero bytes are a counter at zero.
//
// Link: how a waiter is named, an index or a pointer; Link{} is none. next(link) is the waiter's own link to the one
// behind it, guarded by the lock while the waiter is in the list, then its raiser's.
#pragma once
#include <mutex>

#include "protocols/spin_lock.h"

namespace tilewise::protocols {

struct CounterOrders {
  static constexpr auto kPublish = std::memory_order_release;  // the value, for looks without the lock
  static constexpr auto kLook = std::memory_order_acquire;
  static constexpr bool kComparesInSection = true;
  static constexpr bool kRaisesInOneSection = true;
  static constexpr bool kReadsNextFirst = true;
  static constexpr bool kCountsBeforeAsking = true;
};

template <class Memory, class Link, class Orders = CounterOrders>
struct Counter {
  template <class T>
  using Plain = typename Memory::template Plain<T>;

  uint64_t load() const { return value.load(Orders::kLook); }

  /// True: is_due(value) says that there is nothing to wait for. Otherwise enlist(first) has made `first` what stands
  /// behind the waiter, and the waiter is the raiser's: nothing of it may be touched.
  template <class IsDue, class Enlist>
  bool wait(Link waiter, IsDue&& is_due, Enlist&& enlist) {
    bool is_met = false;
    if constexpr (!Orders::kComparesInSection) is_met = is_due(value.load(Orders::kLook));
    std::lock_guard guard(lock);
    if constexpr (Orders::kComparesInSection) is_met = is_due(value.load(std::memory_order_relaxed));
    if (is_met) return true;
    enlist(waiters);
    waiters = waiter;
    return false;
  }

  /// Makes the value what change(value) says, and takes from the list all that is_due(waiter, value) names. Returns the
  /// first of them, in the order in which they came.
  template <class Change, class IsDue, class Next>
  Link raise(Change&& change, IsDue&& is_due, Next&& next) {
    std::lock_guard guard(lock);
    const uint64_t now = change(value.load(std::memory_order_relaxed));
    if constexpr (Orders::kRaisesInOneSection) value.store(now, Orders::kPublish);
    Link due{};
    for (Plain<Link>* link = &waiters; *link != Link{};) {
      const Link waiter = *link;
      Plain<Link>& behind = next(waiter);
      if (!is_due(waiter, now)) {
        link = &behind;
        continue;
      }
      *link = behind;
      behind = due;
      due = waiter;
    }
    if constexpr (!Orders::kRaisesInOneSection) {
      lock.unlock();
      lock.lock();
      value.store(now, Orders::kPublish);
    }
    return due;
  }

  /// What raise() returned, without the lock: once per waiter.
  template <class Next, class Wake>
  static void wake_all(Link due, Next&& next, Wake&& wake) {
    while (due != Link{}) {
      Link behind{};
      if constexpr (Orders::kReadsNextFirst) behind = next(due);
      wake(due);
      if constexpr (!Orders::kReadsNextFirst) behind = next(due);
      due = behind;
    }
  }

  BasicSpinLock<Memory> lock;
  typename Memory::template Atomic<uint64_t> value;
  Plain<Link> waiters;
};

/// One waiter that waits for `count` counters, one after the other: wait(n) asks for the n-th. Exactly one thread at a
/// time has it: the one that asks first, then the raiser of the counter in which it waits. True: all are met.
template <class Orders = CounterOrders, class Index, class Count, class Wait>
bool ask_in_turn(Index& num_asked, Count count, Wait&& wait) {
  while (num_asked < count) {
    const auto which = static_cast<Count>(num_asked);
    if constexpr (Orders::kCountsBeforeAsking) num_asked = which + 1;
    const bool is_met = wait(which);
    if constexpr (!Orders::kCountsBeforeAsking) num_asked = which + 1;
    if (!is_met) return false;
  }
  return true;
}

}  // namespace tilewise::protocols
