// Exhaustive interleavings of the runtime's three protocols, bounded cases, each step as atomic as in the code:
//   submission against completion (scheduler.cc: submit, complete; one lock section each),
//   wait against raise (device.cc: submit with guard; comm/signal.cc: wait, raise; scheduler.cc: satisfy),
//   sleeping against waking (device.cc: park, wake_one).
// Every planted wrong order must be found, so that the model is known to see what it is for.
#include "base/interleavings.h"
#include "base/testing.h"

using tilewise::testing::Explorer;
using tilewise::testing::Process;

namespace {

// --- submission against completion -----------------------------------------------------------------------------

/// Producer P is live; consumer C is submitted behind it while P completes and its slot is used again by a task Q.
struct Link {
  int slot_sequence = 1;  // P's sequence; 0 when completed; 2 when Q took the slot
  int edge_to_consumer = 0;
  int pending = 0;
  int readied = 0;  // times C was made ready
  int saw_live = 0;
  bool producer_done = false;
  bool ready_too_early = false;
  std::vector<int> key() const {
    return {slot_sequence, edge_to_consumer, pending, readied, saw_live, producer_done, ready_too_early};
  }
};

void make_ready(Link& s) {
  ++s.readied;
  if (!s.producer_done) s.ready_too_early = true;
}

bool submit_locked(Link& s, int, int*) {
  if (s.slot_sequence == 1) {
    s.edge_to_consumer = 1;
    ++s.pending;
  }
  if (s.pending == 0) make_ready(s);
  return true;
}

/// Planted: looks whether the producer is live, and links later, in a second section.
bool submit_split(Link& s, int step, int*) {
  if (step == 0) {
    s.saw_live = s.slot_sequence == 1;
    return true;
  }
  if (s.saw_live) {
    s.edge_to_consumer = 1;
    ++s.pending;
  }
  if (s.pending == 0) make_ready(s);
  return true;
}

/// Planted: compares nothing (a reference to a slot alone): a completed producer, or Q, seems to be the producer.
bool submit_without_sequence(Link& s, int, int*) {
  s.edge_to_consumer = 1;
  ++s.pending;
  return true;
}

bool complete_locked(Link& s, int, int*) {
  s.producer_done = true;
  s.slot_sequence = 0;
  if (s.edge_to_consumer != 0) {
    s.edge_to_consumer = 0;
    if (--s.pending == 0) make_ready(s);
  }
  return true;
}

/// Planted: wakes successors in one section, marks the task completed in another.
bool complete_split(Link& s, int step, int*) {
  if (step == 0) {
    if (s.edge_to_consumer != 0) {
      s.edge_to_consumer = 0;
      if (--s.pending == 0) make_ready(s);
    }
    s.producer_done = true;
    return true;
  }
  s.slot_sequence = 0;
  return true;
}

bool reuse_slot(Link& s, int, int*) {
  if (s.slot_sequence != 0) return false;
  s.slot_sequence = 2;
  return true;
}

int bad_links(Process<Link> submitter, Process<Link> completer) {
  Explorer<Link> explorer({std::move(submitter), std::move(completer), {1, reuse_slot}},
                          [](const Link& s) { return s.readied == 1 && !s.ready_too_early; });
  return explorer.bad_ends(Link{});
}

// --- wait against raise ----------------------------------------------------------------------------------------

/// A task waits for two signals (thresholds 1); two devices raise one each.
struct Waiting {
  int value[2] = {0, 0};
  int registered[2] = {0, 0};
  int detached[2] = {0, 0};
  int saw[2] = {0, 0};
  int pending = 0;
  int met = 0;
  int readied = 0;
  bool early = false;
  std::vector<int> key() const {
    return {value[0], value[1], registered[0], registered[1], detached[0], detached[1], saw[0], saw[1],
            pending,  met,      readied,       early};
  }
};

void drop(Waiting& s, int count) {
  s.pending -= count;
  if (s.pending != 0) return;
  ++s.readied;
  if (s.value[0] == 0 || s.value[1] == 0) s.early = true;
}

/// Device::submit: link with guard; Signal::wait once per signal; drop guard and met waits.
bool wait_guarded(Waiting& s, int step, int*) {
  if (step == 0) s.pending = 2 + 1;
  if (step == 1 || step == 2) {
    const int signal = step - 1;
    if (s.value[signal] >= 1) {
      ++s.met;
    } else {
      s.registered[signal] = 1;
    }
  }
  if (step == 3) drop(s, s.met + 1);
  return true;
}

/// Planted: no guard; each wait counts itself when it registers.
bool wait_unguarded(Waiting& s, int step, int*) {
  const int signal = step;
  if (s.value[signal] >= 1) {
    if (step == 1 && s.pending == 0) drop(s, 0);
    return true;
  }
  ++s.pending;
  s.registered[signal] = 1;
  return true;
}

/// Planted: compares before it takes the signal's lock, registers afterwards.
bool wait_compare_first(Waiting& s, int step, int*) {
  if (step == 0) s.pending = 2 + 1;
  if (step == 1 || step == 3) s.saw[step / 2] = s.value[step / 2];
  if (step == 2 || step == 4) {
    const int signal = step / 2 - 1;
    if (s.saw[signal] >= 1) {
      ++s.met;
    } else {
      s.registered[signal] = 1;
    }
  }
  if (step == 5) drop(s, s.met + 1);
  return true;
}

/// Signal::raise: one section adds and detaches, then the waiter is told.
Process<Waiting> raiser(int signal) {
  return {2, [signal](Waiting& s, int step, int*) {
            if (step == 0) {
              ++s.value[signal];
              s.detached[signal] = s.registered[signal];
              s.registered[signal] = 0;
            } else if (s.detached[signal] != 0) {
              s.detached[signal] = 0;
              drop(s, 1);
            }
            return true;
          }};
}

/// Planted: looks for waiters first, adds afterwards.
Process<Waiting> raiser_detach_first(int signal) {
  return {3, [signal](Waiting& s, int step, int*) {
            if (step == 0) {
              s.detached[signal] = s.registered[signal];
              s.registered[signal] = 0;
            } else if (step == 1) {
              ++s.value[signal];
            } else if (s.detached[signal] != 0) {
              s.detached[signal] = 0;
              drop(s, 1);
            }
            return true;
          }};
}

int bad_waits(Process<Waiting> waiter, Process<Waiting> first, Process<Waiting> second) {
  Explorer<Waiting> explorer({std::move(waiter), std::move(first), std::move(second)},
                             [](const Waiting& s) { return s.readied == 1 && !s.early; });
  return explorer.bad_ends(Waiting{});
}

// --- sleeping against waking -----------------------------------------------------------------------------------

/// One worker that parks, two producers of one task each. The mutex is held from `park` to the sleep.
struct Parking {
  int work = 0;
  int parked = 0;
  int mutex = 0;
  int asleep = 0;
  int woken = 0;
  int done = 0;
  int saw_parked[2] = {0, 0};
  int saw_work = 0;
  std::vector<int> key() const {
    return {work, parked, mutex, asleep, woken, done, saw_parked[0], saw_parked[1], saw_work};
  }
};

/// Device::park: lock, count itself, look, sleep (unlocks in one step), look again; then takes all work.
bool park(Parking& s, int step, int* next) {
  switch (step) {
    case 0:
      if (s.mutex != 0) return false;
      s.mutex = 1;
      return true;
    case 1:
      ++s.parked;
      return true;
    case 2:
      s.saw_work = s.work > 0;
      return true;
    case 3:
      if (s.saw_work) {
        *next = 5;
        return true;
      }
      s.asleep = 1;
      s.mutex = 0;
      return true;
    case 4:
      if (s.asleep != 0 && s.woken == 0) return false;
      if (s.mutex != 0) return false;
      s.mutex = 1;
      s.asleep = 0;
      s.woken = 0;
      *next = 2;
      return true;
    case 5:
      --s.parked;
      s.mutex = 0;
      return true;
    default:
      s.done += s.work;
      s.work = 0;
      *next = s.done == 2 ? 7 : 0;
      return true;
  }
}

/// Planted: looks for work before it counts itself, and not again.
bool park_look_first(Parking& s, int step, int* next) {
  if (step == 1) {
    s.saw_work = s.work > 0;
    return true;
  }
  if (step == 2) {
    ++s.parked;
    return true;
  }
  return park(s, step, next);
}

/// publish() then wake_one(): look at parked; notify under the mutex.
Process<Parking> producer(int number, bool look_first) {
  return {3, [number, look_first](Parking& s, int step, int* next) {
            if (step == (look_first ? 1 : 0)) {
              ++s.work;
            } else if (step == (look_first ? 0 : 1)) {
              s.saw_parked[number] = s.parked;
            } else {
              if (s.saw_parked[number] == 0) return true;
              if (s.mutex != 0) return false;
              if (s.asleep != 0) s.woken = 1;
            }
            (void)next;
            return true;
          }};
}

int bad_parks(Process<Parking> worker, bool look_first) {
  Explorer<Parking> explorer({std::move(worker), producer(0, look_first), producer(1, look_first)},
                             [](const Parking& s) { return s.done == 2; });
  return explorer.bad_ends(Parking{});
}

}  // namespace

CASE("completion against submission: the consumer becomes ready exactly once, never early") {
  EXPECT_EQ(bad_links({1, submit_locked}, {1, complete_locked}), 0);
}

CASE("model finds a submission that checks and links in two sections") {
  EXPECT(bad_links({2, submit_split}, {1, complete_locked}) > 0);
}

CASE("model finds a slot reference without sequence (mistakes: completed producer, ABA on slot reuse)") {
  EXPECT(bad_links({1, submit_without_sequence}, {1, complete_locked}) > 0);
}

CASE("model finds a completion that wakes before it marks (mistake: list walked without its lock)") {
  EXPECT(bad_links({1, submit_locked}, {2, complete_split}) > 0);
}

CASE("wait against raise: the task becomes ready exactly once, never early") {
  EXPECT_EQ(bad_waits({4, wait_guarded}, raiser(0), raiser(1)), 0);
}

CASE("model finds a wait that compares before it locks (mistake: lost wake-ups)") {
  EXPECT(bad_waits({6, wait_compare_first}, raiser(0), raiser(1)) > 0);
}

CASE("model finds a raise that looks for waiters before it adds") {
  EXPECT(bad_waits({4, wait_guarded}, raiser_detach_first(0), raiser(1)) > 0);
}

CASE("model finds waits without the submitter's guard") {
  EXPECT(bad_waits({2, wait_unguarded}, raiser(0), raiser(1)) > 0);
}

CASE("parking against waking: all work is done, whatever the order") {
  EXPECT_EQ(bad_parks({7, park}, false), 0);
}

CASE("model finds a worker that looks before it counts itself (mistake: store/load crossing)") {
  EXPECT(bad_parks({7, park_look_first}, false) > 0);
}

CASE("model finds a producer that looks for sleepers before it publishes") {
  EXPECT(bad_parks({7, park}, true) > 0);
}

TILEWISE_TEST_MAIN
