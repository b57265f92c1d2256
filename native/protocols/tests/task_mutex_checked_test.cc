// TaskMutexes of commuting tasks in every execution: each task runs once, one at a time.
#include "checker/testing.h"
#include "protocols/task_mutex.h"

using namespace tilewise::checker;
using tilewise::protocols::TaskMutexes;
using tilewise::protocols::TaskMutexOrders;

namespace {

template <class Orders = TaskMutexOrders>
using Checked = TaskMutexes<CheckedMemory, Orders>;

/// Each thread submits one task; the thread that releases a mutex runs the tasks that get it then.
template <class Own, int kTasks>
struct Commuting {
  static constexpr int kNumThreads = kTasks;
  struct Task {
    Plain<uint32_t> next = 0;
    Plain<int> num_runs = 0;
  };
  typename Own::Mutex mutex{0};
  Plain<int> bytes = 0;
  Task tasks[kTasks];

  Commuting() { mutex.set_name("mutex"); }
  Task& waiting(uint32_t waiter) {
    expect(waiter >= 1 && waiter <= kTasks, "a waiter in the list");
    return tasks[waiter - 1];
  }
  bool take(uint32_t number) {
    Task& me = tasks[number];
    return Own::take(mutex, number + 1, [&](uint32_t first) { me.next = first; });
  }
  void run(int thread) {
    uint32_t ready[kTasks];
    int num_ready = 0;
    if (take(thread)) ready[num_ready++] = thread;
    while (num_ready > 0) {
      Task& task = tasks[ready[--num_ready]];
      ++task.num_runs;
      ++bytes;
      task.next = 77;  // in another list
      Own::give(
          mutex, [&](uint32_t waiter) -> Plain<uint32_t>& { return waiting(waiter).next; },
          [&](uint32_t waiter) {
            if (take(waiter - 1)) ready[num_ready++] = waiter - 1;
          });
    }
  }
  void end() {
    for (const Task& task : tasks) expect(task.num_runs == 1, "every task run once");
    expect(bytes == kTasks, "every task's addition");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"first", "second", "third", "fourth"};
    return kNames[thread];
  }
};

struct TakesRelaxed : TaskMutexOrders {
  static constexpr auto kTake = std::memory_order_relaxed;
};
struct StandsRelaxed : TaskMutexOrders {
  static constexpr auto kStand = std::memory_order_relaxed;
};
struct GivesWithoutRelease : TaskMutexOrders {
  static constexpr auto kGive = std::memory_order_acquire;
};
struct GivesWithoutAcquire : TaskMutexOrders {
  static constexpr auto kGive = std::memory_order_release;
};
struct ForgetsWaiters : Checked<> {
  template <class Next, class TryAgain>
  static void give(Mutex& mutex, Next&&, TryAgain&&) {
    mutex.exchange(0, TaskMutexOrders::kGive);
  }
};
struct ReadsNextLate : Checked<> {
  template <class Next, class TryAgain>
  static void give(Mutex& mutex, Next&& next, TryAgain&& try_again) {
    uint32_t waiter = mutex.exchange(0, TaskMutexOrders::kGive) & ~kHeld;
    while (waiter != 0) {
      try_again(waiter);
      waiter = next(waiter);
    }
  }
};

}  // namespace

CASE("commuting tasks run once each, one at a time") {
  HOLDS(Commuting<Checked<>, 2>);
  HOLDS(Commuting<Checked<>, 3>);
  HOLDS_WITH(weak_compares(), Commuting<Checked<>, 2>);
  if (is_deep) HOLDS_WITH(weak_compares(), Commuting<Checked<>, 3>);
}

CASE("every order and step of the mutexes is needed") {
  FOUND(Commuting<Checked<TakesRelaxed>, 2>);
  FOUND(Commuting<Checked<StandsRelaxed>, 2>);
  FOUND(Commuting<Checked<GivesWithoutRelease>, 2>);
  FOUND(Commuting<Checked<GivesWithoutAcquire>, 2>);
  FOUND(Commuting<ForgetsWaiters, 2>);
  FOUND(Commuting<ReadsNextLate, 3>);
}

CHECKED_TEST_MAIN
