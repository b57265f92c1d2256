// Lifetimes in every execution: ended exactly once, after everything that was done in them.
#include "checker/testing.h"
#include "protocols/countdown.h"

using namespace tilewise::checker;
using tilewise::protocols::CountdownOrders;
using tilewise::protocols::Countdowns;

namespace {

template <class Orders = CountdownOrders>
using Checked = Countdowns<CheckedMemory, Orders>;

/// A piece of memory with two uses by its owner and one by another submitter, whose tasks begin and end around its
/// closing. The thread that frees it writes it.
template <class Own>
struct Lending {
  static constexpr int kNumThreads = 3;
  typename Own::Loan loan;
  Atomic<int> submitted[2];
  Plain<int> bytes[3] = {0, 0, 0};
  Plain<int> num_freed = 0;

  Lending() {
    loan.state.set_name("state");
    loan.uses.set_name("uses");
    loan.open();
  }
  void free() {
    ++num_freed;
    for (Plain<int>& byte : bytes) byte = 9;
  }
  void run(int thread) {
    if (thread == 0) {  // the owner submits two tasks that use it; the scope's end closes it
      for (Atomic<int>& task : submitted) {
        loan.use();
        task.store(1, std::memory_order_release);
      }
      if (loan.close()) free();
      return;
    }
    while (submitted[thread - 1].load(std::memory_order_acquire) == 0) relax();
    if (thread == 2) {  // this task's own submission of a third, in its submitter, before it ends
      loan.use_of_another();
      bytes[2] = 1;
      if (loan.give_back(1)) free();
    }
    bytes[thread - 1] = 1;
    if (loan.give_back(1)) free();
  }
  void end() { expect(num_freed == 1, "freed once"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"owner", "worker", "second worker"};
    return kNames[thread];
  }
};

/// A parent that submits two children; the count begins at 1, for its kernel. The last one completes the parent.
/// kWaits: the parent's kernel waits for them.
template <class Own, bool kCountsLate = false, bool kWaits = false>
struct Family {
  static constexpr int kNumThreads = 3;
  Atomic<uint32_t> left{1};
  Atomic<int> started[2];
  Plain<int> written[3] = {0, 0, 0};
  Plain<int> num_completed = 0;

  void drop(int who) {
    written[who] = 1;
    if (!Own::leave(left)) return;
    ++num_completed;
    for (const Plain<int>& one : written) expect(one == 1, "all of the family at its end");
  }
  void run(int thread) {
    if (thread > 0) {
      while (started[thread - 1].load(std::memory_order_acquire) == 0) relax();
      return drop(thread);
    }
    for (Atomic<int>& child : started) {
      if (!kCountsLate) Own::join(left);
      child.store(1, std::memory_order_release);
      if (kCountsLate) Own::join(left);
    }
    if (kWaits) {
      while (!Own::is_one_left(left)) relax();
      expect(written[1] == 1 && written[2] == 1, "what the children wrote");
    }
    drop(0);
  }
  void end() { expect(num_completed == 1, "completed once"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"parent", "child", "second child"};
    return kNames[thread];
  }
};

/// Three producers arrive at one task; the last makes it ready.
template <class Own>
struct Arrivals {
  static constexpr int kNumThreads = 3;
  Atomic<uint32_t> left{3};
  Plain<int> written[3] = {0, 0, 0};
  Plain<int> num_ready = 0;

  void run(int thread) {
    written[thread] = 1;
    if (!Own::arrive(left)) return;
    ++num_ready;
    for (const Plain<int>& one : written) expect(one == 1, "what all producers wrote");
  }
  void end() { expect(num_ready == 1, "ready once"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"producer", "second producer", "third producer"};
    return kNames[thread];
  }
};

struct LeavesWithoutAcquire : CountdownOrders {
  static constexpr auto kLeave = std::memory_order_release;
};
struct LeavesWithoutRelease : CountdownOrders {
  static constexpr auto kLeave = std::memory_order_acquire;
};
struct SeesLastRelaxed : CountdownOrders {
  static constexpr auto kSeeLast = std::memory_order_relaxed;
};
struct LeavesInTwoSteps : Checked<> {
  template <class T>
  static bool leave(Atomic<T>& left, T count = 1) {
    const T before = left.load(std::memory_order_acquire);
    left.store(before - count, std::memory_order_release);
    return before == count;
  }
  template <class T>
  static bool arrive(Atomic<T>& left) {
    return is_one_left(left) || leave(left);
  }
};
struct ClosesInTwoSteps : Checked<> {
  struct Loan : Checked<>::Loan {
    bool close() {
      if (state.fetch_sub(kOpen, CountdownOrders::kLeave) == kOpen) return true;
      const int64_t own = uses.load(std::memory_order_relaxed);
      return state.fetch_add(own, CountdownOrders::kLeave) + own == 0;
    }
  };
};

}  // namespace

CASE("a piece of the heap is freed exactly once, after its scope and every task") { HOLDS(Lending<Checked<>>); }
CASE("a parent completes once, after its kernel and every child") { HOLDS(Family<Checked<>>); }
CASE("a parent that waits for its children sees what they wrote") { HOLDS(Family<Checked<>, false, true>); }
CASE("a task becomes ready once, after all of its producers") { HOLDS(Arrivals<Checked<>>); }

CASE("every order and step of the countdowns is needed") {
  FOUND(Lending<Checked<LeavesWithoutAcquire>>);
  FOUND(Lending<Checked<LeavesWithoutRelease>>);
  FOUND(Lending<ClosesInTwoSteps>);
  FOUND(Family<Checked<LeavesWithoutAcquire>>);
  FOUND(Family<Checked<LeavesWithoutRelease>>);
  FOUND(Family<LeavesInTwoSteps>);
  FOUND(Family<Checked<SeesLastRelaxed>, false, true>);
  FOUND(Arrivals<Checked<SeesLastRelaxed>>);
  FOUND(Arrivals<LeavesInTwoSteps>);
}

CASE("a child that starts before it is counted is found") { FOUND(Family<Checked<>, true>); }

CHECKED_TEST_MAIN
