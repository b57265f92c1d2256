// A lock that costs nothing while one thread takes it.
//
// Purpose: the owner, one fixed thread, only says that it is inside, and looks whether the lock is shared. The first
// other thread that wants it ends this for good: it says so, makes every thread issue a fence (memory.h), and waits
// until the owner is outside. Whichever of the two came first, the other sees it. From then on all use the spin lock.
// A thread may pass by the barrier only when it knows that another's is over. Who may call: any thread; enter_lightly
// the owner. Blocks: for the lock; how is the caller's. Memory: wherever it lies; all-zero bytes are a free lock.
#pragma once
#include "protocols/spin_lock.h"

namespace tilewise::protocols {

struct BiasedLockOrders {
  static constexpr auto kLeave = std::memory_order_release;      // the owner, lightly
  static constexpr auto kBackOut = std::memory_order_release;    // it has seen that it must not stay
  static constexpr auto kSeeLeft = std::memory_order_acquire;    // the others' look at the owner
  static constexpr auto kSeeSettled = std::memory_order_acquire;  // that another's barrier, which releases, is over
  static constexpr bool kOwnerHasBarrier = true;
  static constexpr bool kOthersHaveBarrier = true;
  static constexpr bool kOwnerLooksAgain = true;
  static constexpr bool kOthersWaitForOwner = true;
  static constexpr bool kSettlesAfterBarrier = true;
};

template <class Memory, class Orders = BiasedLockOrders>
struct BiasedLock {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;
  enum Sharing : uint32_t { kOwned = 0, kEnding, kShared };

  /// Owner only. False: the lock is shared now.
  [[gnu::always_inline]] bool enter_lightly(bool fences) {
    if (sharing.load(std::memory_order_relaxed) != kOwned) return false;
    is_owner_inside.store(1, std::memory_order_relaxed);
    if constexpr (Orders::kOwnerHasBarrier) Memory::light_barrier(fences);
    if (!Orders::kOwnerLooksAgain || sharing.load(std::memory_order_relaxed) == kOwned) return true;
    is_owner_inside.store(0, Orders::kBackOut);
    return false;
  }
  [[gnu::always_inline]] void leave_lightly() { is_owner_inside.store(0, Orders::kLeave); }

  /// outwait(done) returns when done() does so with true.
  template <class Outwait>
  void enter(bool fences, Outwait&& outwait) {
    if (sharing.load(Orders::kSeeSettled) != kShared) {
      sharing.store(Orders::kSettlesAfterBarrier ? kEnding : kShared, std::memory_order_relaxed);
      if constexpr (Orders::kOthersHaveBarrier) Memory::heavy_barrier(fences);
      if constexpr (Orders::kSettlesAfterBarrier) sharing.store(kShared, std::memory_order_relaxed);
    }
    outwait([&] { return lock.try_lock(); });
    if constexpr (!Orders::kOthersWaitForOwner) return;
    outwait([&] { return is_owner_inside.load(Orders::kSeeLeft) == 0; });
  }
  void leave() { lock.unlock(); }

  BasicSpinLock<Memory> lock;
  Atomic<uint32_t> is_owner_inside;
  Atomic<uint32_t> sharing;
};

}  // namespace tilewise::protocols
