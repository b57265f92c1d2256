// Exhaustive interleavings of waiting for signals against raising them, each step as atomic as in the code: device.cc
// (admit, signal_raised) and comm/signal.cc (wait, raise; one lock section each). The engine's own protocols, slots and
// sleeping, are in protocols/models_test.cc.
// Every planted wrong order must be found, so that the model is known to see what it is for.
#include "base/interleavings.h"
#include "base/testing.h"

using tilewise::testing::Explorer;
using tilewise::testing::Process;

namespace {

/// A task waits for two signals (thresholds 1), one after the other; two devices raise one each. Process 0 is the
/// thread that admits the task first, 1 and 2 are the raisers.
struct Waiting {
  int value[2] = {0, 0};
  int registered[2] = {0, 0};
  int detached[2] = {0, 0};
  int num_asked = 0;
  int saw[3] = {0, 0, 0};
  int readied = 0;
  bool early = false;
  std::vector<int> key() const {
    return {value[0],  value[1], registered[0], registered[1], detached[0], detached[1],
            num_asked, saw[0],   saw[1],        saw[2],        readied,     early};
  }
};

void make_ready(Waiting& s) {
  ++s.readied;
  if (s.value[0] == 0 || s.value[1] == 0) s.early = true;
}

/// One step of Device::admit: asks for the next signal and stays at step `first`, or goes to `leave` because another
/// thread has the task now, or because it is ready.
bool admit(Waiting& s, int first, int leave, int* next) {
  if (s.num_asked == 2) {
    make_ready(s);
    *next = leave;
    return true;
  }
  const int signal = s.num_asked++;
  if (s.value[signal] >= 1) {
    *next = first;
    return true;
  }
  s.registered[signal] = 1;
  *next = leave;
  return true;
}

Process<Waiting> admitter() {
  return {1, [](Waiting& s, int, int* next) { return admit(s, 0, 1, next); }};
}

/// Planted: registers, then counts the wait as asked for, when the raiser may already have gone on.
Process<Waiting> admitter_that_counts_late() {
  return {2, [](Waiting& s, int step, int* next) {
            if (step == 1) {
              ++s.num_asked;
              *next = s.saw[0] != 0 ? 0 : 2;
              return true;
            }
            if (s.num_asked == 2) {
              make_ready(s);
              *next = 2;
              return true;
            }
            s.saw[0] = s.value[s.num_asked] >= 1 ? 1 : 0;
            if (s.saw[0] == 0) s.registered[s.num_asked] = 1;
            return true;
          }};
}

/// Planted: compares before it takes the signal's lock, registers afterwards.
Process<Waiting> admitter_that_compares_first() {
  return {2, [](Waiting& s, int step, int* next) {
            if (step == 0) {
              if (s.num_asked == 2) {
                make_ready(s);
                *next = 2;
                return true;
              }
              s.saw[0] = s.value[s.num_asked];
              return true;
            }
            const int signal = s.num_asked++;
            if (s.saw[0] == 0) s.registered[signal] = 1;
            *next = s.saw[0] == 0 ? 2 : 0;
            return true;
          }};
}

/// Signal::raise: one section adds and detaches; then the waiter is told, and this thread goes on admitting.
Process<Waiting> raiser(int signal) {
  return {3, [signal](Waiting& s, int step, int* next) {
            if (step == 0) {
              ++s.value[signal];
              s.detached[signal] = s.registered[signal];
              s.registered[signal] = 0;
              return true;
            }
            if (step == 1) {
              if (s.detached[signal] == 0) *next = 3;
              s.detached[signal] = 0;
              return true;
            }
            return admit(s, 2, 3, next);
          }};
}

/// Planted: looks for waiters first, adds afterwards.
Process<Waiting> raiser_detach_first(int signal) {
  return {4, [signal](Waiting& s, int step, int* next) {
            if (step == 0) {
              s.detached[signal] = s.registered[signal];
              s.registered[signal] = 0;
              return true;
            }
            if (step == 1) {
              ++s.value[signal];
              return true;
            }
            if (step == 2) {
              if (s.detached[signal] == 0) *next = 4;
              s.detached[signal] = 0;
              return true;
            }
            return admit(s, 3, 4, next);
          }};
}

int bad_waits(Process<Waiting> waiter, Process<Waiting> first, Process<Waiting> second) {
  Explorer<Waiting> explorer({std::move(waiter), std::move(first), std::move(second)},
                             [](const Waiting& s) { return s.readied == 1 && !s.early; });
  return explorer.bad_ends(Waiting{});
}

}  // namespace

CASE("wait against raise: the task becomes ready exactly once, never early") {
  EXPECT_EQ(bad_waits(admitter(), raiser(0), raiser(1)), 0);
}

CASE("model finds a wait that compares before it locks (mistake: lost wake-ups)") {
  EXPECT(bad_waits(admitter_that_compares_first(), raiser(0), raiser(1)) > 0);
}

CASE("model finds a raise that looks for waiters before it adds") {
  EXPECT(bad_waits(admitter(), raiser_detach_first(0), raiser(1)) > 0);
}

CASE("model finds a task touched after it was registered") {
  EXPECT(bad_waits(admitter_that_counts_late(), raiser(0), raiser(1)) > 0);
}

TILEWISE_TEST_MAIN
