// The biased lock in every execution: its owner and one or two other threads are never inside together.
#include "checker/testing.h"
#include "protocols/biased_lock.h"

using namespace tilewise::checker;
using tilewise::protocols::BiasedLock;
using tilewise::protocols::BiasedLockOrders;

namespace {

template <class Orders = BiasedLockOrders>
using Checked = BiasedLock<CheckedMemory, Orders>;

/// The owner takes the lock kTimes, every other thread once.
template <class Lock, int kNewcomers, int kTimes, bool kFences = false>
struct Sharing {
  static constexpr int kNumThreads = 1 + kNewcomers;
  Lock lock;
  Plain<int> count = 0;

  Sharing() {
    lock.is_owner_inside.set_name("is_owner_inside");
    lock.sharing.set_name("sharing");
  }
  void take(bool is_owner) {
    const bool is_light = is_owner && lock.enter_lightly(kFences);
    if (!is_light) {
      lock.enter(kFences, [](auto&& done) {
        while (!done()) relax();
      });
    }
    ++count;
    if (is_light) {
      lock.leave_lightly();
    } else {
      lock.leave();
    }
  }
  void run(int thread) {
    for (int n = 0; n < (thread == 0 ? kTimes : 1); ++n) take(thread == 0);
  }
  void end() { expect(count == kTimes + kNewcomers, "every increment"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"owner", "newcomer", "second newcomer"};
    return kNames[thread];
  }
};

struct LeavesRelaxed : BiasedLockOrders {
  static constexpr auto kLeave = std::memory_order_relaxed;
};
struct BacksOutRelaxed : BiasedLockOrders {
  static constexpr auto kBackOut = std::memory_order_relaxed;
};
struct SeesLeftRelaxed : BiasedLockOrders {
  static constexpr auto kSeeLeft = std::memory_order_relaxed;
};
struct SeesSettledRelaxed : BiasedLockOrders {
  static constexpr auto kSeeSettled = std::memory_order_relaxed;
};
struct WithoutLightBarrier : CheckedMemory {
  static void light_barrier(bool /*fences*/) {}
};
struct WithoutHeavyBarrier : CheckedMemory {
  static void heavy_barrier(bool /*fences*/) {}
};
struct OwnerLooksOnce : Checked<> {
  bool enter_lightly(bool fences) {
    if (sharing.load(std::memory_order_relaxed) != kOwned) return false;
    is_owner_inside.store(1, std::memory_order_relaxed);
    CheckedMemory::light_barrier(fences);
    return true;
  }
};
struct OthersDoNotWait : Checked<> {
  template <class Outwait>
  void enter(bool fences, Outwait&& outwait) {
    bool has_lock = false;
    Checked<>::enter(fences, [&](auto&& done) {
      if (!has_lock) outwait(done);
      has_lock = true;
    });
  }
};
struct SettlesBeforeBarrier : Checked<> {
  template <class Outwait>
  void enter(bool fences, Outwait&& outwait) {
    if (sharing.load(BiasedLockOrders::kSeeSettled) == kOwned) {
      sharing.store(kShared, std::memory_order_relaxed);
      CheckedMemory::heavy_barrier(fences);
    }
    outwait([&] { return lock.try_lock(); });
    outwait([&] { return is_owner_inside.load(BiasedLockOrders::kSeeLeft) == 0; });
  }
};

}  // namespace

CASE("the biased lock admits one thread at a time, with a barrier on one side or fences on both") {
  HOLDS(Sharing<Checked<>, 1, 2>);
  HOLDS(Sharing<Checked<>, 2, 1>);
  HOLDS(Sharing<Checked<>, 1, 2, true>);
  HOLDS(Sharing<Checked<>, 1, 4>);
  DEEP_HOLDS(Sharing<Checked<>, 2, 1, true>);
}

CASE("every order and step of the biased lock is needed") {
  FOUND(Sharing<Checked<LeavesRelaxed>, 1, 2>);
  FOUND(Sharing<Checked<BacksOutRelaxed>, 1, 2>);
  FOUND(Sharing<Checked<SeesLeftRelaxed>, 1, 2>);
  FOUND(Sharing<Checked<SeesSettledRelaxed>, 2, 1>);
  FOUND(Sharing<BiasedLock<WithoutLightBarrier>, 1, 1>);
  FOUND(Sharing<BiasedLock<WithoutHeavyBarrier>, 1, 1>);
  FOUND(Sharing<OwnerLooksOnce, 1, 1>);
  FOUND(Sharing<OthersDoNotWait, 1, 1>);
}

CASE("a newcomer that enters while another's barrier has not finished is found") {
  FOUND(Sharing<SettlesBeforeBarrier, 2, 1>);
}

CHECKED_TEST_MAIN
