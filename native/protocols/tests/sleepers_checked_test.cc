// Sleeping and waking in every execution: no thread sleeps over work, over the end of what it waits for, or over the
// end of everything. A thread that is not woken sleeps for ever here, and that is a deadlock.
#include "checker/testing.h"
#include "protocols/sleepers.h"
#include "protocols/task_word.h"

using namespace tilewise::checker;
using tilewise::protocols::Sleepers;
using tilewise::protocols::SleepersOrders;
using tilewise::protocols::TaskWords;

namespace {

/// kProducers threads make one piece of work each; kWorkers take what there is. Without work, a worker sleeps.
template <class Orders, int kProducers, int kWorkers, bool kFences>
struct Working {
  static constexpr int kNumThreads = kProducers + kWorkers;
  Sleepers<CheckedMemory, Orders> parked;
  Atomic<int> work[kProducers];
  Atomic<int> num_done;

  Working() {
    parked.count.set_name("parked");
    parked.word.set_name("word");
    for (int p = 0; p < kProducers; ++p) work[p].set_name("work", p);
  }
  void run(int thread) {
    if (thread < kProducers) {
      work[thread].store(1, std::memory_order_release);
      parked.barrier(kFences);
      if (parked.has_any()) parked.wake(1, false);
      return;
    }
    const int wanted = kProducers / kWorkers;  // each takes as many
    for (int done = 0; done < wanted;) {
      bool has_found = false;
      for (Atomic<int>& piece : work) {
        int one = 1;
        if (done == wanted || piece.load(std::memory_order_relaxed) != 1) continue;
        if (!piece.compare_exchange_strong(one, 2, std::memory_order_acquire, std::memory_order_relaxed)) continue;
        has_found = true;
        ++done;
      }
      if (has_found || done == wanted) continue;
      const auto stays_awake = [&] {
        for (const Atomic<int>& piece : work) {
          if (piece.load(std::memory_order_relaxed) == 1) return true;
        }
        return false;
      };
      const uint32_t seen = parked.look();
      parked.sleep(seen, kFences, false, stays_awake, [] { return int64_t{-1}; });
    }
  }
  void end() {
    for (const Atomic<int>& piece : work) expect(piece.load() == 2, "all work taken");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kWorker[] = {"worker", "second worker"};
    static constexpr const char* kProducer[] = {"producer", "second producer"};
    return thread < kProducers ? kProducer[thread] : kWorker[thread - kProducers];
  }
};

/// Threads wait for a task: they have the task's word watched, and the worker that completes it wakes sleepers then.
template <class Orders, int kWaiters, bool kFences>
struct Awaiting {
  static constexpr int kNumThreads = 1 + kWaiters;
  using Wake = TaskWords<CheckedMemory>;
  Sleepers<CheckedMemory, Orders> waiting;
  typename Wake::Word wake{Wake::of_generation(1)};
  Plain<int> result = 0;

  void run(int thread) {
    if (thread == kWaiters) {
      result = 1;
      if ((Wake::complete(wake, 2) & Wake::kWatched) != 0) waiting.wake_all_if_any(kFences, false);
      return;
    }
    while (!Wake::has_ended(wake, 1)) {
      const uint32_t seen = waiting.look();
      const auto stays_awake = [&] { return !Wake::watch(wake, 1) || Wake::has_ended(wake, 1); };
      waiting.sleep(seen, kFences, false, stays_awake, [] { return int64_t{-1}; });
    }
    expect(result == 1, "what the task wrote");
  }
  void end() {}
  static const char* thread_name(int thread) {
    return thread == kWaiters ? "worker" : thread == 0 ? "waiter" : "second waiter";
  }
};

/// The end of everything, which wakes all without looking for sleepers and without a barrier.
template <class Orders>
struct Closing {
  static constexpr int kNumThreads = 3;
  Sleepers<CheckedMemory, Orders> parked;
  Atomic<int> closing;

  void run(int thread) {
    if (thread == 2) {
      closing.store(1, std::memory_order_relaxed);
      parked.wake_all(false);
      return;
    }
    while (closing.load(std::memory_order_relaxed) == 0) {
      const auto stays_awake = [&] { return closing.load(std::memory_order_relaxed) != 0; };
      const uint32_t seen = parked.look();
      parked.sleep(seen, false, false, stays_awake, [] { return int64_t{-1}; });
    }
  }
  void end() {}
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"worker", "second worker", "closer"};
    return kNames[thread];
  }
};

struct ChangesWordRelaxed : SleepersOrders {
  static constexpr auto kChangeWord = std::memory_order_relaxed;
};
struct ReadsWordLate : SleepersOrders {
  static constexpr bool kReadsWordFirst = false;
};
struct LooksFirst : SleepersOrders {
  static constexpr bool kAnnouncesFirst = false;
};
struct SleeperWithoutBarrier : SleepersOrders {
  static constexpr bool kSleeperHasBarrier = false;
};
struct WakerWithoutBarrier : SleepersOrders {
  static constexpr bool kWakerHasBarrier = false;
};
struct KeepsWord : SleepersOrders {
  static constexpr bool kChangesWord = false;
};

}  // namespace

CASE("no worker sleeps over work, with a barrier of one side or with fences on both") {
  HOLDS(Working<SleepersOrders, 1, 1, false>);
  HOLDS(Working<SleepersOrders, 1, 1, true>);
  HOLDS(Working<SleepersOrders, 2, 1, false>);
  HOLDS(Working<SleepersOrders, 2, 1, true>);
  DEEP_HOLDS(Working<SleepersOrders, 2, 2, false>);
}

CASE("no thread sleeps over the end of the task that it waits for, none over the end of everything") {
  HOLDS(Awaiting<SleepersOrders, 1, false>);
  HOLDS(Awaiting<SleepersOrders, 2, false>);
  HOLDS(Awaiting<SleepersOrders, 2, true>);
  HOLDS(Closing<SleepersOrders>);
}

CASE("every order and step of sleeping and waking is needed") {
  FOUND(Closing<ChangesWordRelaxed>);
  FOUND(Working<ReadsWordLate, 1, 1, false>);
  FOUND(Working<LooksFirst, 1, 1, false>);
  FOUND(Working<SleeperWithoutBarrier, 1, 1, false>);
  FOUND(Working<WakerWithoutBarrier, 1, 1, false>);
  FOUND(Working<KeepsWord, 1, 1, false>);
  FOUND(Awaiting<LooksFirst, 1, false>);
  FOUND(Awaiting<SleeperWithoutBarrier, 2, false>);
  FOUND(Awaiting<WakerWithoutBarrier, 2, false>);
}

CHECKED_TEST_MAIN
