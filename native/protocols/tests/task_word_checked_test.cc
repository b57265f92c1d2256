// Task state words in every execution: consumers of two producers become ready exactly once and see what these
// wrote, while one producer's slot is reused.
#include "checker/testing.h"
#include "protocols/task_word.h"

using namespace tilewise::checker;
using tilewise::protocols::TaskWordOrders;
using tilewise::protocols::TaskWords;

namespace {

template <class Orders = TaskWordOrders>
using Checked = TaskWords<CheckedMemory, Orders>;

/// The submitter adds kConsumers tasks that depend on both producers, which two workers complete; then, if it can, it
/// reuses the second producer's slot.
template <class Wake, int kConsumers, bool kReuses>
struct Slots {
  static constexpr int kNumThreads = 3;
  struct Consumer {
    Plain<uint32_t> next = 0;
    Plain<int> left = 2;
    Plain<int> num_ready = 0;
  };
  typename Wake::Word wake[2] = {Wake::of_generation(1), Wake::of_generation(1)};
  Plain<int> kernel[2] = {5, 5};   // of the task in the slot
  Plain<int> written[2] = {0, 0};  // by that task
  Consumer consumers[kConsumers];

  Slots() {
    for (int p = 0; p < 2; ++p) wake[p].set_name("wake", p);
  }
  Consumer& consumer(uint32_t waiter) {
    expect(waiter >= 1 && waiter <= kConsumers, "a waiter in the list");
    return consumers[waiter - 1];
  }
  void advance(uint32_t number) {
    Consumer& me = consumers[number];
    while (me.left > 0) {
      const int producer = me.left - 1;
      if (Wake::add_waiter(wake[producer], 1, number + 1, [&](uint32_t first) { me.next = first; })) return;
      --me.left;
    }
    ++me.num_ready;
    me.next = 77;  // in another list
    expect(written[0] == 1 && written[1] == 1, "what both producers wrote");
  }
  void run(int thread) {
    if (thread == 0) {
      for (uint32_t c = 0; c < kConsumers; ++c) advance(c);
      if (!kReuses) return;
      const typename Wake::Bits seen = Wake::look(wake[1]);
      if (Wake::is_live(seen)) return;
      kernel[1] = 6;
      Wake::begin(wake[1], seen);
      return;
    }
    const int producer = thread - 1;
    expect(kernel[producer] == 5, "the kernel of the task that runs");
    written[producer] = 1;
    const typename Wake::Bits bits = Wake::complete(wake[producer], 2);
    const uint32_t first = Wake::first_waiter(bits);
    if (first == 0) return;
    Wake::for_each_waiter(
        first, [&](uint32_t waiter) -> Plain<uint32_t>& { return consumer(waiter).next; },
        [&](uint32_t waiter) { advance(waiter - 1); });
  }
  void end() {
    for (const Consumer& consumer : consumers) expect(consumer.num_ready == 1, "every consumer ready once");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"submitter", "worker", "second worker"};
    return kNames[thread];
  }
};

struct SeesFreeRelaxed : TaskWordOrders {
  static constexpr auto kSeeFree = std::memory_order_relaxed;
};
struct SeesEndedRelaxed : TaskWordOrders {
  static constexpr auto kSeeEnded = std::memory_order_relaxed;
};
struct MissesRelaxed : TaskWordOrders {
  static constexpr auto kMiss = std::memory_order_relaxed;
};
struct StandsRelaxed : TaskWordOrders {
  static constexpr auto kStand = std::memory_order_relaxed;
};
struct CompletesWithoutRelease : TaskWordOrders {
  static constexpr auto kComplete = std::memory_order_acquire;
};
struct CompletesWithoutAcquire : TaskWordOrders {
  static constexpr auto kComplete = std::memory_order_release;
};
struct ComparesNoGeneration : Checked<> {
  template <class Enlist>
  static bool add_waiter(Word& word, uint64_t /*generation*/, uint32_t waiter, Enlist&& enlist) {
    const Bits bits = word.load(TaskWordOrders::kSeeEnded);
    return is_live(bits) && Checked<>::add_waiter(word, generation_in(bits), waiter, enlist);
  }
};
struct StoresWithoutComparing : Checked<> {
  template <class Enlist>
  static bool add_waiter(Word& word, uint64_t generation, uint32_t waiter, Enlist&& enlist) {
    const Bits bits = word.load(TaskWordOrders::kSeeEnded);
    if (generation_in(bits) != generation) return false;
    enlist(first_waiter(bits));
    word.store((bits & ~(kWatched - 1)) | waiter, TaskWordOrders::kStand);
    return true;
  }
};
struct MarksAfterTaking : Checked<> {
  static Bits complete(Word& word, uint64_t next_generation) {
    const Bits bits = word.exchange(of_generation(next_generation - 1), TaskWordOrders::kComplete);
    word.store(of_generation(next_generation), std::memory_order_release);
    return bits;
  }
};
struct ReadsNextLate : Checked<> {
  template <class Next, class Wake>
  static void for_each_waiter(uint32_t waiter, Next&& next, Wake&& wake) {
    for (; waiter != 0; waiter = next(waiter)) wake(waiter);
  }
};

/// A second consumer that another thread submits after the slot may have been reused.
template <class Wake>
struct Reuse {
  static constexpr int kNumThreads = 3;
  typename Wake::Word wake{Wake::of_generation(1)};
  Plain<uint32_t> next = 0;
  bool is_ready = false;

  void run(int thread) {
    if (thread == 0) {  // the consumer's submitter knows generation 1
      is_ready = !Wake::add_waiter(wake, 1, 1, [&](uint32_t first) { next = first; });
    } else if (thread == 1) {
      if (Wake::first_waiter(Wake::complete(wake, 2)) == 1) is_ready = true;
    } else {
      const typename Wake::Bits seen = Wake::look(wake);
      if (!Wake::is_live(seen)) Wake::begin(wake, seen);
    }
  }
  void end() { expect(is_ready, "the consumer ready, though the slot has another task"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"submitter", "worker", "another submitter"};
    return kNames[thread];
  }
};

}  // namespace

CASE("every consumer becomes ready exactly once, after two producers, one slot being reused") {
  HOLDS(Slots<Checked<>, 1, true>);
  HOLDS(Slots<Checked<>, 2, true>);
  HOLDS_WITH(weak_compares(), Slots<Checked<>, 2, true>);
  HOLDS(Slots<Checked<>, 5, true>);
  HOLDS(Reuse<Checked<>>);
}

CASE("every order and step of the task state word is needed") {
  FOUND(Slots<Checked<SeesFreeRelaxed>, 1, true>);
  FOUND(Slots<Checked<SeesEndedRelaxed>, 1, false>);
  FOUND(Slots<Checked<MissesRelaxed>, 1, false>);
  FOUND(Slots<Checked<StandsRelaxed>, 1, false>);
  FOUND(Slots<Checked<CompletesWithoutRelease>, 1, false>);
  FOUND(Slots<Checked<CompletesWithoutAcquire>, 1, false>);
  FOUND(Slots<StoresWithoutComparing, 1, false>);
  FOUND(Slots<MarksAfterTaking, 1, false>);
  FOUND(Slots<ReadsNextLate, 2, false>);
  FOUND(Reuse<ComparesNoGeneration>);
}

CHECKED_TEST_MAIN
