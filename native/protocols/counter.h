// A counter that only rises, with waiters for a value. Waiting occupies no thread.
//
// Purpose: signals between devices (comm/signal.h) and external events of the task engine. No wake-up can be lost:
// - wait() adds the waiter to the list and compares the value in ONE critical section.
// - post() changes the value and removes waiters from the list in ONE critical section. So either the post finds the
//   waiter in the list, or the waiter sees the new value.
// - add() takes no lock when there are no waiters. It adds, then reads `is_awaited`; a waiter sets `is_awaited`, then
//   compares. Each must see the other's first step. A counter that uses add() must not use post().
// Removed waiters are woken outside the lock. A woken waiter may be reused at once, so its link is read before.
// Callers: any thread. Blocks: waits for the lock. Memory: anywhere; all-zero bytes are a counter at zero.
//
// Link: the name of a waiter, an index or a pointer; Link{} names no waiter. next(link) is the waiter's own field for
// the link to the following waiter. The lock guards it while the waiter is in the list; afterwards the poster owns it.
#pragma once
#include <mutex>

#include "protocols/spin_lock.h"

namespace tilewise::protocols {

struct CounterOrders {
  static constexpr auto kPublish = std::memory_order_release;  // the value, for loads without the lock
  static constexpr auto kLook = std::memory_order_acquire;
  static constexpr auto kAdd = std::memory_order_seq_cst;  // before add() reads is_awaited
  static constexpr auto kSeeWaiting = std::memory_order_seq_cst;
  static constexpr auto kSayWaiting = std::memory_order_seq_cst;  // before wait() compares
  static constexpr auto kCompare = std::memory_order_seq_cst;
  static constexpr auto kSeeAdds = std::memory_order_acquire;  // adds of other threads, whose waiters this thread wakes
};

template <class Memory, class Link, class Orders = CounterOrders>
struct Counter {
  template <class T>
  using Plain = typename Memory::template Plain<T>;

  uint64_t load() const { return value.load(Orders::kLook); }

  /// Returns true if is_due(value); then the waiter is not in the list. If false, the waiter is in the list and belongs
  /// to the poster; the caller must not access it. enlist(first) must set the waiter's link to `first`.
  template <class IsDue, class Enlist>
  bool wait(Link waiter, IsDue&& is_due, Enlist&& enlist) {
    if (is_due(load())) return true;
    std::lock_guard guard(lock);
    const Link behind = waiters;
    enlist(behind);
    waiters = waiter;
    is_awaited.store(true, Orders::kSayWaiting);
    if (!is_due(value.load(Orders::kCompare))) return false;
    waiters = behind;
    return true;
  }

  /// Adds `count`, then removes due waiters from the list, as post() does.
  template <class IsDue, class Next>
  Link add(uint64_t count, IsDue&& is_due, Next&& next) {
    value.fetch_add(count, Orders::kAdd);
    if (!is_awaited.load(Orders::kSeeWaiting)) return Link{};
    std::lock_guard guard(lock);
    return detach(value.load(Orders::kSeeAdds), is_due, next);
  }

  /// Sets the value to change(value) and removes from the list every waiter with is_due(waiter, value). Returns the
  /// first of them, in the order of arrival.
  template <class Change, class IsDue, class Next>
  Link post(Change&& change, IsDue&& is_due, Next&& next) {
    std::lock_guard guard(lock);
    const uint64_t now = change(value.load(std::memory_order_relaxed));
    value.store(now, Orders::kPublish);
    return detach(now, is_due, next);
  }

  /// Calls wake(waiter), without the lock, for each waiter that post() or add() returned.
  template <class Next, class Wake>
  static void wake_all(Link due, Next&& next, Wake&& wake) {
    while (due != Link{}) {
      const Link behind = next(due);
      wake(due);
      due = behind;
    }
  }

  BasicSpinLock<Memory> lock;
  typename Memory::template Atomic<bool> is_awaited;  // the list may have a waiter; written under the lock
  typename Memory::template Atomic<uint64_t> value;
  Plain<Link> waiters;

 protected:
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

/// Waits for `count` counters, one after the other: wait(n) waits for the n-th counter. One thread at a time calls
/// this for a waiter: first the thread that begins, then the poster of the counter in whose list the waiter is.
/// num_begun is written before the wait, because a poster may continue at once. Returns true if all counters are due.
template <class Index, class Count, class Wait>
bool wait_in_turn(Index& num_begun, Count count, Wait&& wait) {
  while (num_begun < count) {
    const auto which = static_cast<Count>(num_begun);
    num_begun = which + 1;
    if (!wait(which)) return false;
  }
  return true;
}

}  // namespace tilewise::protocols
