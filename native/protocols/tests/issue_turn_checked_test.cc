// Issue turns in every execution: every task is submitted once, by one worker at a time, and each run ends once, after
// all of its tasks; the next one may begin at once.
#include "checker/testing.h"
#include "protocols/issue_turn.h"

using namespace tilewise::checker;
using tilewise::protocols::IssueTurn;
using tilewise::protocols::IssueTurnOrders;

namespace {

template <class Orders = IssueTurnOrders>
using Checked = IssueTurn<CheckedMemory, Orders>;

/// Two workers issue programs of kTasks tasks, in batches of one, and run what they have submitted. The worker that
/// ends a run begins the next. A third thread may hold the turn to read the state.
template <class Own, int kRuns, int kTasks, bool kLooks = false>
struct Issuing {
  static constexpr int kNumThreads = 2 + kLooks;
  Own issue_turn;
  Atomic<int> num_over;
  Plain<int> place = 0;  // of the instruction issuer
  Plain<int> written[kTasks];
  Plain<int> num_ended = 0;

  Issuing() {
    issue_turn.turn.set_name("turn");
    issue_turn.unfinished.set_name("unfinished");
    issue_turn.open();
  }
  void end_run() {
    for (Plain<int>& task : written) {
      expect(task == 1, "every task's work at the end");
      task = 0;
    }
    expect(place == kTasks, "the whole program issued");
    ++num_ended;
    num_over.store(num_ended, std::memory_order_release);
    if (num_ended == kRuns) return;
    place = 0;
    issue_turn.open();
  }
  void step(int task) {
    written[task] = 1;
    if (issue_turn.left()) end_run();
  }
  void run(int thread) {
    if (thread == 2) {
      const auto before = issue_turn.hold();
      expect(place >= 0, "a place that no worker changes meanwhile");
      issue_turn.release(before);
      return;
    }
    while (num_over.load(std::memory_order_acquire) < kRuns) {
      if (!issue_turn.is_free() || !issue_turn.take()) {
        relax();
        continue;
      }
      const int task = place;
      if (task == kTasks) {
        if (issue_turn.close(0)) end_run();
        continue;
      }
      place = task + 1;
      issue_turn.pause(1);
      step(task);
    }
  }
  void end() { expect(num_ended == kRuns, "each run ended once"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"worker", "second worker", "host"};
    return kNames[thread];
  }
};

struct OpensRelaxed : IssueTurnOrders {
  static constexpr auto kStart = std::memory_order_relaxed;
};
struct TakesRelaxed : IssueTurnOrders {
  static constexpr auto kTakeTurn = std::memory_order_relaxed;
};
struct PausesRelaxed : IssueTurnOrders {
  static constexpr auto kPause = std::memory_order_relaxed;
};
struct ClosesRelaxed : IssueTurnOrders {
  static constexpr auto kClose = std::memory_order_relaxed;
};
struct LeavesWithoutAcquire : IssueTurnOrders {
  static constexpr auto kLeave = std::memory_order_release;
};
struct LeavesWithoutRelease : IssueTurnOrders {
  static constexpr auto kLeave = std::memory_order_acquire;
};
struct CountsBeforeClosing : Checked<> {
  bool close(int64_t count) {
    const int64_t change = count - kOpen;
    const bool is_over = unfinished.fetch_add(change, IssueTurnOrders::kLeave) + change == 0;
    turn.store(kClosed, IssueTurnOrders::kClose);
    return is_over;
  }
};
struct TakesWithoutComparing : Checked<> {
  bool take() {
    if (turn.load(std::memory_order_acquire) != kFree) return false;
    turn.store(kTaken, std::memory_order_relaxed);
    return true;
  }
};

}  // namespace

CASE("every task is submitted once and every run ends once, after all of its tasks") {
  HOLDS(Issuing<Checked<>, 1, 2>);
  HOLDS(Issuing<Checked<>, 2, 1>);
  HOLDS(Issuing<Checked<>, 1, 2, true>);
  DEEP_HOLDS(Issuing<Checked<>, 2, 2>);
}

CASE("every memory order and every step of the issue turn is needed") {
  FOUND(Issuing<Checked<OpensRelaxed>, 2, 1>);
  FOUND(Issuing<Checked<TakesRelaxed>, 1, 2>);
  FOUND(Issuing<Checked<PausesRelaxed>, 1, 2>);
  FOUND(Issuing<Checked<ClosesRelaxed>, 1, 2, true>);
  FOUND(Issuing<Checked<LeavesWithoutAcquire>, 1, 2>);
  FOUND(Issuing<Checked<LeavesWithoutRelease>, 1, 2>);
  FOUND(Issuing<CountsBeforeClosing, 2, 1>);
  FOUND(Issuing<TakesWithoutComparing, 1, 2>);
}

CHECKED_TEST_MAIN
