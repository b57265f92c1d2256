// Counters with waiters in every execution: a task that waits for two becomes ready exactly once, after both posts;
// and the guarantees of docs/memory_model.md about reading signals, by wait() and by load().
#include <set>
#include <vector>

#include "checker/testing.h"
#include "protocols/counter.h"

using namespace tilewise::checker;
using tilewise::protocols::Counter;
using tilewise::protocols::CounterOrders;
using tilewise::protocols::wait_in_turn;

namespace {

template <class Orders = CounterOrders>
using Checked = Counter<CheckedMemory, int, Orders>;

struct WaitInTurn {
  template <class Wait>
  static bool wait(Plain<int>& num_begun, int count, Wait&& wait) {
    return wait_in_turn(num_begun, count, wait);
  }
};

/// Tasks wait for both counters, each posted by one thread. The first thread begins the waits; a poster may continue
/// them: the poster of a task's first counter puts it into the second one's list.
template <class Own, int kTasks, bool kAdds = false, class Turns = WaitInTurn>
struct Waiting {
  static constexpr int kNumThreads = 3;
  struct Task {
    Plain<int> next = 0;
    Plain<int> num_begun = 0;
    Plain<int> num_ready = 0;
  };
  Own counters[2];
  Plain<int> written[2] = {0, 0};
  Task tasks[kTasks];

  Waiting() {
    for (int c = 0; c < 2; ++c) counters[c].value.set_name("value", c);
  }
  Task& waiter(int task) {
    expect(task >= 1 && task <= kTasks, "a waiter in the list");
    return tasks[task - 1];
  }
  void wait(int task) {
    Task& own = tasks[task];
    const bool is_ready = Turns::wait(own.num_begun, 2, [&](int which) {
      return counters[which].wait(
          task + 1, [](uint64_t value) { return value >= 1; }, [&](int first) { own.next = first; });
    });
    if (!is_ready) return;
    ++own.num_ready;
    expect(written[0] == 1 && written[1] == 1, "what was written before the posts");
    own.next = 77;  // reused for something else
  }
  void run(int thread) {
    if (thread == 0) {
      for (int t = 0; t < kTasks; ++t) wait(t);
      return;
    }
    const int which = thread - 1;
    written[which] = 1;
    const auto next = [&](int task) -> Plain<int>& { return waiter(task).next; };
    const auto is_due = [](int, uint64_t value) { return value >= 1; };
    const int due = kAdds ? counters[which].add(1, is_due, next)
                          : counters[which].post([](uint64_t value) { return value + 1; }, is_due, next);
    counters[which].wake_all(due, next, [&](int task) { wait(task - 1); });
  }
  void end() {
    for (const Task& task : tasks) expect(task.num_ready == 1, "every task ready once");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"waiter", "poster", "second poster"};
    return kNames[thread];
  }
};

struct PublishesRelaxed : CounterOrders {
  static constexpr auto kPublish = std::memory_order_relaxed;
};
struct AddsWithoutFence : CounterOrders {
  static constexpr auto kAdd = std::memory_order_acq_rel;
};
struct AddsRelaxed : CounterOrders {
  static constexpr auto kAdd = std::memory_order_relaxed;
};
struct SeesWaitingAnytime : CounterOrders {
  static constexpr auto kSeeWaiting = std::memory_order_relaxed;
};
struct SaysWithoutFence : CounterOrders {
  static constexpr auto kSayWaiting = std::memory_order_release;
};
struct ComparesAnytime : CounterOrders {
  static constexpr auto kCompare = std::memory_order_acquire;
};
struct SeesAddsRelaxed : CounterOrders {
  static constexpr auto kSeeAdds = std::memory_order_relaxed;
};
struct LooksRelaxed : CounterOrders {
  static constexpr auto kLook = std::memory_order_relaxed;
};

/// Compares only before it takes the lock, so a post in between is missed.
struct ComparesOutside : Checked<> {
  template <class IsDue, class Enlist>
  bool wait(int waiter, IsDue&& is_due, Enlist&& enlist) {
    if (is_due(load())) return true;
    std::lock_guard guard(lock);
    enlist(waiters);
    waiters = waiter;
    is_awaited.store(true, CounterOrders::kSayWaiting);
    return false;
  }
};
struct PostsInTwoSections : Checked<> {
  template <class Change, class IsDue, class Next>
  int post(Change&& change, IsDue&& is_due, Next&& next) {
    lock.lock();
    const uint64_t now = change(value.load(std::memory_order_relaxed));
    const int due = detach(now, is_due, next);
    lock.unlock();
    lock.lock();
    value.store(now, CounterOrders::kPublish);
    lock.unlock();
    return due;
  }
};
struct ReadsNextLate : Checked<> {
  template <class Next, class Wake>
  static void wake_all(int due, Next&& next, Wake&& wake) {
    while (due != 0) {
      wake(due);
      due = next(due);
    }
  }
};
struct CountLate {
  template <class Wait>
  static bool wait(Plain<int>& num_begun, int count, Wait&& wait) {
    while (num_begun < count) {
      const int which = num_begun;
      const bool is_met = wait(which);
      num_begun = which + 1;
      if (!is_met) return false;
    }
    return true;
  }
};

/// A task waits for two adds to one counter: the thread that wakes it may have made only one of them.
template <class Own>
struct Adding {
  static constexpr int kNumThreads = 3;
  Own counter;
  Plain<int> next = 0;
  Plain<int> written[2] = {0, 0};
  Plain<int> num_ready = 0;

  void ready() {
    ++num_ready;
    expect(written[0] == 1 && written[1] == 1, "what was written before either add");
  }
  void run(int thread) {
    const auto is_due = [](int, uint64_t value) { return value >= 2; };
    if (thread == 0) {
      const bool is_met = counter.wait(1, [](uint64_t value) { return value >= 2; }, [&](int first) { next = first; });
      if (is_met) ready();
      return;
    }
    written[thread - 1] = 1;
    const auto link = [&](int) -> Plain<int>& { return next; };
    counter.wake_all(counter.add(1, is_due, link), link, [&](int) { ready(); });
  }
  void end() { expect(num_ready == 1, "ready once"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"waiter", "adder", "second adder"};
    return kNames[thread];
  }
};

// --- reading signals ---------------------------------------------------------------------------------------------

enum class Shape { kMessage, kThirdDevice, kReuse, kReuseWithoutAck, kTwoPosters, kTwoPostersInOrder };
enum class Look { kWait, kLoad };

constexpr int kS = 0, kT = 1, kAck = 2;

template <class Own>
struct Signals {
  Own signals[3];
  Plain<int> tile = 0;

  void post(int signal) {
    signals[signal].add(1, [](int, uint64_t) { return false; }, [&](int) -> Plain<int>& { return unused; });
  }
  bool is_raised(int signal, Look look) {
    if (look == Look::kLoad) return signals[signal].load() >= 1;
    return signals[signal].wait(1, [](uint64_t value) { return value >= 1; }, [](int) {});
  }
  Plain<int> unused = 0;
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"device 0", "device 1", "device 2", "device 3"};
    return kNames[thread];
  }
};

/// A tile is plain memory: reading or overwriting it too early is a race. A device continues only if it has seen the
/// signal; executions in which it reads the signal too early check nothing.
template <class Own, Shape kShape, Look kLook>
struct Passing : Signals<Own> {
  static constexpr int kNumThreads =
      kShape == Shape::kMessage || kShape == Shape::kReuse || kShape == Shape::kReuseWithoutAck ? 2 : 3;
  bool sees(int signal) { return this->is_raised(signal, kLook); }
  void run(int device) {
    const bool is_reuse = kShape == Shape::kReuse || kShape == Shape::kReuseWithoutAck;
    const bool are_two = kShape == Shape::kTwoPosters || kShape == Shape::kTwoPostersInOrder;
    if (device == 0) {
      this->tile = 1;
      this->post(kS);
      if (are_two) this->post(kAck);
      if (is_reuse && (kShape == Shape::kReuseWithoutAck || sees(kAck))) this->tile = 2;
    } else if (device == kNumThreads - 1) {
      if (!sees(kShape == Shape::kThirdDevice ? kT : kS)) return;
      expect(this->tile == 1, "the tile of its post");
      if (is_reuse) this->post(kAck);
    } else if (are_two) {
      if (kShape == Shape::kTwoPosters || sees(kAck)) this->post(kS);
    } else if (sees(kS)) {
      this->post(kT);
    }
  }
  void end() {}
};

/// The values that were read, over all executions.
std::set<std::vector<int>> outcomes;

template <Look kLook>
struct StoreBuffering : Signals<Checked<>> {
  static constexpr int kNumThreads = 2;
  int saw[2] = {0, 0};
  void run(int device) {
    post(device);
    saw[device] = is_raised(1 - device, kLook);
  }
  void end() { outcomes.insert({saw[0], saw[1]}); }
};

template <Look kLook>
struct OppositeOrders : Signals<Checked<>> {
  static constexpr int kNumThreads = 4;
  int saw[4] = {};
  void run(int device) {
    if (device < 2) return post(device);
    const int first = device - 2;
    saw[2 * first] = is_raised(first, kLook);
    saw[2 * first + 1] = is_raised(1 - first, kLook);
  }
  void end() { outcomes.insert({saw[0], saw[1], saw[2], saw[3]}); }
};

}  // namespace

CASE("a task that waits for two counters becomes ready once, after both posts") {
  HOLDS(Waiting<Checked<>, 1>);
  HOLDS(Waiting<Checked<>, 2>);
  HOLDS(Waiting<Checked<>, 3>);
  HOLDS(Waiting<Checked<>, 1, true>);
  HOLDS(Waiting<Checked<>, 2, true>);
  HOLDS(Adding<Checked<>>);
}

CASE("every step of waiting and posting is needed (mistake: lost wake-ups)") {
  FOUND(Waiting<ComparesOutside, 1>);
  FOUND(Waiting<PostsInTwoSections, 1>);
  FOUND(Waiting<ReadsNextLate, 2>);
  FOUND(Waiting<Checked<>, 1, false, CountLate>);
  FOUND(Waiting<Checked<AddsWithoutFence>, 1, true>);
  FOUND(Waiting<Checked<SeesWaitingAnytime>, 1, true>);
  FOUND(Waiting<Checked<SaysWithoutFence>, 1, true>);
  FOUND(Waiting<Checked<ComparesAnytime>, 1, true>);
  FOUND(Waiting<ComparesOutside, 1, true>);
  FOUND(Adding<Checked<SeesAddsRelaxed>>);
}

CASE("message passing, reuse and ISA2 hold for reads by wait() and by load()") {
  HOLDS(Passing<Checked<>, Shape::kMessage, Look::kWait>);
  HOLDS(Passing<Checked<>, Shape::kMessage, Look::kLoad>);
  HOLDS(Passing<Checked<>, Shape::kReuse, Look::kWait>);
  HOLDS(Passing<Checked<>, Shape::kReuse, Look::kLoad>);
  HOLDS(Passing<Checked<>, Shape::kThirdDevice, Look::kWait>);
  HOLDS(Passing<Checked<>, Shape::kThirdDevice, Look::kLoad>);
}

CASE("a relaxed post, a relaxed read and reuse without acknowledgement are found") {
  FOUND(Waiting<Checked<PublishesRelaxed>, 1>);
  FOUND(Passing<Checked<AddsRelaxed>, Shape::kMessage, Look::kLoad>);
  FOUND(Passing<Checked<LooksRelaxed>, Shape::kMessage, Look::kLoad>);
  FOUND(Passing<Checked<>, Shape::kReuseWithoutAck, Look::kWait>);
}

CASE("an epoch identifies a post only if a device posts the signal in order") {
  HOLDS(Passing<Checked<>, Shape::kTwoPostersInOrder, Look::kWait>);
  FOUND(Passing<Checked<>, Shape::kTwoPosters, Look::kWait>);
}

CASE("store buffering and IRIW are weak for load(), not for wait()") {
  outcomes.clear();
  HOLDS(StoreBuffering<Look::kLoad>);
  EXPECT(outcomes.count({0, 0}) == 1);
  outcomes.clear();
  HOLDS(StoreBuffering<Look::kWait>);
  EXPECT(outcomes.count({0, 0}) == 0 && outcomes.size() == 3);
  outcomes.clear();
  HOLDS(OppositeOrders<Look::kLoad>);
  EXPECT(outcomes.count({1, 0, 1, 0}) == 1);
  outcomes.clear();
  HOLDS(OppositeOrders<Look::kWait>);
  EXPECT(outcomes.count({1, 0, 1, 0}) == 0 && outcomes.count({1, 1, 1, 0}) == 1);
}

CHECKED_TEST_MAIN
