// Walks in every execution: every task is submitted once, by one worker at a time, and each run ends once, behind all
// of its tasks; the next one may begin at once.
#include "checker/testing.h"
#include "protocols/walk.h"

using namespace tilewise::checker;
using tilewise::protocols::Walk;
using tilewise::protocols::WalkOrders;

namespace {

/// Two workers walk programs of kTasks tasks, in batches of one, and run what they have submitted. The worker that ends
/// a run begins the next. A third thread may hold the walk for a look at it.
template <class Orders, int kRuns, int kTasks, bool kLooks = false>
struct Walking {
  static constexpr int kNumThreads = 2 + kLooks;
  Walk<CheckedMemory, Orders> walk;
  Atomic<int> num_over;
  Plain<int> place = 0;             // of the walker
  Plain<int> written[kTasks];
  Plain<int> num_ended = 0;

  Walking() {
    walk.turn.set_name("turn");
    walk.unfinished.set_name("unfinished");
    walk.open();
  }
  void end_run() {
    for (Plain<int>& task : written) {
      expect(task == 1, "every task's work at the end");
      task = 0;
    }
    expect(place == kTasks, "the whole program walked");
    ++num_ended;
    num_over.store(num_ended, std::memory_order_release);
    if (num_ended == kRuns) return;
    place = 0;
    walk.open();
  }
  void step(int task) {
    written[task] = 1;
    if (walk.left()) end_run();
  }
  void run(int thread) {
    if (thread == 2) {
      const auto before = walk.hold();
      expect(place >= 0, "a place that no worker changes now");
      walk.let_go(before);
      return;
    }
    while (num_over.load(std::memory_order_acquire) < kRuns) {
      if (!walk.is_free() || !walk.take()) {
        relax();
        continue;
      }
      const int task = place;
      if (task == kTasks) {
        if (walk.close(0)) end_run();
        continue;
      }
      place = task + 1;
      walk.pause(1);
      step(task);
    }
  }
  void end() { expect(num_ended == kRuns, "each run ended once"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"worker", "second worker", "host"};
    return kNames[thread];
  }
};

struct OpensRelaxed : WalkOrders {
  static constexpr auto kOpenWalk = std::memory_order_relaxed;
};
struct TakesRelaxed : WalkOrders {
  static constexpr auto kTakeTurn = std::memory_order_relaxed;
};
struct PausesRelaxed : WalkOrders {
  static constexpr auto kPause = std::memory_order_relaxed;
};
struct ClosesRelaxed : WalkOrders {
  static constexpr auto kClose = std::memory_order_relaxed;
};
struct LeavesWithoutAcquire : WalkOrders {
  static constexpr auto kLeave = std::memory_order_release;
};
struct LeavesWithoutRelease : WalkOrders {
  static constexpr auto kLeave = std::memory_order_acquire;
};
struct CountsBeforeClosing : WalkOrders {
  static constexpr bool kClosesBeforeCounting = false;
};
struct TakesWithoutComparing : WalkOrders {
  static constexpr bool kTakesByCompare = false;
};

}  // namespace

CASE("every task is submitted once and every run ends once, behind all of its tasks") {
  HOLDS(Walking<WalkOrders, 1, 2>);
  HOLDS(Walking<WalkOrders, 2, 1>);
  HOLDS(Walking<WalkOrders, 1, 2, true>);
  DEEP_HOLDS(Walking<WalkOrders, 2, 2>);
}

CASE("every order and step of the walk is needed") {
  FOUND(Walking<OpensRelaxed, 2, 1>);
  FOUND(Walking<TakesRelaxed, 1, 2>);
  FOUND(Walking<PausesRelaxed, 1, 2>);
  FOUND(Walking<ClosesRelaxed, 1, 2, true>);
  FOUND(Walking<LeavesWithoutAcquire, 1, 2>);
  FOUND(Walking<LeavesWithoutRelease, 1, 2>);
  FOUND(Walking<CountsBeforeClosing, 2, 1>);
  FOUND(Walking<TakesWithoutComparing, 1, 2>);
}

CHECKED_TEST_MAIN
