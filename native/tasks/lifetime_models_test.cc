// Exhaustive interleavings of the counters that end lifetimes: segments of the heap, children of a task.
// Each step is as atomic as in the code (buffers.cc: close_scope, use_heap, release_heap; run.cc: child_ended). Every
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

}  // namespace

CASE("segments: freed exactly once, after the scope and every task") { EXPECT_EQ(bad_segments(false), 0); }
CASE("model finds a scope that closes before it adds its uses") { EXPECT(bad_segments(true) > 0); }
CASE("children: the parent completes once, after its kernel and every child") { EXPECT_EQ(bad_families(false), 0); }
CASE("model finds a child that starts before it is counted") { EXPECT(bad_families(true) > 0); }

TILEWISE_TEST_MAIN
