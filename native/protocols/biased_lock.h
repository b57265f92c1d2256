// A biased lock: as long as only its owner takes it, taking it needs no atomic read-modify-write.
//
// Purpose: the owner is one fixed thread. It sets a flag while it is inside, and checks whether the lock is shared. The
// first other thread that wants the lock makes it shared for good: it sets `sharing`, makes every thread issue a fence
// (memory.h), and waits until the owner is outside. Of the two threads, the one that writes second sees the other's
// write. From then on every thread uses the spin lock. A thread may skip the barrier only when it knows that another
// thread's barrier has finished. Callers: any thread; enter_lightly() and leave_lightly() only the owner. Blocks: waits
// for the lock; the caller says how. Memory: anywhere; all-zero bytes are a free lock.
#pragma once
#include "protocols/spin_lock.h"

namespace tilewise::protocols {

struct BiasedLockOrders {
  static constexpr auto kLeave = std::memory_order_release;  // the owner leaves without the spin lock
  static constexpr auto kBackOut = std::memory_order_release;  // the owner has seen that the lock is shared
  static constexpr auto kSeeLeft = std::memory_order_acquire;  // another thread reads the owner's flag
  static constexpr auto kSeeSettled = std::memory_order_acquire;  // another thread's barrier, which releases, is over
};

template <class Memory, class Orders = BiasedLockOrders>
struct BiasedLock {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;
  enum Sharing : uint32_t { kOwned = 0, kEnding, kShared };

  /// Owner only. Returns false if the lock is shared; then call enter().
  [[gnu::always_inline]] bool enter_lightly(bool fences) {
    if (sharing.load(std::memory_order_relaxed) != kOwned) return false;
    is_owner_inside.store(1, std::memory_order_relaxed);
    Memory::light_barrier(fences);
    if (sharing.load(std::memory_order_relaxed) == kOwned) return true;
    is_owner_inside.store(0, Orders::kBackOut);
    return false;
  }
  [[gnu::always_inline]] void leave_lightly() { is_owner_inside.store(0, Orders::kLeave); }

  /// wait_for(done) must return only after done() has returned true.
  template <class WaitFor>
  void enter(bool fences, WaitFor&& wait_for) {
    if (sharing.load(Orders::kSeeSettled) != kShared) {
      sharing.store(kEnding, std::memory_order_relaxed);
      Memory::heavy_barrier(fences);
      sharing.store(kShared, std::memory_order_relaxed);
    }
    wait_for([&] { return lock.try_lock(); });
    wait_for([&] { return is_owner_inside.load(Orders::kSeeLeft) == 0; });
  }
  void leave() { lock.unlock(); }

  BasicSpinLock<Memory> lock;
  Atomic<uint32_t> is_owner_inside;
  Atomic<uint32_t> sharing;
};

}  // namespace tilewise::protocols
