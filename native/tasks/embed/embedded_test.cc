// The embedded engine with a host that submits explicitly: order, places, priorities, admission, sleeping, closing.
// With one worker, the order of execution is the engine's choice and shows which tasks were ready.
#include "tasks/embed/embedded.h"

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "base/testing.h"

using namespace tilewise::tasks;

namespace {

struct Planned {
  std::vector<Access> accesses;
  int32_t priority = 1;
  bool is_delayed = false;  // not admitted until resumed
  std::function<void()> body;
  int num_again = 0;  // executions that do not complete it, each of which resumes it
  Target target = {};
};

/// Submits a list of tasks in order, as the window permits, and records when each ran.
class Bench : public Host {
 public:
  explicit Bench(uint32_t window = 8, uint32_t num_workers = 1, uint32_t num_objects = 8)
      : engine_(*this, num_workers, window, num_objects), planned_of_(engine_.window()), num_workers_(num_workers) {}

  Bench& add(Planned task) {
    planned_.push_back(std::move(task));
    place_of_.push_back(kNone);
    worker_of_.push_back(kNone);
    return *this;
  }

  /// Runs all tasks; returns their numbers in the order of execution.
  std::vector<int> run() {
    start();
    while (num_done_.load() < planned_.size()) std::this_thread::yield();
    stop();
    return order_;
  }
  void stop() {
    engine_.close();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }
  void start() {
    left_.store(1);
    for (uint32_t w = 0; w < num_workers_; ++w) workers_.emplace_back([this, w] { engine_.worker_loop(w); });
  }
  size_t num_done() const { return num_done_.load(); }
  uint32_t worker_of(size_t number) const { return worker_of_[number]; }
  Embedded& engine() { return engine_; }
  void resume(size_t number) {
    planned_[number].is_delayed = false;
    engine_.resume(place_of_[number]);
  }
  uint32_t high_water() const { return high_water_; }

 private:
  bool has_more() const override { return left_.load() == 1; }
  bool submit_more(uint32_t worker) override {
    int open = 1;
    if (!left_.compare_exchange_strong(open, 2)) return false;
    const size_t first = next_;
    while (next_ < planned_.size()) {
      const uint32_t place = engine_.take_task();
      if (place == kNone) break;
      place_of_[next_] = place;
      planned_of_[place] = next_;
      uint32_t live = 0;
      for (uint32_t t = 0; t < engine_.window(); ++t) live += engine_.is_live(t) ? 1 : 0;
      high_water_ = std::max(high_water_, live);
      const Planned& task = planned_[next_++];
      engine_.submit(place, task.accesses, task.priority, worker, task.target);
    }
    const bool has_submitted = next_ > first;  // else the window is full, and this worker has tasks of its own to run
    left_.store(next_ < planned_.size() ? 1 : 0);
    return has_submitted;
  }
  bool admit(uint32_t place) override { return !planned_[planned_of_[place]].is_delayed; }
  bool execute(uint32_t place, uint32_t worker) override {
    const size_t number = planned_of_[place];
    if (planned_[number].num_again > 0) {
      --planned_[number].num_again;
      engine_.resume(place);
      return false;
    }
    if (planned_[number].body) planned_[number].body();
    std::lock_guard guard(mutex_);
    order_.push_back(static_cast<int>(number));
    worker_of_[number] = worker;
    return true;
  }
  TraceLabel label_of(uint32_t place) const override { return {static_cast<int32_t>(planned_of_[place]), 0}; }
  void completed() override { num_done_.fetch_add(1); }

  Embedded engine_;
  std::vector<Planned> planned_;
  std::vector<size_t> planned_of_;
  std::vector<uint32_t> place_of_;
  std::vector<uint32_t> worker_of_;  // the worker that completed it
  uint32_t num_workers_;
  size_t next_ = 0;
  uint32_t high_water_ = 0;
  std::atomic<int> left_{0};  // 1: may submit, 2: submitting
  std::atomic<size_t> num_done_{0};
  std::mutex mutex_;
  std::vector<int> order_;
  std::vector<std::thread> workers_;
};

/// A priority above 0: all tasks are in one queue.
constexpr int32_t kInOrder = 1;

Planned task(std::vector<Access> accesses, int32_t priority = kInOrder) {
  return {std::move(accesses), priority, false, {}};
}

/// Background priority: runs last. A task that was submitted first and ran last was ready all the time, or waited for
/// the others.
constexpr int32_t kLast = -1;
constexpr int32_t kFirst = 2;

/// The positions of the tasks in an order.
std::vector<size_t> positions(const std::vector<int>& order) {
  std::vector<size_t> at(order.size());
  for (size_t i = 0; i < order.size(); ++i) at[order[i]] = i;
  return at;
}

}  // namespace

CASE("a reader, and a second writer, wait for the writer, for any priority") {
  Bench bench;
  bench.add(task({{0, Use::kWrite}}, kLast)).add(task({{0, Use::kRead}}, kFirst));
  bench.add(task({{1, Use::kWrite}}, kLast)).add(task({{1, Use::kWrite}}, kFirst)).add(task({}));
  const auto at = positions(bench.run());
  EXPECT(at[0] < at[1] && at[2] < at[3]);
  EXPECT_EQ(at[4], 0u);  // a task that waits for none goes first
}

CASE("write after read: a writer waits for every reader, and readers for no reader (mistake: no write-after-read)") {
  Bench bench;
  bench.add(task({{0, Use::kRead}}, kLast)).add(task({{0, Use::kRead}})).add(task({{0, Use::kRead}}, kLast));
  bench.add(task({{0, Use::kWrite}}, kFirst)).add(task({{0, Use::kRead}}, kFirst));
  const auto at = positions(bench.run());
  EXPECT_EQ(at[1], 0u);
  EXPECT(at[3] > at[0] && at[3] > at[1] && at[3] > at[2] && at[4] > at[3]);
}

CASE("an input written by several tasks waits for all (mistake: a lookup that returns one producer)") {
  Bench bench(32, 1, 20);
  std::vector<Access> all;
  for (uint32_t object = 0; object < 20; ++object) {
    bench.add(task({{object, Use::kWrite}}, kLast));
    all.push_back({object, Use::kRead});
  }
  bench.add(task(all, kFirst));
  EXPECT_EQ(positions(bench.run())[20], 20u);
}

CASE("memory reuse waits for readers and writer of the old contents; reusers are not ordered") {
  Bench bench;
  bench.add(task({{0, Use::kWrite}}, kLast)).add(task({{0, Use::kRead}}, kLast));
  bench.add(task({{1, Use::kWrite}, {0, Use::kAfterAll}}, kLast)).add(task({{2, Use::kWrite}, {0, Use::kAfterAll}}));
  bench.add(task({{0, Use::kRead}}, kFirst));  // reads in parallel to the reader: reusers are not recorded
  const auto at = positions(bench.run());
  EXPECT(at[2] > at[1] && at[3] > at[1]);
  EXPECT(at[3] < at[2]);
  EXPECT(at[4] < at[1]);
}

CASE("a task that names one object several times does not wait for itself") {
  Bench bench;
  bench.add(task({{0, Use::kRead}, {0, Use::kWrite}, {0, Use::kAfterAll}, {0, Use::kRead}}));
  bench.add(task({{0, Use::kRead}}, kFirst)).add(task({{0, Use::kWrite}}, kFirst));
  EXPECT(bench.run() == (std::vector<int>{0, 1, 2}));
}

CASE("ready tasks start by priority, then in the order of submission") {
  Bench bench(16);
  bench.add(task({{0, Use::kWrite}}));
  for (int32_t priority : {1, 1, 5, 7, 5, kLast, 1}) bench.add(task({{0, Use::kRead}}, priority));
  EXPECT(bench.run() == (std::vector<int>{0, 4, 3, 5, 1, 2, 7, 6}));
}

CASE("a task without a priority follows the one that it waited for, unless a more urgent one became ready with it") {
  Bench bench(16);
  bench.add(task({{0, Use::kWrite}})).add(task({{1, Use::kWrite}}));
  bench.add(task({{0, Use::kRead}}, 0)).add(task({{1, Use::kRead}}, 0)).add(task({{1, Use::kRead}}, 5));
  EXPECT(bench.run() == (std::vector<int>{0, 1, 4, 2, 3}));
  Bench alone(16);
  alone.add(task({{0, Use::kWrite}}, 0)).add(task({{1, Use::kWrite}}, 0)).add(task({{0, Use::kRead}}, 0));
  EXPECT(alone.run() == (std::vector<int>{0, 2, 1}));
}

CASE("a window of two wraps 10,000 times (mistakes: raw ids as index, stuck window, unreclaimed pools)") {
  Bench bench(2, 2, 2);
  for (int i = 0; i < 20000; ++i) bench.add(task({{0, i % 3 == 0 ? Use::kWrite : Use::kRead}, {1, Use::kRead}}));
  EXPECT_EQ(bench.run().size(), 20000u);
  EXPECT(bench.high_water() <= 2);
  EXPECT_EQ(bench.engine().num_completed(), 20000u);
}

CASE("every task may wait for every other one of the window: references never run out") {
  constexpr uint32_t kObjects = 300;
  Bench bench(256, 2, kObjects);
  std::vector<Access> all;
  for (uint32_t object = 0; object < kObjects; ++object) all.push_back({object, Use::kRead});
  for (uint32_t i = 0; i < 1500; ++i) {
    std::vector<Access> accesses = all;  // each after all writers, each writer after all its readers
    if (i % 2 == 1) accesses = {{i % kObjects, Use::kWrite}, {i * 7 % kObjects, Use::kAfterAll}};
    bench.add(task(accesses));
  }
  EXPECT_EQ(bench.run().size(), 1500u);
}

CASE("a task that is not admitted occupies no worker; once resumed it is the oldest and starts next") {
  Bench bench;
  Planned delayed = task({{0, Use::kWrite}});
  delayed.is_delayed = true;
  bench.add(delayed).add(task({{0, Use::kRead}}));
  Planned releases = task({{1, Use::kWrite}});
  releases.body = [&] { bench.resume(0); };
  bench.add(releases).add(task({{2, Use::kWrite}})).add(task({{3, Use::kWrite}}));
  const auto at = positions(bench.run());
  EXPECT_EQ(at[2], 0u);
  EXPECT_EQ(at[0], 1u);
  EXPECT(at[1] > at[0]);
}

CASE("a task that is executed in several parts completes after the last one") {
  Bench bench(4, 2, 2);
  for (int i = 0; i < 500; ++i) {
    Planned parts = task({{0, Use::kWrite}, {1, Use::kRead}}, i % 2);
    parts.num_again = i % 4;
    bench.add(parts).add(task({{1, Use::kRead}}));
  }
  const auto at = positions(bench.run());
  for (size_t i = 2; i < at.size(); i += 2) EXPECT(at[i] > at[i - 2]);
  EXPECT_EQ(bench.engine().num_completed(), 1000u);
}

CASE("sleeping workers are woken by a task resumed from outside") {
  for (int round = 0; round < 20; ++round) {
    Bench bench(8, 2);
    Planned delayed = task({});
    delayed.is_delayed = true;
    bench.add(delayed).add(task({}));
    bench.start();
    while (bench.num_done() < 1) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(250 * round));  // they sleep after about a millisecond
    bench.resume(0);
    while (bench.num_done() < 2) std::this_thread::yield();
    bench.stop();
  }
}

CASE("closing abandons tasks that wait for ever, and sleeping workers end") {
  Bench bench(8, 2);
  Planned delayed = task({{0, Use::kWrite}});
  delayed.is_delayed = true;
  bench.add(delayed).add(task({{0, Use::kRead}})).add(task({}));
  bench.start();
  while (bench.num_done() < 1) std::this_thread::yield();
  EXPECT(bench.engine().is_live(0) && bench.engine().is_live(1));
  EXPECT(bench.engine().sequence(0) < bench.engine().sequence(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  bench.stop();
}

CASE("pinned tasks run on their workers, with and without priorities, dependencies and repeated execution") {
  constexpr uint32_t kWorkers = 3;
  Bench bench(16, kWorkers, 8);
  std::vector<uint32_t> pins;
  for (uint32_t i = 0; i < 3000; ++i) {
    Planned one = task({{i % 8, i % 3 == 0 ? Use::kWrite : Use::kRead}}, static_cast<int32_t>(i * 7 % 5) - 2);
    one.target = {i * 13 % (kWorkers + 1), i % 4 == 0};
    one.num_again = static_cast<int>(i % 2);
    pins.push_back(one.target.is_preference ? 0 : one.target.worker);
    bench.add(one);
  }
  EXPECT_EQ(bench.run().size(), pins.size());
  for (size_t i = 0; i < pins.size(); ++i) EXPECT(pins[i] == 0 || bench.worker_of(i) + 1 == pins[i]);
}

CASE("another worker takes a task that prefers a busy worker, and leaves a pinned one") {
  for (const int32_t priority : {0, kFirst, kLast}) {
    Bench bench(8, 2);
    Planned busy = task({}, kFirst + 1);
    busy.target = {1, false};
    busy.body = [&] {
      while (bench.num_done() < 2) std::this_thread::yield();  // both tasks that prefer this worker
    };
    Planned prefers = task({}, priority);
    prefers.target = {1, true};
    Planned pinned = task({}, priority);
    pinned.target = {1, false};
    bench.add(busy).add(pinned).add(prefers).add(prefers);
    bench.run();
    EXPECT_EQ(bench.worker_of(1), 0u);
    EXPECT(bench.worker_of(2) == 1 && bench.worker_of(3) == 1);
  }
}

CASE("a task resumed from outside wakes the worker that it is for (mistake: waking any one worker)") {
  constexpr uint32_t kWorkers = 4;
  for (uint32_t round = 0; round < 24; ++round) {
    Bench bench(8, kWorkers);
    Planned delayed = task({});
    delayed.is_delayed = true;
    delayed.target = {1 + round % kWorkers, round % 3 == 2};
    bench.add(delayed).add(task({}));
    bench.start();
    while (bench.num_done() < 1) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
    bench.resume(0);
    while (bench.num_done() < 2) std::this_thread::yield();
    bench.stop();
    EXPECT(delayed.target.is_preference || bench.worker_of(0) + 1 == delayed.target.worker);
  }
}

TILEWISE_TEST_MAIN
