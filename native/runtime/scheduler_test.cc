// The passive scheduler, without workers: hazards, parallel readers, slots, poison. Each mistake of the design's list
// that applies to slots, handles and edges has its case here by name.
#include "runtime/scheduler.h"

#include "base/testing.h"

using namespace tilewise::runtime;
using Next = Scheduler::Next;

namespace {

/// A scheduler whose tests submit by hand.
struct Bench {
  explicit Bench(int64_t window = 8, int64_t handles = 8) : scheduler(window, handles, 0) { scheduler.open(false); }

  int32_t submit(std::vector<Access> accesses, int64_t waits = 0) {
    const int32_t slot = scheduler.acquire();
    scheduler.task(slot).instr = &instr;
    scheduler.submit(slot, accesses, waits);
    return slot;
  }
  int32_t take() {
    int32_t slot = -1;
    return scheduler.take(&slot) == Next::kTask ? slot : -1;
  }

  Instr instr;
  Scheduler scheduler;
};

}  // namespace

CASE("read after write: a reader waits for the writer") {
  Bench bench;
  const int32_t writer = bench.submit({{0, kOut}});
  const int32_t reader = bench.submit({{0, kIn}});
  EXPECT_EQ(bench.take(), writer);
  EXPECT_EQ(bench.take(), -1);
  EXPECT_EQ(bench.scheduler.complete(writer, 0).num_ready, 1);
  EXPECT_EQ(bench.take(), reader);
}

CASE("write after write: the second writer waits for the first") {
  Bench bench;
  const int32_t first = bench.submit({{0, kOut}});
  const int32_t second = bench.submit({{0, kOut}});
  EXPECT_EQ(bench.take(), first);
  EXPECT_EQ(bench.take(), -1);
  bench.scheduler.complete(first, 0);
  EXPECT_EQ(bench.take(), second);
}

CASE("task ids are 64 bits wide (mistake: 32-bit ids)") {
  static_assert(sizeof(BlockedWait::sequence) == 8 && sizeof(tilewise::rings::ReadyEntry::sequence) == 8);
  EXPECT_EQ(sizeof(tilewise::comm::Waiter::threshold), 8u);
}

CASE("tasks complete in any order: no watermark (mistake: chain truncation that assumes one)") {
  Bench bench(4);
  std::vector<int32_t> slots;
  for (int i = 0; i < 4; ++i) slots.push_back(bench.submit({{0, kIn}, {i + 1, kOut}}));
  for (int i = 0; i < 4; ++i) bench.take();
  bench.scheduler.complete(slots[3], 0);
  bench.scheduler.complete(slots[1], 0);
  const int32_t writer = bench.submit({{0, kOut}, {2, kIn}});  // in the place of a younger task
  const int32_t reader = bench.submit({{4, kIn}});
  EXPECT_EQ(bench.take(), reader);
  bench.scheduler.complete(slots[0], 0);
  EXPECT_EQ(bench.take(), -1);
  bench.scheduler.complete(slots[2], 0);
  EXPECT_EQ(bench.take(), writer);
}

CASE("write after read: a writer waits for every reader (mistake: no write-after-read)") {
  Bench bench;
  const int32_t a = bench.submit({{0, kIn}});
  const int32_t b = bench.submit({{0, kIn}});
  const int32_t writer = bench.submit({{0, kOut}});
  EXPECT_EQ(bench.take(), a);
  EXPECT_EQ(bench.take(), b);  // readers run in parallel
  EXPECT_EQ(bench.scheduler.complete(b, 0).num_ready, 0);
  EXPECT_EQ(bench.take(), -1);
  EXPECT_EQ(bench.scheduler.complete(a, 0).num_ready, 1);
  EXPECT_EQ(bench.take(), writer);
}

CASE("readers after a write do not wait for readers before it, and a later write waits for them alone") {
  Bench bench;
  const int32_t old_reader = bench.submit({{0, kIn}});
  const int32_t writer = bench.submit({{0, kOut}});
  const int32_t new_reader = bench.submit({{0, kIn}});
  const int32_t last = bench.submit({{0, kInOut}});
  EXPECT_EQ(bench.take(), old_reader);
  bench.scheduler.complete(old_reader, 0);
  EXPECT_EQ(bench.take(), writer);
  bench.scheduler.complete(writer, 0);
  EXPECT_EQ(bench.take(), new_reader);
  EXPECT_EQ(bench.take(), -1);
  bench.scheduler.complete(new_reader, 0);
  EXPECT_EQ(bench.take(), last);
}

CASE("an input written by several tasks waits for all (mistake: a lookup that returns one producer)") {
  Bench bench;
  std::vector<int32_t> writers;
  for (int32_t h = 0; h < 4; ++h) writers.push_back(bench.submit({{h, kOut}}));
  const int32_t reader = bench.submit({{0, kIn}, {1, kIn}, {2, kIn}, {3, kIn}});
  for (int i = 0; i < 4; ++i) EXPECT_EQ(bench.take(), writers[i]);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(bench.scheduler.complete(writers[i], 0).num_ready, i == 3 ? 1 : 0);
  EXPECT_EQ(bench.take(), reader);
}

CASE("a consumer of a completed producer is ready at once (mistake: it never becomes ready)") {
  Bench bench;
  const int32_t writer = bench.submit({{0, kOut}});
  bench.take();
  bench.scheduler.complete(writer, 0);
  const int32_t reader = bench.submit({{0, kIn}});
  EXPECT_EQ(bench.take(), reader);
}

CASE("a leaf task frees its slot by completing alone (mistake: a leaf is never consumed)") {
  Bench bench(1);
  for (int i = 0; i < 1000; ++i) {
    const int32_t slot = bench.submit({});
    EXPECT_EQ(bench.take(), slot);
    bench.scheduler.complete(slot, 0);
  }
}

CASE("a slot used again is not taken for its former task (mistake: ABA on slot reuse)") {
  Bench bench(2);
  const int32_t writer = bench.submit({{0, kOut}});
  bench.take();
  bench.scheduler.complete(writer, 0);
  const int32_t other = bench.submit({{1, kOut}});
  EXPECT_EQ(other, writer);  // the same slot
  const int32_t reader = bench.submit({{0, kIn}});
  EXPECT_EQ(bench.take(), other);
  EXPECT_EQ(bench.take(), reader);  // does not wait for `other`
}

CASE("a window of 3 wraps 10,000 times without growth (mistakes: raw ids as index, ring wrap, unreclaimed pools)") {
  Bench bench(3, 2);
  for (int i = 0; i < 10000; ++i) {
    const int32_t writer = bench.submit({{0, kOut}, {1, kIn}});
    const int32_t reader = bench.submit({{0, kIn}});
    EXPECT_EQ(bench.take(), writer);
    EXPECT_EQ(bench.take(), -1);
    bench.scheduler.complete(writer, 0);
    EXPECT_EQ(bench.take(), reader);
    bench.scheduler.complete(reader, 0);
  }
  EXPECT_EQ(bench.scheduler.num_live_nodes(), 0);
  EXPECT(bench.scheduler.node_capacity() <= 8);
}

CASE("a task that names one handle twice does not wait for itself") {
  Bench bench;
  const int32_t task = bench.submit({{0, kIn}, {0, kOut}, {0, kReuse}});
  EXPECT_EQ(bench.take(), task);
  const int32_t reader = bench.submit({{0, kIn}});
  EXPECT_EQ(bench.take(), -1);
  bench.scheduler.complete(task, 0);
  EXPECT_EQ(bench.take(), reader);
}

CASE("completed readers leave the list, so constant weights cost nothing (unbounded reader chains)") {
  Bench bench(2, 1);
  for (int i = 0; i < 1000; ++i) {
    const int32_t reader = bench.submit({{0, kIn}});
    bench.take();
    bench.scheduler.complete(reader, 0);
  }
  EXPECT(bench.scheduler.node_capacity() <= 2);
}

CASE("memory reuse waits for readers and writer of the other tensor, but reusers do not order each other") {
  Bench bench;
  const int32_t reader = bench.submit({{0, kIn}});
  const int32_t first = bench.submit({{1, kOut}, {0, kReuse}});
  const int32_t second = bench.submit({{2, kOut}, {0, kReuse}});
  EXPECT_EQ(bench.take(), reader);
  EXPECT_EQ(bench.take(), -1);
  EXPECT_EQ(bench.scheduler.complete(reader, 0).num_ready, 2);
  EXPECT_EQ(bench.take(), first);
  EXPECT_EQ(bench.take(), second);
}

CASE("a guarded task becomes ready by its last event, whatever the order") {
  Bench bench;
  const int32_t task = bench.submit({}, 2);
  EXPECT(!bench.scheduler.satisfy(task, 1, 0));  // a signal came
  EXPECT(!bench.scheduler.satisfy(task, 1, 0));  // the submitter's guard
  EXPECT_EQ(bench.take(), -1);
  EXPECT(bench.scheduler.satisfy(task, 1, 0));
  EXPECT_EQ(bench.take(), task);
}

CASE("an error poisons exactly the successors, and the handle until it is written anew") {
  Bench bench;
  const int32_t bad = bench.submit({{0, kOut}});
  const int32_t unrelated = bench.submit({{1, kOut}});
  const int32_t reader = bench.submit({{0, kIn}});
  bench.take();
  bench.take();
  bench.scheduler.complete(bad, 7);
  bench.scheduler.complete(unrelated, 0);
  EXPECT_EQ(bench.take(), reader);
  EXPECT_EQ(bench.scheduler.poison(reader), 7u);
  const int32_t late = bench.submit({{0, kIn}});
  const int32_t clean = bench.submit({{1, kIn}});
  EXPECT_EQ(bench.scheduler.poison(late), 7u);
  EXPECT_EQ(bench.scheduler.poison(clean), 0u);
  for (int32_t slot : {reader, late, clean}) bench.scheduler.complete(slot, bench.scheduler.poison(slot));
  const int32_t rewrite = bench.submit({{0, kOut}});
  EXPECT_EQ(bench.scheduler.poison(rewrite), 0u);
  bench.scheduler.complete(rewrite, 0);
  EXPECT_EQ(bench.scheduler.poison(bench.submit({{0, kIn}})), 0u);
}

CASE("a poisoned external event poisons its task") {
  Bench bench;
  const int32_t task = bench.submit({}, 1);
  bench.scheduler.satisfy(task, 1, 3);
  bench.scheduler.satisfy(task, 1, 0);
  EXPECT_EQ(bench.scheduler.poison(task), 3u);
}

CASE("the walker is given to one worker at a time, and only while the window has room and little is ready") {
  Instr instr;
  Scheduler scheduler(2, 1, 2);
  int32_t slot = -1;
  EXPECT(scheduler.take(&slot) == Next::kNothing);
  scheduler.open(false);
  EXPECT(scheduler.take(&slot) == Next::kWalk);
  EXPECT(scheduler.take(&slot) == Next::kNothing);
  std::vector<Access> none;
  for (int i = 0; i < 2; ++i) {
    const int32_t made = scheduler.acquire();
    scheduler.task(made).instr = &instr;
    scheduler.submit(made, none, 0);
  }
  EXPECT_EQ(scheduler.acquire(), -1);
  EXPECT(!scheduler.end_walk(false));
  EXPECT(scheduler.take(&slot) == Next::kTask);  // full window: no walking
  scheduler.complete(slot, 0);
  EXPECT(scheduler.take(&slot) == Next::kWalk);  // a completion resumes it
  EXPECT(!scheduler.end_walk(true));
  EXPECT(scheduler.take(&slot) == Next::kTask);
  EXPECT(scheduler.complete(slot, 0).finished);
  EXPECT_EQ(scheduler.high_water(), 2);
}

TILEWISE_TEST_MAIN
