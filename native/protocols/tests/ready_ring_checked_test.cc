// The ring of ready tasks in every execution: one owner and two takers, one of them in batches, lose and duplicate
// nothing, and the taker of a task sees what was written before it was pushed.
#include "checker/testing.h"
#include "protocols/ready_ring.h"

using namespace tilewise::checker;
using tilewise::protocols::ReadyRing;
using tilewise::protocols::RingOrders;

namespace {

constexpr uint32_t kNothing = 99;

template <class Orders = RingOrders>
using Checked = ReadyRing<CheckedMemory, 2, 4, kNothing, Orders>;

/// The owner pushes kTasks tasks into two cells; if they are full, it takes one itself.
template <class Ring, int kTakers, int kTasks>
struct Stealing {
  static constexpr int kNumThreads = 1 + kTakers;
  Ring ring;
  Plain<uint32_t> payload[kTasks];
  int num_taken[kTasks] = {};
  bool has_own = false;

  Stealing() {
    ring.head.set_name("head");
    ring.tail.set_name("tail");
    for (int c = 0; c < 2; ++c) ring.cells[c].set_name("cell", c);
  }
  void note(uint32_t task) {
    expect(task < kTasks, "a task that was pushed");
    expect(payload[task] == task + 7, "what was written before the push");
    expect(num_taken[task]++ == 0, "every task taken once");
  }
  void run(int thread) {
    if (thread == 0) {
      for (uint32_t task = 0; task < kTasks; ++task) {
        payload[task] = task + 7;
        while (!ring.push(task)) {
          const uint32_t oldest = ring.take_one();
          if (oldest != kNothing) note(oldest);
        }
      }
      return;
    }
    for (int look = 0; look < 2; ++look) {
      uint32_t tasks[2];
      const uint32_t count = ring.take_half(tasks, thread == 1 ? 1 : 2);
      for (uint32_t t = 0; t < count; ++t) note(tasks[t]);
    }
  }
  void end() {
    for (uint32_t task = ring.take_one(); task != kNothing; task = ring.take_one()) note(task);
    for (const int taken : num_taken) expect(taken == 1, "every task taken once");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"owner", "taker", "batch taker"};
    return kNames[thread];
  }
};

struct PublishesRelaxed : RingOrders {
  static constexpr auto kPublish = std::memory_order_relaxed;
};
struct SeesTailRelaxed : RingOrders {
  static constexpr auto kSeeTail = std::memory_order_relaxed;
};
struct TakesRelaxed : RingOrders {
  static constexpr auto kTake = std::memory_order_relaxed;
};
struct SeesTakenRelaxed : RingOrders {
  static constexpr auto kSeeTaken = std::memory_order_relaxed;
};
struct SeesHeadRelaxed : RingOrders {
  static constexpr auto kSeeHead = std::memory_order_relaxed;
};
struct MissesRelaxed : RingOrders {
  static constexpr auto kMiss = std::memory_order_relaxed;
};
/// A ring with faulty takers: the derived class's take() reads or takes the numbers at the wrong time.
template <class Mistaken>
struct Taking : Checked<> {
  uint32_t take_half(uint32_t* numbers, uint32_t limit) {
    uint64_t first = head.load(RingOrders::kSeeHead);
    while (true) {
      const TailWord end = tail.load(RingOrders::kSeeTail);
      const uint64_t available = distance(first, count_in(end));
      if (available == 0) return 0;
      const auto count = static_cast<uint32_t>(std::min<uint64_t>((available + 1) / 2, limit));
      if (static_cast<Mistaken*>(this)->take(first, count, end, numbers)) return count;
    }
  }
  uint32_t take_one() {
    uint32_t number = kNothing;
    return take_half(&number, 1) == 1 ? number : kNothing;
  }
  bool swap(uint64_t& first, uint32_t count) {
    return head.compare_exchange_weak(first, (first + count) & kCountMask, RingOrders::kTake, RingOrders::kMiss);
  }
};
struct ReadsLate : Taking<ReadsLate> {
  bool take(uint64_t& first, uint32_t count, TailWord end, uint32_t* numbers) {
    if (!swap(first, count)) return false;
    for (uint32_t i = 0; i < count; ++i) numbers[i] = peek(first + i, end);
    pin(first, count, end);
    return true;
  }
};
struct NewestOfAnotherLook : Taking<NewestOfAnotherLook> {
  bool take(uint64_t& first, uint32_t count, TailWord end, uint32_t* numbers) {
    for (uint32_t i = 0; i < count; ++i) {
      const bool is_newest = distance(first + i, count_in(end)) == 1;
      numbers[i] = is_newest ? newest_in(tail.load(RingOrders::kSeeTail)) : peek(first + i, end);
    }
    const uint64_t begin = first;
    if (!swap(first, count)) return false;
    pin(begin, count, end);
    return true;
  }
};

}  // namespace

CASE("one owner and two takers lose and duplicate nothing") {
  HOLDS(Stealing<Checked<>, 1, 5>);
  HOLDS(Stealing<Checked<>, 2, 3>);
  HOLDS_WITH(weak_compares(), Stealing<Checked<>, 2, 2>);
  DEEP_HOLDS(Stealing<Checked<>, 2, 4>);
}

CASE("every order of the ring is needed") {
  FOUND(Stealing<Checked<PublishesRelaxed>, 1, 3>);
  FOUND(Stealing<Checked<SeesTailRelaxed>, 1, 3>);
  FOUND(Stealing<Checked<TakesRelaxed>, 1, 3>);
  FOUND(Stealing<Checked<SeesTakenRelaxed>, 1, 3>);
  FOUND(Stealing<Checked<SeesHeadRelaxed>, 2, 2>);
  FOUND(Stealing<Checked<MissesRelaxed>, 2, 2>);
  FOUND(Stealing<ReadsLate, 1, 3>);
  FOUND(Stealing<NewestOfAnotherLook, 2, 3>);
}

CHECKED_TEST_MAIN
