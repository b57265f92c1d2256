// Rounds in every execution: every task runs once in each, behind its producers, and no round begins before the last
// has ended.
#include "checker/testing.h"
#include "protocols/countdown.h"
#include "protocols/rounds.h"
#include "protocols/task_word.h"

using namespace tilewise::checker;
using tilewise::protocols::Countdowns;
using tilewise::protocols::RoundOrders;
using tilewise::protocols::Rounds;
using tilewise::protocols::TaskWords;

namespace {

/// Two tasks, each of a worker's own, before a third, which the last of them runs; and one alone, which the workers run
/// in turn. The replaying thread lets the others go.
template <class Orders, int kRounds>
struct Replaying {
  static constexpr int kNumThreads = 3;
  static constexpr int kLast = 2;
  static constexpr int kAlone = 3;
  using Own = Rounds<CheckedMemory, Orders>;
  using Wake = TaskWords<CheckedMemory>;
  typename Own::Count done[2];
  typename Wake::Word wake[4];
  Atomic<uint32_t> arrivals[4] = {1u, 1u, 2u, 1u};
  Atomic<int> begun[2];  // rounds in which the worker may run its own task
  Plain<int> num_runs[4] = {0, 0, 0, 0};
  Plain<int> poison[4] = {0, 0, 0, 0};

  Replaying() {
    for (int t = 0; t < 4; ++t) wake[t].set_name("wake", t);
    for (int w = 0; w < 2; ++w) done[w].set_name("done", w);
  }
  void execute(int task, int worker, int round) {
    expect(num_runs[task] == round, "one run per round");
    if (task == kLast) expect(num_runs[0] == round + 1 && num_runs[1] == round + 1, "the producers' runs before it");
    expect(poison[task] == 0, "a task prepared for its round");
    expect(wake[task].load(std::memory_order_relaxed) == Wake::of_generation(2 * round), "the generation of its round");
    ++num_runs[task];
    poison[task] = 1;
    bool is_last_ready = false;
    Own::end_task(
        done[worker],
        [&] {
          arrivals[task].store(task == kLast ? 2 : 1, std::memory_order_relaxed);
          poison[task] = 0;
        },
        [&] { Wake::complete(wake[task], 2 * round + 2); },
        [&] {
          if (task < kLast) is_last_ready = Countdowns<CheckedMemory>::arrive(arrivals[kLast]);
        });
    if (is_last_ready) execute(kLast, worker, round);
  }
  void run(int thread) {
    if (thread < 2) {
      for (int round = 0; round < kRounds; ++round) {
        while (begun[thread].load(std::memory_order_acquire) <= round) relax();
        execute(thread, thread, round);
        if (round % 2 == thread) execute(kAlone, thread, round);
      }
      return;
    }
    for (int round = 0; round < kRounds; ++round) {
      const auto has_last_ended = [&] {
        return wake[kLast].load(std::memory_order_relaxed) == Wake::of_generation(2 * round);
      };
      const auto count_of = [&](uint32_t worker) -> const typename Own::Count& { return done[worker]; };
      while (!Own::is_over(has_last_ended, 4 * round, 2, count_of)) relax();
      for (int task = 0; task < 2; ++task) {
        if (!Countdowns<CheckedMemory>::arrive(arrivals[task])) expect(false, "a task without producers ready");
        begun[task].store(round + 1, std::memory_order_release);
      }
    }
  }
  void end() {
    for (const Plain<int>& runs : num_runs) expect(runs == kRounds, "every task run once in each round");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"worker", "second worker", "replayer"};
    return kNames[thread];
  }
};

struct CountsRelaxed : RoundOrders {
  static constexpr auto kCount = std::memory_order_relaxed;
};
struct SeesCountsRelaxed : RoundOrders {
  static constexpr auto kSeeCounts = std::memory_order_relaxed;
};
struct PreparesLate : RoundOrders {
  static constexpr bool kPreparesFirst = false;
};
struct CountsFirst : RoundOrders {
  static constexpr bool kCountsLast = false;
};
struct LastAlone : RoundOrders {
  static constexpr bool kSumsCounts = false;
};

}  // namespace

CASE("every task runs once in each round, and no round begins before the last has ended") {
  HOLDS(Replaying<RoundOrders, 2>);
  HOLDS(Replaying<RoundOrders, 4>);
}

CASE("every order and step of the rounds is needed") {
  FOUND(Replaying<CountsRelaxed, 2>);
  FOUND(Replaying<SeesCountsRelaxed, 2>);
  FOUND(Replaying<PreparesLate, 2>);
  FOUND(Replaying<CountsFirst, 2>);
  FOUND(Replaying<LastAlone, 2>);
}

CHECKED_TEST_MAIN
