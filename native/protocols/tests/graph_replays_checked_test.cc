// Replays in every execution: every task runs once in each, after its producers, and no replay begins before the last
// has ended.
#include "checker/testing.h"
#include "protocols/countdown.h"
#include "protocols/graph_replays.h"
#include "protocols/task_word.h"

using namespace tilewise::checker;
using tilewise::protocols::Countdowns;
using tilewise::protocols::GraphReplayOrders;
using tilewise::protocols::GraphReplays;
using tilewise::protocols::TaskWords;

namespace {

template <class Orders = GraphReplayOrders>
using Checked = GraphReplays<CheckedMemory, Orders>;

/// Two tasks, one per worker, precede a third, which the later of them runs; a fourth is independent, and the workers
/// run it in turn. The replaying thread starts the others.
template <class Own, int kRounds>
struct Replaying {
  static constexpr int kNumThreads = 3;
  static constexpr int kLast = 2;
  static constexpr int kAlone = 3;
  using Wake = TaskWords<CheckedMemory>;
  typename Own::Count done[2];
  typename Wake::Word wake[4];
  Atomic<uint32_t> arrivals[4] = {1u, 1u, 2u, 1u};
  Atomic<int> begun[2];  // replays in which the worker may run its own task
  Plain<int> num_runs[4] = {0, 0, 0, 0};
  Plain<int> poison[4] = {0, 0, 0, 0};

  Replaying() {
    for (int t = 0; t < 4; ++t) wake[t].set_name("wake", t);
    for (int w = 0; w < 2; ++w) done[w].set_name("done", w);
  }
  void execute(int task, int worker, int replay) {
    expect(num_runs[task] == replay, "one run per replay");
    if (task == kLast) expect(num_runs[0] == replay + 1 && num_runs[1] == replay + 1, "the producers' runs before it");
    expect(poison[task] == 0, "a task prepared for its replay");
    expect(wake[task].load(std::memory_order_relaxed) == Wake::of_generation(2 * replay),
           "the generation of its replay");
    ++num_runs[task];
    poison[task] = 1;
    bool is_last_ready = false;
    Own::end_task(
        done[worker],
        [&] {
          arrivals[task].store(task == kLast ? 2 : 1, std::memory_order_relaxed);
          poison[task] = 0;
        },
        [&] { Wake::complete(wake[task], 2 * replay + 2); },
        [&] {
          if (task < kLast) is_last_ready = Countdowns<CheckedMemory>::arrive(arrivals[kLast]);
        });
    if (is_last_ready) execute(kLast, worker, replay);
  }
  void run(int thread) {
    if (thread < 2) {
      for (int replay = 0; replay < kRounds; ++replay) {
        while (begun[thread].load(std::memory_order_acquire) <= replay) relax();
        execute(thread, thread, replay);
        if (replay % 2 == thread) execute(kAlone, thread, replay);
      }
      return;
    }
    for (int replay = 0; replay < kRounds; ++replay) {
      const auto has_last_ended = [&] {
        return wake[kLast].load(std::memory_order_relaxed) == Wake::of_generation(2 * replay);
      };
      const auto count_of = [&](uint32_t worker) -> const typename Own::Count& { return done[worker]; };
      while (!Own::is_over(has_last_ended, 4 * replay, 2, count_of)) relax();
      for (int task = 0; task < 2; ++task) {
        if (!Countdowns<CheckedMemory>::arrive(arrivals[task])) expect(false, "a task without producers ready");
        begun[task].store(replay + 1, std::memory_order_release);
      }
    }
  }
  void end() {
    for (const Plain<int>& runs : num_runs) expect(runs == kRounds, "every task run once in each replay");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"worker", "second worker", "replayer"};
    return kNames[thread];
  }
};

struct CountsRelaxed : GraphReplayOrders {
  static constexpr auto kCount = std::memory_order_relaxed;
};
struct SeesCountsRelaxed : GraphReplayOrders {
  static constexpr auto kSeeCounts = std::memory_order_relaxed;
};
struct PreparesLate : Checked<> {
  template <class Prepare, class MoveOn, class Notify>
  static void end_task(Count& own, Prepare&& prepare, MoveOn&& move_on, Notify&& notify) {
    Checked<>::end_task(own, [] {}, move_on, notify);
    prepare();
  }
};
struct CountsFirst : Checked<> {
  template <class Prepare, class MoveOn, class Notify>
  static void end_task(Count& own, Prepare&& prepare, MoveOn&& move_on, Notify&& notify) {
    prepare();
    count(own);
    move_on();
    notify();
  }
};
struct LastAlone : Checked<> {
  template <class HasLastEnded, class CountOf>
  static bool is_over(HasLastEnded&& has_last_ended, uint64_t /*target*/, uint32_t /*num_workers*/, CountOf&&) {
    return has_last_ended();
  }
};

}  // namespace

CASE("every task runs once in each replay, and no replay begins before the last has ended") {
  HOLDS(Replaying<Checked<>, 2>);
  HOLDS(Replaying<Checked<>, 4>);
}

CASE("every order and step of the replays is needed") {
  FOUND(Replaying<Checked<CountsRelaxed>, 2>);
  FOUND(Replaying<Checked<SeesCountsRelaxed>, 2>);
  FOUND(Replaying<PreparesLate, 2>);
  FOUND(Replaying<CountsFirst, 2>);
  FOUND(Replaying<LastAlone, 2>);
}

CHECKED_TEST_MAIN
