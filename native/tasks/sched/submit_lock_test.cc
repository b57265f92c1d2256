// The biased submission lock: every interleaving of its first lane with a newcomer, under store buffers, and the real
// lock with threads that come and go.
#include "tasks/sched/submit_lock.h"

#include <thread>
#include <vector>

#include "base/interleavings.h"
#include "base/testing.h"
#include "tasks/tests/testing_runtime.h"

using tilewise::testing::Explorer;
using tilewise::testing::Process;

namespace {

enum class Flaw { kNone, kNoBarrier, kNotWaited, kNoSecondLook };

/// Memory as all see it, and what the first lane has stored and not yet published.
struct State {
  int inside = 0;
  int contended = 0;
  int lock = 0;  // + 1: who holds it
  std::vector<int> pending;
  int in_section[2] = {0, 0};
  int done[2] = {0, 0};
  int violated = 0;
  std::vector<int> key() const {
    std::vector<int> all{inside, contended, lock, in_section[0], in_section[1], done[0], done[1], violated};
    all.insert(all.end(), pending.begin(), pending.end());
    return all;
  }
  void enter(int who) {
    in_section[who] = 1;
    violated |= in_section[1 - who];
  }
  void publish() {
    for (const int value : pending) inside = value;
    pending.clear();
  }
};

Process<State> first_lane(Flaw flaw) {
  return {9, [=](State& s, int step, int* next) {
            switch (step) {
              case 0:
                if (s.contended != 0) *next = 5;
                return true;
              case 1:
                s.pending.push_back(1);  // a plain store: it may stay in the store buffer
                return true;
              case 2:
                if (s.contended == 0 || flaw == Flaw::kNoSecondLook) {
                  s.enter(0);
                } else {
                  s.pending.push_back(0);
                  *next = 5;
                }
                return true;
              case 3:
                s.in_section[0] = 0;
                return true;
              case 4:
                s.pending.push_back(0);
                s.done[0] = 1;
                *next = 9;
                return true;
              case 5:
                if (s.lock != 0) return false;
                s.publish();  // a locked instruction
                s.lock = 1;
                return true;
              case 6:
                s.enter(0);
                return true;
              case 7:
                s.in_section[0] = 0;
                return true;
              default:
                s.lock = 0;
                s.done[0] = 1;
                return true;
            }
          }};
}

Process<State> newcomer(Flaw flaw) {
  return {6, [=](State& s, int step, int*) {
            switch (step) {
              case 0:
                s.contended = 1;
                return true;
              case 1:
                if (flaw != Flaw::kNoBarrier) s.publish();  // membarrier: the stores of all threads are out
                return true;
              case 2:
                if (s.lock != 0) return false;
                s.lock = 2;
                return true;
              case 3:
                if (s.inside != 0 && flaw != Flaw::kNotWaited) return false;
                s.enter(1);
                return true;
              case 4:
                s.in_section[1] = 0;
                return true;
              default:
                s.lock = 0;
                s.done[1] = 1;
                return true;
            }
          }};
}

/// The memory system publishes the oldest store whenever it likes.
Process<State> memory_system() {
  return {1, [](State& s, int, int* next) {
            if (s.pending.empty()) return false;
            s.inside = s.pending.front();
            s.pending.erase(s.pending.begin());
            *next = 0;
            return true;
          }};
}

int bad_ends(Flaw flaw) {
  Explorer<State> explorer({first_lane(flaw), newcomer(flaw), memory_system()},
                           [](const State& s) { return s.violated == 0 && s.done[0] == 1 && s.done[1] == 1; });
  return explorer.bad_ends(State{});
}

}  // namespace

CASE("the biased lock lets one in at a time, whatever the order of stores") { EXPECT_EQ(bad_ends(Flaw::kNone), 0); }

CASE("planted faults in the biased lock are found") {
  EXPECT(bad_ends(Flaw::kNoBarrier) > 0);
  EXPECT(bad_ends(Flaw::kNotWaited) > 0);
  EXPECT(bad_ends(Flaw::kNoSecondLook) > 0);
}

CASE("lanes that come while the first one submits lose nothing") {
  using namespace tilewise::tasks::testing;
  constexpr int kRounds = 40 / kSlowdown + 2;
  for (int round = 0; round < kRounds; ++round) {
    PTORuntime* runtime = nullptr;
    pto_config config;
    pto_config_init(&config);
    config.num_workers = 1;
    config.window = 64;
    EXPECT_EQ(pto_runtime_open(&config, &runtime), PTO_OK);
    const pto_kernel count = pto_kernel_add(
        runtime, "count",
        [](void* const* buffers, const uint64_t*) {
          ++*static_cast<uint64_t*>(buffers[0]);  // unordered tasks would lose counts, and be a race
          return static_cast<int>(PTO_OK);
        },
        0);
    uint64_t cell = 0;
    const pto_handle handle = pto_register(runtime, &cell, sizeof(cell));
    const auto submit = [&] {
      for (int i = 0; i < 300; ++i) {
        pto_param param = {PTO_INOUT, 0, handle, 0, nullptr, nullptr};
        EXPECT(pto_submit_task(runtime, count, PTO_VECTOR, &param, 1) != 0);
      }
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_OK);
    };
    pto_scope_begin(runtime);  // this thread is the first lane
    std::vector<std::thread> others;
    for (int t = 0; t < 3; ++t) others.emplace_back(submit);
    submit();
    for (std::thread& other : others) other.join();
    EXPECT_EQ(pto_scope_end(runtime), PTO_OK);
    EXPECT_EQ(cell, uint64_t{1200});
    EXPECT_EQ(pto_runtime_close(runtime), PTO_OK);
  }
}

TILEWISE_TEST_MAIN
