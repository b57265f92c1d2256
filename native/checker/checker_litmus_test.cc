// Tests of the checker: litmus tests whose results the C++ standard determines, exactly these must be
// seen; races, deadlocks, lost wake-ups; and random programs, explored with and without the reduction.
#include <functional>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "base/testing.h"
#include "checker/checker.h"

using namespace tilewise::checker;

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;
constexpr auto kAcqRel = std::memory_order_acq_rel;
constexpr auto kSeqCst = std::memory_order_seq_cst;

using Outcome = std::vector<int>;

struct Shared;
using Body = std::function<void(Shared&, int thread)>;

/// The current litmus program, and its outcomes: registers, and optionally the last values of x and y.
const Body* body = nullptr;
std::set<Outcome> seen;
size_t num_registers = 0;
bool keeps_last_values = false;

struct Shared {
  Atomic<int> x, y, z;
  Plain<int> data = 0;
  int r[12] = {};
  void end() {
    Outcome outcome(r, r + num_registers);
    if (keeps_last_values) outcome.insert(outcome.end(), {x.load(), y.load()});
    seen.insert(outcome);
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"first", "second", "third", "fourth"};
    return kNames[thread];
  }
};

template <int kThreads>
struct Litmus : Shared {
  static constexpr int kNumThreads = kThreads;
  void run(int thread) { (*body)(*this, thread); }
};

template <int kThreads>
Result run(const Body& program, size_t registers, const Options& options = {}) {
  body = &program;
  seen.clear();
  num_registers = registers;
  return explore<Litmus<kThreads>>(options);
}

/// The outcomes of a program, which must be the same with and without the reduction.
template <int kThreads>
std::set<Outcome> outcomes(const Body& program, size_t registers, bool last_values = false) {
  keeps_last_values = last_values;
  const Result result = run<kThreads>(program, registers);
  EXPECT(result.holds());
  if (!result.holds()) std::fprintf(stderr, "%s\n%s", result.failure.c_str(), result.trace.c_str());
  const std::set<Outcome> reduced = seen;
  Options all;
  all.reduces = false;
  EXPECT(run<kThreads>(program, registers, all).holds());
  EXPECT(reduced == seen);
  keeps_last_values = false;
  return reduced;
}

std::set<Outcome> both_bits() { return {{0, 0}, {0, 1}, {1, 0}, {1, 1}}; }

std::set<Outcome> without(std::set<Outcome> all, const Outcome& forbidden) {
  all.erase(forbidden);
  return all;
}

/// Store buffering with `between` between the store and the load of each thread.
std::set<Outcome> store_buffering(std::memory_order order, const std::function<void(int thread)>& between) {
  return outcomes<2>(
      [&](Shared& s, int thread) {
        Atomic<int>& mine = thread == 0 ? s.x : s.y;
        Atomic<int>& other = thread == 0 ? s.y : s.x;
        mine.store(1, order == kSeqCst ? kSeqCst : kRelaxed);
        between(thread);
        s.r[thread] = other.load(order);
      },
      2);
}

std::set<Outcome> message_passing(std::memory_order publish, std::memory_order look, bool fences = false) {
  return outcomes<2>(
      [&](Shared& s, int thread) {
        if (thread == 0) {
          s.x.store(1, kRelaxed);
          if (fences) fence(kRelease);
          s.y.store(1, publish);
        } else {
          s.r[0] = s.y.load(look);
          if (fences) fence(kAcquire);
          s.r[1] = s.x.load(kRelaxed);
        }
      },
      2);
}

/// Two writers, and two readers that read in opposite orders.
bool readers_may_disagree(std::memory_order store, std::memory_order load, bool fences) {
  const std::set<Outcome> all = outcomes<4>(
      [&](Shared& s, int thread) {
        if (thread == 0) s.x.store(1, store);
        if (thread == 1) s.y.store(1, store);
        if (thread < 2) return;
        Atomic<int>& first = thread == 2 ? s.x : s.y;
        Atomic<int>& second = thread == 2 ? s.y : s.x;
        s.r[2 * thread - 4] = first.load(load);
        if (fences) fence(kSeqCst);
        s.r[2 * thread - 3] = second.load(load);
      },
      4);
  return all.count({1, 0, 1, 0}) != 0;
}

}  // namespace

CASE("store buffering: both loads may miss, unless stores and loads are seq_cst or fences are between them") {
  EXPECT(store_buffering(kRelaxed, [](int) {}) == both_bits());
  EXPECT(store_buffering(kAcquire, [](int) {}) == both_bits());
  const std::set<Outcome> strong = without(both_bits(), {0, 0});
  EXPECT(store_buffering(kSeqCst, [](int) {}) == strong);
  EXPECT(store_buffering(kRelaxed, [](int) { fence(kSeqCst); }) == strong);
  EXPECT(store_buffering(kRelaxed, [](int) { fence(kAcqRel); }) == both_bits());
  EXPECT(store_buffering(kRelaxed, [](int thread) {
           if (thread == 0) fence(kSeqCst);
         }) == both_bits());
}

CASE("store buffering: a heavy barrier on one side needs a light one on the other; two light ones do nothing") {
  const std::set<Outcome> strong = without(both_bits(), {0, 0});
  EXPECT(store_buffering(kRelaxed, [](int thread) { thread == 0 ? heavy_fence() : light_fence(); }) == strong);
  EXPECT(store_buffering(kRelaxed, [](int) { heavy_fence(); }) == strong);
  EXPECT(store_buffering(kRelaxed, [](int thread) { thread == 0 ? heavy_fence() : fence(kSeqCst); }) == strong);
  EXPECT(store_buffering(kRelaxed, [](int) { light_fence(); }) == both_bits());
  EXPECT(store_buffering(kRelaxed, [](int thread) {
           if (thread == 0) heavy_fence();
         }) == both_bits());
}

CASE("message passing: relaxed fails; release and acquire, or their fences, hold; one of the two is not enough") {
  EXPECT(message_passing(kRelaxed, kRelaxed) == both_bits());
  EXPECT(message_passing(kRelease, kRelaxed) == both_bits());
  EXPECT(message_passing(kRelaxed, kAcquire) == both_bits());
  const std::set<Outcome> strong = without(both_bits(), {1, 0});
  EXPECT(message_passing(kRelease, kAcquire) == strong);
  EXPECT(message_passing(kRelaxed, kRelaxed, true) == strong);
}

CASE("IRIW: acquiring readers may disagree on the order of two writes; seq_cst ones, or with fences, may not") {
  EXPECT(readers_may_disagree(kRelease, kAcquire, false));
  EXPECT(!readers_may_disagree(kSeqCst, kSeqCst, false));
  EXPECT(!readers_may_disagree(kRelaxed, kRelaxed, true));
}

CASE("2+2W: each thread's first write may be last, unless the writes are seq_cst") {
  const auto last_values = [](std::memory_order order) {
    return outcomes<2>(
        [&](Shared& s, int thread) {
          (thread == 0 ? s.x : s.y).store(1, order);
          (thread == 0 ? s.y : s.x).store(2, order);
        },
        0, true);
  };
  EXPECT(last_values(kRelaxed) == (std::set<Outcome>{{1, 1}, {1, 2}, {2, 1}, {2, 2}}));
  EXPECT(last_values(kRelease).count({1, 1}) == 1);
  EXPECT(last_values(kSeqCst) == (std::set<Outcome>{{1, 2}, {2, 1}, {2, 2}}));
}

CASE("coherence: a thread never sees one atomic go back, not even through another thread") {
  const std::set<Outcome> two_looks = outcomes<2>(
      [](Shared& s, int thread) {
        if (thread == 0) {
          s.x.store(1, kRelaxed);
          s.x.store(2, kRelaxed);
        } else {
          s.r[0] = s.x.load(kRelaxed);
          s.r[1] = s.x.load(kRelaxed);
        }
      },
      2);
  EXPECT(two_looks == (std::set<Outcome>{{0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}, {2, 2}}));
  const std::set<Outcome> outcomes_seen = outcomes<3>(
      [](Shared& s, int thread) {
        if (thread == 0) s.x.store(1, kRelaxed);
        if (thread == 1) {
          s.r[0] = s.x.load(kRelaxed);
          s.y.store(1, kRelease);
        }
        if (thread == 2) {
          s.r[1] = s.y.load(kAcquire);
          s.r[2] = s.x.load(kRelaxed);
        }
      },
      3);
  EXPECT(outcomes_seen.count({1, 1, 0}) == 0);
  EXPECT(outcomes_seen.count({1, 0, 0}) == 1 && outcomes_seen.count({0, 1, 0}) == 1 &&
         outcomes_seen.count({1, 1, 1}) == 1);
  const std::set<Outcome> stores = outcomes<2>(  // of two threads that read their own and the other's
      [](Shared& s, int thread) {
        s.x.store(thread + 1, kRelaxed);
        s.r[thread] = s.x.load(kRelaxed);
      },
      2);
  EXPECT(stores == (std::set<Outcome>{{1, 2}, {2, 2}, {1, 1}}));
}

CASE("release sequence: a relaxed read-modify-write passes on what it read, a relaxed store does not") {
  const auto pass_on = [](bool by_change) {
    return outcomes<3>(
        [=](Shared& s, int thread) {
          if (thread == 0) {
            s.y.store(1, kRelaxed);
            s.x.store(1, kRelease);
          }
          if (thread == 1) {
            int one = 1;
            if (by_change) s.x.compare_exchange_strong(one, 2, kRelaxed, kRelaxed);
            if (!by_change && s.x.load(kRelaxed) == 1) s.x.store(2, kRelaxed);
          }
          if (thread == 2) {
            s.r[0] = s.x.load(kAcquire);
            s.r[1] = s.y.load(kRelaxed);
          }
        },
        2);
  };
  EXPECT(pass_on(true).count({2, 0}) == 0 && pass_on(true).count({2, 1}) == 1);
  EXPECT(pass_on(false).count({2, 0}) == 1);
}

CASE("read-modify-writes lose nothing; exactly one of two compares with one value succeeds") {
  const std::set<Outcome> sums = outcomes<3>(
      [](Shared& s, int) {
        for (int n = 0; n < 2; ++n) s.x.fetch_add(1, kRelaxed);
      },
      0, true);
  EXPECT(sums == (std::set<Outcome>{{6, 0}}));
  const std::set<Outcome> winners = outcomes<2>(
      [](Shared& s, int thread) {
        int none = 0;
        s.r[thread] = s.x.compare_exchange_strong(none, 1, kRelaxed, kRelaxed);
      },
      2);
  EXPECT(winners == (std::set<Outcome>{{0, 1}, {1, 0}}));
}

CASE("a weak compare may fail spuriously if the option is set") {
  const Body compare = [](Shared& s, int thread) {
    int none = 0;
    s.r[thread] = s.x.compare_exchange_weak(none, 1, kRelaxed, kRelaxed);
  };
  Options weak;
  weak.weak_compares_fail = true;
  EXPECT(run<1>(compare, 1, weak).holds());
  EXPECT(seen == (std::set<Outcome>{{0}, {1}}));
  EXPECT(run<1>(compare, 1).holds());
  EXPECT(seen == (std::set<Outcome>{{1}}));
}

CASE("ISA2: a third thread sees earlier writes with release and acquire, and only then") {
  const auto last_look = [](std::memory_order release, std::memory_order acquire) {
    return outcomes<3>(
        [=](Shared& s, int thread) {
          if (thread == 0) {
            s.x.store(1, kRelaxed);
            s.y.store(1, release);
          }
          if (thread == 1 && s.y.load(acquire) == 1) s.z.store(1, release);
          if (thread == 2) {
            s.r[0] = s.z.load(acquire);
            s.r[1] = s.x.load(kRelaxed);
          }
        },
        2);
  };
  EXPECT(last_look(kRelease, kAcquire).count({1, 0}) == 0);
  EXPECT(last_look(kRelaxed, kRelaxed).count({1, 0}) == 1);
}

CASE("data races: plain data behind a relaxed flag is a race, behind a released one it is not") {
  const auto pass = [](std::memory_order publish, std::memory_order look) {
    return run<2>(
        [=](Shared& s, int thread) {
          if (thread == 0) {
            s.data = 7;
            s.x.store(1, publish);
          } else if (s.x.load(look) == 1) {
            expect(s.data == 7, "the data behind its flag");
          }
        },
        0);
  };
  EXPECT(pass(kRelease, kAcquire).holds());
  EXPECT(pass(kRelaxed, kAcquire).failure.find("data race") == 0);
  EXPECT(pass(kRelease, kRelaxed).failure.find("data race") == 0);
  const Result after = run<2>(  // written once more after it was published
      [](Shared& s, int thread) {
        if (thread == 0) {
          s.x.store(1, kRelease);
          s.data = 7;
        } else if (s.x.load(kAcquire) == 1) {
          expect(s.data >= 0, "a number");
        }
      },
      0);
  EXPECT(after.failure.find("data race") == 0);
}

CASE("load buffering is not explored, but a pinned load that a later store could reach is reported") {
  const auto overwrite = [](std::memory_order done, std::memory_order look) {
    return run<2>(
        [=](Shared& s, int thread) {
          if (thread == 0) {
            s.r[0] = s.x.load(kRelaxed);
            s.y.store(1, done);
            s.x.pin();
          } else if (s.y.load(look) == 1) {
            s.x.store(1, kRelaxed);
          }
        },
        1);
  };
  EXPECT(overwrite(kRelease, kAcquire).holds());
  EXPECT(seen == (std::set<Outcome>{{0}}));
  EXPECT(overwrite(kRelaxed, kAcquire).failure.find("a store") == 0);
  EXPECT(overwrite(kRelease, kRelaxed).failure.find("a store") == 0);
}

CASE("spinning: a thread that polls for a store ends, and one whose store never comes is reported") {
  const auto spin = [](int until) {
    return run<2>(
        [=](Shared& s, int thread) {
          if (thread == 0) {
            for (int value = 1; value <= 3; ++value) s.x.store(value, kRelaxed);
          } else {
            while (s.x.load(kRelaxed) != until) relax();
          }
        },
        0);
  };
  EXPECT(spin(3).holds());
  EXPECT(spin(2).failure.find("deadlock: second looks") == 0);  // it may miss the middle one
}

CASE("sleeping: a sleeper that compares in the futex is woken, one that is woken before the change is lost") {
  const auto sleep = [](bool changes_first) {
    return run<2>(
        [=](Shared& s, int thread) {
          if (thread == 0) {
            if (changes_first) s.x.store(1, kRelaxed);
            s.x.wake_sleepers(1);
            if (!changes_first) s.x.store(1, kRelaxed);
          } else {
            while (s.x.load(kRelaxed) == 0) s.x.sleep(0);
          }
        },
        0);
  };
  EXPECT(sleep(true).holds());
  EXPECT(sleep(false).failure == "deadlock: second sleeps for ever");
}

CASE("sleeping: a wake-up for one of two sleepers reaches either") {
  const Result result = run<3>(
      [](Shared& s, int thread) {
        if (thread == 2) {
          s.x.store(1, kRelaxed);
          s.x.wake_sleepers(1);
        } else {
          s.x.sleep(0);
          s.r[thread] = 1;
          s.x.wake_sleepers(1);
        }
      },
      2);
  EXPECT(result.holds());
}

CASE("two locks taken in opposite orders are a deadlock, with its trace") {
  const Result result = run<2>(
      [](Shared& s, int thread) {
        Atomic<int>& first = thread == 0 ? s.x : s.y;
        Atomic<int>& second = thread == 0 ? s.y : s.x;
        for (Atomic<int>* lock : {&first, &second}) {
          while (lock->exchange(1, kAcquire) != 0) relax();
        }
        for (Atomic<int>* lock : {&second, &first}) lock->store(0, kRelease);
      },
      0);
  EXPECT_EQ(result.failure, "deadlock: first looks, second looks for ever");
  EXPECT(result.trace.find("first: change") != std::string::npos);
}

CASE("random programs have the same outcomes, or a deadlock, with and without the reduction") {
  std::mt19937 random(7);
  const auto pick = [&](int count) { return static_cast<int>(random() % count); };
  static constexpr std::memory_order kLoads[] = {kRelaxed, kAcquire, kSeqCst};
  static constexpr std::memory_order kStores[] = {kRelaxed, kRelease, kSeqCst};
  static constexpr std::memory_order kChanges[] = {kRelaxed, kAcqRel, kSeqCst};
  struct Step {
    int kind, location, order;
  };
  int64_t saved = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<std::vector<Step>> steps(3);
    for (int thread = 0; thread < 3; ++thread) {
      for (int n = 0; n < (thread == 2 ? 2 : 3); ++n) steps[thread].push_back({pick(13), pick(2), pick(3)});
    }
    const Body program = [&](Shared& s, int thread) {
      int at = 4 * thread;
      for (const Step& step : steps[thread]) {
        Atomic<int>& place = step.location == 0 ? s.x : s.y;
        const int value = at + 1;
        int& result = s.r[at++];
        if (step.kind < 2) result = place.load(kLoads[step.order]);
        if (step.kind == 2 || step.kind == 3) place.store(value, kStores[step.order]);
        if (step.kind == 4) result = place.exchange(value, kChanges[step.order]);
        if (step.kind == 5) result = place.compare_exchange_strong(result, value, kChanges[step.order], kRelaxed);
        if (step.kind == 6) fence(kSeqCst);
        if (step.kind == 7) step.order == 0 ? heavy_fence() : light_fence();
        if (step.kind == 8) place.sleep(0);
        if (step.kind == 9) place.wake_sleepers(step.order == 0 ? 1 : 5);
        const auto order = kLoads[step.order];
        while (step.kind == 10 && place.load(order) == 0) relax();
        while (step.kind == 11 && s.x.load(order) == 0 && s.y.load(kRelaxed) == 0) relax();
        while (step.kind == 12 && (s.y.load(order) == 0 || s.x.load(kRelaxed) == 0)) relax();
      }
    };
    keeps_last_values = true;
    const Result reduced = run<3>(program, 12);
    const std::set<Outcome> with = seen;
    Options all;
    all.reduces = false;
    const Result whole = run<3>(program, 12, all);
    EXPECT_EQ(reduced.failure.empty(), whole.failure.empty());  // or both found a deadlock
    if (whole.failure.empty()) EXPECT(reduced.is_complete && whole.is_complete && with == seen);
    saved += whole.num_executions - reduced.num_executions - reduced.num_abandoned;
  }
  keeps_last_values = false;
  EXPECT(saved > 0);
}

TILEWISE_TEST_MAIN
