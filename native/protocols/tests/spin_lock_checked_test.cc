// The spin lock in every execution: no two threads are inside at once.
#include "checker/testing.h"
#include "protocols/spin_lock.h"

using namespace tilewise::checker;
using tilewise::protocols::BasicSpinLock;
using tilewise::protocols::SpinLockOrders;

namespace {

/// The last thread only calls try_lock().
template <class Orders, int kThreads>
struct Counting {
  static constexpr int kNumThreads = kThreads;
  BasicSpinLock<CheckedMemory, Orders> lock;
  Plain<int> count = 0;
  int num_tried = 0;

  void run(int thread) {
    if (thread == kNumThreads - 1) {
      if (!lock.try_lock()) return;
      num_tried = 1;
    } else {
      lock.lock();
    }
    ++count;
    lock.unlock();
  }
  void end() { expect(count == kNumThreads - 1 + num_tried, "every increment"); }
  static const char* thread_name(int thread) { return thread == kNumThreads - 1 ? "trying" : "locking"; }
};

struct TakesRelaxed : SpinLockOrders {
  static constexpr auto kTake = std::memory_order_relaxed;
};
struct TriesRelaxed : SpinLockOrders {
  static constexpr auto kTry = std::memory_order_relaxed;
};
struct GivesRelaxed : SpinLockOrders {
  static constexpr auto kGive = std::memory_order_relaxed;
};

}  // namespace

CASE("the spin lock admits one thread at a time") {
  HOLDS(Counting<SpinLockOrders, 2>);
  HOLDS(Counting<SpinLockOrders, 3>);
  HOLDS(Counting<SpinLockOrders, 4>);
}

CASE("every order of the spin lock is needed") {
  FOUND(Counting<TakesRelaxed, 3>);
  FOUND(Counting<TriesRelaxed, 2>);
  FOUND(Counting<GivesRelaxed, 2>);
}

CHECKED_TEST_MAIN
