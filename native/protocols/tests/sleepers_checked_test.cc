// Sleeping and waking in every execution: no thread sleeps while there is work, or after the end of what it waits for,
// or after closing. A thread that is not woken sleeps for ever here, which is a deadlock.
#include "checker/testing.h"
#include "protocols/sleepers.h"
#include "protocols/task_word.h"

using namespace tilewise::checker;
using tilewise::protocols::Sleepers;
using tilewise::protocols::SleepersOrders;
using tilewise::protocols::TaskWords;

namespace {

template <class Orders = SleepersOrders>
using Checked = Sleepers<CheckedMemory, Orders>;

/// kProducers threads make one piece of work each; kWorkers take the work. Without work, a worker sleeps.
template <class Own, int kProducers, int kWorkers, bool kFences>
struct Working {
  static constexpr int kNumThreads = kProducers + kWorkers;
  Own parked;
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
    const int share = kProducers / kWorkers;  // pieces per worker
    for (int done = 0; done < share;) {
      bool has_found = false;
      for (Atomic<int>& piece : work) {
        int one = 1;
        if (done == share || piece.load(std::memory_order_relaxed) != 1) continue;
        if (!piece.compare_exchange_strong(one, 2, std::memory_order_acquire, std::memory_order_relaxed)) continue;
        has_found = true;
        ++done;
      }
      if (has_found || done == share) continue;
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

/// Threads wait for a task: they watch its state word, so the worker that completes it wakes sleepers.
template <class Own, int kWaiters, bool kFences>
struct Awaiting {
  static constexpr int kNumThreads = 1 + kWaiters;
  using Wake = TaskWords<CheckedMemory>;
  Own waiting;
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

/// Closing, which wakes all threads without checking for sleepers and without a barrier.
template <class Own>
struct Closing {
  static constexpr int kNumThreads = 3;
  Own parked;
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
struct WithoutHeavyBarrier : CheckedMemory {
  static void heavy_barrier(bool /*fences*/) {}
};
struct WithoutLightBarrier : CheckedMemory {
  static void light_barrier(bool /*fences*/) {}
};
using SleeperWithoutBarrier = Sleepers<WithoutHeavyBarrier>;
using WakerWithoutBarrier = Sleepers<WithoutLightBarrier>;
struct ReadsWordLate : Checked<> {
  template <class StaysAwake, class Limit>
  bool sleep(uint32_t /*seen*/, bool fences, bool is_shared, StaysAwake&& stays_awake, Limit&& limit_ns) {
    count.fetch_add(1, std::memory_order_relaxed);
    CheckedMemory::heavy_barrier(fences);
    const bool stays = stays_awake();
    const uint32_t seen = look();
    if (!stays) CheckedMemory::sleep(word, seen, limit_ns(), is_shared);
    count.fetch_sub(1, std::memory_order_relaxed);
    return !stays;
  }
};
struct LooksFirst : Checked<> {
  template <class StaysAwake, class Limit>
  bool sleep(uint32_t seen, bool fences, bool is_shared, StaysAwake&& stays_awake, Limit&& limit_ns) {
    const bool stays = stays_awake();
    return Checked<>::sleep(seen, fences, is_shared, [&] { return stays; }, limit_ns);
  }
};
struct KeepsWord : Checked<> {
  void wake(int32_t num_threads, bool is_shared) { CheckedMemory::wake(word, num_threads, is_shared); }
};

}  // namespace

CASE("no worker sleeps while there is work, with a barrier on one side or fences on both") {
  HOLDS(Working<Checked<>, 1, 1, false>);
  HOLDS(Working<Checked<>, 1, 1, true>);
  HOLDS(Working<Checked<>, 2, 1, false>);
  HOLDS(Working<Checked<>, 2, 1, true>);
  DEEP_HOLDS(Working<Checked<>, 2, 2, false>);
}

CASE("no thread sleeps after the end of the task that it waits for, or after closing") {
  HOLDS(Awaiting<Checked<>, 1, false>);
  HOLDS(Awaiting<Checked<>, 2, false>);
  HOLDS(Awaiting<Checked<>, 2, true>);
  HOLDS(Closing<Checked<>>);
}

CASE("every order and step of sleeping and waking is needed") {
  FOUND(Closing<Checked<ChangesWordRelaxed>>);
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
