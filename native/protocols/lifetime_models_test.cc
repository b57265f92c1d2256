// Exhaustive interleavings of the counters that end lifetimes: segments of the heap, children of a task, rounds of a
// recording.
// Each step is as atomic as in the code (buffers.cc: close_scope, use_heap, release_heap; run.cc: child_ended,
// complete_replayed; hot.h: arrive; instance.h: is_done). Every
// planted wrong order must be found.
#include "base/interleavings.h"
#include "base/testing.h"

using tilewise::testing::Explorer;
using tilewise::testing::Process;

namespace {

// --- segments and children ---------------------------------------------------------------------------------------

/// A run with two uses by its owner and one by another lane, which come and go around the end of its scope.
struct SegmentModel {
  int state = 100;  // open
  int uses = 0;
  int submitted[3] = {0, 0, 0};
  int released = 0;
  int freed = 0;
  int is_early = 0;
  std::vector<int> key() const {
    return {state, uses, submitted[0], submitted[1], submitted[2], released, freed, is_early};
  }
  void add(int change) {
    state += change;
    if (state != 0) return;
    ++freed;
    is_early |= released < submitted[0] + submitted[1] + submitted[2];
  }
};

int bad_segments(bool closes_in_two_steps) {
  const Process<SegmentModel> scope{4, [=](SegmentModel& s, int step, int*) {
                                      if (step < 2) {
                                        ++s.uses;
                                        s.submitted[step] = 1;
                                      } else if (closes_in_two_steps) {
                                        s.add(step == 2 ? -100 : s.uses);
                                      } else if (step == 2) {
                                        if (s.submitted[2] == 0) return false;  // the handle is alive until then
                                        s.add(s.uses - 100);
                                      }
                                      return true;
                                    }};
  const Process<SegmentModel> other_lane{1, [](SegmentModel& s, int, int*) {
                                           ++s.state;
                                           s.submitted[2] = 1;
                                           return true;
                                         }};
  const auto task = [](int number) -> Process<SegmentModel> {
    return {1, [number](SegmentModel& s, int, int*) {
              if (s.submitted[number] == 0) return false;
              ++s.released;
              s.add(-1);
              return true;
            }};
  };
  Explorer<SegmentModel> explorer({scope, other_lane, task(0), task(1), task(2)},
                                  [](const SegmentModel& s) { return s.freed == 1 && s.is_early == 0; });
  return explorer.bad_ends(SegmentModel{});
}

/// A parent that submits two children; the counter begins at 1 for its kernel.
struct Family {
  int counter = 1;
  int started[2] = {0, 0};
  int live = 1;  // kernel and children
  int completed = 0;
  int is_early = 0;
  std::vector<int> key() const { return {counter, started[0], started[1], live, completed, is_early}; }
  void drop() {
    --live;
    if (--counter != 0) return;
    ++completed;
    is_early |= live != 0;
  }
};

int bad_families(bool counts_late) {
  const Process<Family> parent{5, [=](Family& s, int step, int*) {
                                 if (step == 4) {
                                   s.drop();
                                 } else if ((step % 2 == 0) != counts_late) {
                                   ++s.counter;
                                 } else {
                                   s.started[step / 2] = 1;
                                   ++s.live;
                                 }
                                 return true;
                               }};
  const auto child = [](int number) -> Process<Family> {
    return {1, [number](Family& s, int, int*) {
              if (s.started[number] == 0) return false;
              s.drop();
              return true;
            }};
  };
  Explorer<Family> explorer({parent, child(0), child(1)},
                            [](const Family& s) { return s.completed == 1 && s.is_early == 0; });
  return explorer.bad_ends(Family{});
}

// --- rounds ------------------------------------------------------------------------------------------------------

constexpr int kRounds = 2;
constexpr int kNodes = 5;  // a diamond: 1 before 2 and 3, both before 4; and 0 alone
constexpr int kLast = kNodes - 1;

/// Two workers run two rounds of them, which a third thread begins one after the other.
struct Rounds {
  int arrivals[kNodes] = {1, 1, 1, 1, 2};
  int ended[kNodes] = {};  // rounds, as the generation of the wake word says
  int runs[kNodes] = {};
  int ready = 0;                     // mask
  int done[2] = {0, 0};
  int begun = 0;
  int node[2] = {0, 0};       // per worker: what it runs,
  int successor[2] = {0, 0};  // which successor it has come to,
  int seen[2] = {0, 0};       // and what it read
  int is_wrong = 0;
  std::vector<int> key() const {
    std::vector<int> all{ready, begun, is_wrong};
    for (const auto& each : {arrivals, ended, runs}) all.insert(all.end(), each, each + kNodes);
    for (const auto& pair : {done, node, successor, seen}) all.insert(all.end(), pair, pair + 2);
    return all;
  }
  void make_ready(int which) {
    is_wrong |= ready >> which & 1;
    ready |= 1 << which;
  }
};

enum class RoundFlaw { kNone, kCountFirst, kRearmLate, kSplitDecrement, kLastAlone };

Process<Rounds> round_worker(int self, RoundFlaw flaw) {
  static constexpr int kFirst[kNodes] = {0, 2, 4, 4, 0}, kCount[kNodes] = {0, 2, 1, 1, 0};
  static constexpr int kInitial[kNodes] = {1, 1, 1, 1, 2};
  const auto rearm = [](Rounds& s, int node) { s.arrivals[node] = kInitial[node]; };
  return {8, [=](Rounds& s, int step, int* next) {
            const int node = s.node[self];
            switch (step) {
              case 0: {  // take: one worker from below, the other from above
                if (s.ready == 0) {
                  if (s.done[0] + s.done[1] < kRounds * kNodes) return false;
                  *next = 8;
                  return true;
                }
                int found = self == 0 ? 0 : kNodes - 1;
                while ((s.ready >> found & 1) == 0) found += self == 0 ? 1 : -1;
                s.ready &= ~(1 << found);
                s.node[self] = found;
                s.successor[self] = 0;
                const int round = ++s.runs[found];
                s.is_wrong |= round > s.begun;
                for (int p = 0; p < kNodes; ++p) {
                  for (int e = 0; e < kCount[p]; ++e) s.is_wrong |= kFirst[p] + e == found && s.ended[p] < round;
                }
                return true;
              }
              case 1:
                if (flaw != RoundFlaw::kRearmLate) rearm(s, node);
                if (flaw == RoundFlaw::kCountFirst) ++s.done[self];
                s.seen[self] = s.ended[node];
                return true;
              case 2:
                s.ended[node] = s.seen[self] + 1;
                return true;
              case 3:  // the next successor: is this the last arrival?
                if (s.successor[self] == kCount[node]) {
                  *next = 6;
                  return true;
                }
                s.seen[self] = s.arrivals[kFirst[node] + s.successor[self]];
                *next = s.seen[self] == 1 ? 5 : 4;
                return true;
              case 4: {
                int& left = s.arrivals[kFirst[node] + s.successor[self]];
                if (flaw == RoundFlaw::kSplitDecrement) {
                  left = s.seen[self] - 1;
                } else if (--left == 0) {
                  return true;  // the last after all
                }
                ++s.successor[self];
                *next = 3;
                return true;
              }
              case 5:
                s.make_ready(kFirst[node] + s.successor[self]++);
                *next = 3;
                return true;
              case 6:
                if (flaw != RoundFlaw::kCountFirst) ++s.done[self];
                return true;
              default:
                if (flaw == RoundFlaw::kRearmLate) rearm(s, node);
                *next = 0;
                return true;
            }
          }};
}

int bad_rounds(RoundFlaw flaw) {
  const Process<Rounds> replayer{3 * kRounds, [=](Rounds& s, int step, int*) {
                                   if (step % 3 == 0) {
                                     const bool has_ended = flaw == RoundFlaw::kLastAlone
                                                                ? s.ended[kLast] == s.begun
                                                                : s.done[0] + s.done[1] == s.begun * kNodes;
                                     if (!has_ended) return false;
                                     ++s.begun;
                                   } else {
                                     s.make_ready(step % 3 - 1);
                                   }
                                   return true;
                                 }};
  Explorer<Rounds> explorer({round_worker(0, flaw), round_worker(1, flaw), replayer}, [](const Rounds& s) {
    for (int node = 0; node < kNodes; ++node) {
      if (s.runs[node] != kRounds || s.ended[node] != kRounds) return false;
    }
    return s.is_wrong == 0;
  });
  return explorer.bad_ends(Rounds{});
}

}  // namespace

CASE("segments: freed exactly once, after the scope and every task") { EXPECT_EQ(bad_segments(false), 0); }
CASE("model finds a scope that closes before it adds its uses") { EXPECT(bad_segments(true) > 0); }
CASE("children: the parent completes once, after its kernel and every child") { EXPECT_EQ(bad_families(false), 0); }
CASE("model finds a child that starts before it is counted") { EXPECT(bad_families(true) > 0); }

CASE("rounds: every task runs once in each, behind its producers, and no round begins before the last has ended") {
  EXPECT_EQ(bad_rounds(RoundFlaw::kNone), 0);
}
CASE("model finds a task that counts itself as done before its word moves on") {
  EXPECT(bad_rounds(RoundFlaw::kCountFirst) > 0);
}
CASE("model finds a task that prepares for the next round after it has counted itself as done") {
  EXPECT(bad_rounds(RoundFlaw::kRearmLate) > 0);
}
CASE("model finds an arrival that is not one atomic step") { EXPECT(bad_rounds(RoundFlaw::kSplitDecrement) > 0); }
CASE("model finds a round that is taken for over when its last task's word has moved on") {
  EXPECT(bad_rounds(RoundFlaw::kLastAlone) > 0);
}

TILEWISE_TEST_MAIN
