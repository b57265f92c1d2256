// A counter that rises, and those that wait for a value of it without holding a thread.
//
// Purpose: signals between devices (comm/signal.h) and external events of the engine. No wake-up can be lost. A waiter
// registers and compares in ONE critical section of the counter's lock. A post adds and detaches in ONE critical
// section of it: either the waiter's section comes first and the post finds it in the list, or the post's comes first
// and the waiter sees the new value. An add needs no lock where nothing waits: it adds, then looks whether something
// does; the waiter says that it does, then compares; and each must see the other's first step. What was detached is
// woken outside the lock; a woken waiter may be used again at once, so its link is read before. A counter that is added
// to is not posted otherwise. Who may call: any thread. Blocks: for the lock. Memory: wherever it lies; all-zero bytes
// are a counter at zero.
//
// Link: how a waiter is named, an index or a pointer; Link{} is none. next(link) is the waiter's own link to the one
// behind it, guarded by the lock while the waiter is in the list, then its poster's.
#pragma once
#include <mutex>

#include "protocols/spin_lock.h"

namespace tilewise::protocols {

struct CounterOrders {
  static constexpr auto kPublish = std::memory_order_release;  // the value, for looks without the lock
  static constexpr auto kLook = std::memory_order_acquire;
  static constexpr auto kAdd = std::memory_order_seq_cst;  // before the look for waiters
  static constexpr auto kSeeWaiting = std::memory_order_seq_cst;
  static constexpr auto kSayWaiting = std::memory_order_seq_cst;  // before the last comparison
  static constexpr auto kCompare = std::memory_order_seq_cst;
  static constexpr auto kSeeAdds = std::memory_order_acquire;  // of other threads, for which this one wakes
  static constexpr bool kComparesInSection = true;
  static constexpr bool kPostsInOneSection = true;
  static constexpr bool kReadsNextFirst = true;
  static constexpr bool kCountsBeforeAsking = true;
};

template <class Memory, class Link, class Orders = CounterOrders>
struct Counter {
  template <class T>
  using Plain = typename Memory::template Plain<T>;

  uint64_t load() const { return value.load(Orders::kLook); }

  /// True: is_due(value) says that there is nothing to wait for. Otherwise enlist(first) has made `first` what stands
  /// behind the waiter, and the waiter is the poster's: nothing of it may be touched.
  template <class IsDue, class Enlist>
  bool wait(Link waiter, IsDue&& is_due, Enlist&& enlist) {
    if (is_due(load())) return true;
    std::lock_guard guard(lock);
    const Link behind = waiters;
    enlist(behind);
    waiters = waiter;
    is_awaited.store(true, Orders::kSayWaiting);
    if (!Orders::kComparesInSection || !is_due(value.load(Orders::kCompare))) return false;
    waiters = behind;
    return true;
  }

  /// Adds, and takes from the list all that are due then, as post().
  template <class IsDue, class Next>
  Link add(uint64_t count, IsDue&& is_due, Next&& next) {
    value.fetch_add(count, Orders::kAdd);
    if (!is_awaited.load(Orders::kSeeWaiting)) return Link{};
    std::lock_guard guard(lock);
    return detach(value.load(Orders::kSeeAdds), is_due, next);
  }

  /// Makes the value what change(value) says, and takes from the list all that is_due(waiter, value) names. Returns the
  /// first of them, in the order in which they came.
  template <class Change, class IsDue, class Next>
  Link post(Change&& change, IsDue&& is_due, Next&& next) {
    std::lock_guard guard(lock);
    const uint64_t now = change(value.load(std::memory_order_relaxed));
    if constexpr (Orders::kPostsInOneSection) value.store(now, Orders::kPublish);
    const Link due = detach(now, is_due, next);
    if constexpr (!Orders::kPostsInOneSection) {
      lock.unlock();
      lock.lock();
      value.store(now, Orders::kPublish);
    }
    return due;
  }

  /// What post() returned, without the lock: once per waiter.
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
  typename Memory::template Atomic<bool> is_awaited;  // the list may have one; written under the lock
  typename Memory::template Atomic<uint64_t> value;
  Plain<Link> waiters;

 private:
  template <class IsDue, class Next>
  Link detach(uint64_t now, IsDue& is_due, Next& next) {
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
    if (waiters == Link{}) is_awaited.store(false, std::memory_order_relaxed);
    return due;
  }
};

/// One waiter that waits for `count` counters, one after the other: wait(n) asks for the n-th. Exactly one thread at a
/// time has it: the one that asks first, then the poster of the counter in which it waits. True: all are met.
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
