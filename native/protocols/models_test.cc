// Exhaustive interleavings of the task runtime's protocols, each step as atomic as in the code:
//   slots: a waiter's compare-and-swap against completion's exchange against the slot's next use (hot.h, run.cc),
//   parking: announce, barrier, look, under store buffers (sleep.h, run.cc: park_worker, wake_worker),
//   events, tokens, rings. lifetime_models_test.cc has the counters of segments and children.
// Every planted wrong order must be found.
#include "base/interleavings.h"
#include "base/testing.h"

using tilewise::testing::Explorer;
using tilewise::testing::Process;

namespace {

// --- slots -------------------------------------------------------------------------------------------------------

/// Consumers 0 and 1, each behind producers 0 and 1. Generation 1: the producer lives; 2: free; 3: somebody else's.
struct Slots {
  int generation[2] = {1, 1};
  int head[2] = {0, 0};  // first waiter + 1
  int next[2] = {0, 0};
  int left[2] = {2, 2};
  int readied[2] = {0, 0};
  int at[3] = {0, 0, 0};     // per process: the consumer + 1 it advances
  int after[3] = {0, 0, 0};  // and the one behind it
  int saw_generation[3] = {0, 0, 0};
  int saw_head[3] = {0, 0, 0};
  int is_early = 0;
  std::vector<int> key() const {
    std::vector<int> all{is_early};
    for (const auto& pair : {generation, head, next, left, readied}) all.insert(all.end(), pair, pair + 2);
    for (const auto& triple : {at, after, saw_generation, saw_head}) all.insert(all.end(), triple, triple + 3);
    return all;
  }
};

enum class Flaw { kNone, kNoGeneration, kStoreWithoutCompare, kMarkAfterWaking };

/// Steps 1 to 3 advance consumer after consumer. The submitter begins at 1 with a list of both; completion at 0.
Process<Slots> advancer(int self, int producer, Flaw flaw) {
  return {5, [=](Slots& s, int step, int* next) {
            const auto pick = [&](int consumer) {
              s.at[self] = consumer;
              s.after[self] = consumer != 0 ? s.next[consumer - 1] : 0;
            };
            if (step == 0) {
              if (producer < 0) {
                s.next[0] = 2;
                pick(1);
              } else {
                if (flaw != Flaw::kMarkAfterWaking) s.generation[producer] = 2;
                pick(s.head[producer]);
                s.head[producer] = 0;
              }
              return true;
            }
            if (step == 4) {
              if (flaw == Flaw::kMarkAfterWaking && producer >= 0) s.generation[producer] = 2;
              return true;
            }
            const int c = s.at[self] - 1;
            if (step == 1) {
              if (c < 0) *next = 4;
              return true;
            }
            if (step == 2) {
              if (flaw == Flaw::kMarkAfterWaking && producer >= 0 && s.left[c] == producer + 1) --s.left[c];
              if (s.left[c] == 0) {
                ++s.readied[c];
                s.is_early |= s.generation[0] == 1 || s.generation[1] == 1 ? flaw != Flaw::kMarkAfterWaking : 0;
                pick(s.after[self]);
                *next = 1;
                return true;
              }
              const int p = s.left[c] - 1;
              s.saw_generation[self] = s.generation[p];
              s.saw_head[self] = s.head[p];
              const bool is_done = flaw == Flaw::kNoGeneration ? s.generation[p] == 2 : s.generation[p] != 1;
              if (!is_done) return true;
              --s.left[c];
              *next = 2;
              return true;
            }
            const int p = s.left[c] - 1;
            const int follower = s.after[self];
            const bool is_same = s.head[p] == s.saw_head[self] &&
                                 (flaw == Flaw::kNoGeneration || s.generation[p] == s.saw_generation[self]);
            if (!is_same && flaw != Flaw::kStoreWithoutCompare) {
              *next = 2;
              return true;
            }
            s.next[c] = s.saw_head[self];
            s.head[p] = c + 1;
            pick(follower);
            *next = 1;
            return true;
          }};
}

int bad_slots(Flaw flaw) {
  const Process<Slots> reuse{1, [](Slots& s, int, int*) {
                               if (s.generation[1] != 2) return false;
                               s.generation[1] = 3;
                               return true;
                             }};
  Explorer<Slots> explorer({advancer(0, -1, flaw), advancer(1, 0, flaw), advancer(2, 1, flaw), reuse},
                           [](const Slots& s) { return s.readied[0] == 1 && s.readied[1] == 1 && s.is_early == 0; });
  return explorer.bad_ends(Slots{});
}

// --- parking under store buffers ---------------------------------------------------------------------------------

/// One worker; two producers of one task each. A producer's store waits in its buffer until it drains.
struct Parking {
  int work[2] = {0, 0};
  int buffered[2] = {0, 0};
  int parked = 0;
  int word = 0;
  int saw_word = 0;
  int saw_work = 0;
  int saw_parked[2] = {0, 0};
  int asleep = 0;
  int done = 0;
  std::vector<int> key() const {
    return {work[0],  work[1],  buffered[0],   buffered[1],   parked, word,
            saw_word, saw_work, saw_parked[0], saw_parked[1], asleep, done};
  }
};

enum class Barrier { kAsymmetric, kFences, kNone, kLookFirst };

Process<Parking> parker(Barrier barrier) {
  return {7, [barrier](Parking& s, int step, int* next) {
            const bool looks_first = barrier == Barrier::kLookFirst;
            switch (step) {
              case 0:
                s.saw_word = s.word;
                return true;
              case 1:
              case 3:
                if ((step == 1) != looks_first) {
                  s.parked = 1;
                } else {
                  s.saw_work = s.work[0] + s.work[1];
                }
                return true;
              case 2:
                if (barrier != Barrier::kAsymmetric && barrier != Barrier::kLookFirst) return true;
                for (int p = 0; p < 2; ++p) {  // membarrier: every thread's stores are out
                  if (s.buffered[p] == 0) continue;
                  s.work[p] = 1;
                  s.buffered[p] = 0;
                }
                return true;
              case 4:
                s.asleep = s.saw_work == 0 && s.word == s.saw_word;
                return true;
              case 5:
                if (s.asleep != 0) return false;
                s.parked = 0;
                return true;
              default:
                for (int& work : s.work) {
                  s.done += work;
                  work = 0;
                }
                *next = s.done == 2 ? 7 : 0;
                return true;
            }
          }};
}

Process<Parking> producer(int self, Barrier barrier) {
  return {4, [=](Parking& s, int step, int*) {
            if (step == 0) s.buffered[self] = 1;
            if (step == 1 && barrier == Barrier::kFences && s.buffered[self] != 0) {
              s.work[self] = 1;
              s.buffered[self] = 0;
            }
            if (step == 2) s.saw_parked[self] = s.parked;
            if (step == 3 && s.saw_parked[self] != 0) {
              ++s.word;
              s.asleep = 0;
            }
            return true;
          }};
}

Process<Parking> drain(int self) {
  return {1, [self](Parking& s, int, int*) {
            if (s.buffered[self] == 0) return false;
            s.work[self] = 1;
            s.buffered[self] = 0;
            return true;
          }};
}

int bad_parking(Barrier barrier) {
  Explorer<Parking> explorer({parker(barrier), producer(0, barrier), producer(1, barrier), drain(0), drain(1)},
                             [](const Parking& s) { return s.done == 2; });
  return explorer.bad_ends(Parking{});
}

// --- events ------------------------------------------------------------------------------------------------------

/// Two waiters for values 1 and 2; two raises by 1. One section compares and registers, one adds and detaches.
struct EventModel {
  int value = 0;
  int registered[2] = {0, 0};
  int saw[2] = {0, 0};
  int readied[2] = {0, 0};
  int is_early = 0;
  std::vector<int> key() const {
    return {value, registered[0], registered[1], saw[0], saw[1], readied[0], readied[1], is_early};
  }
  void make_ready(int waiter) {
    ++readied[waiter];
    is_early |= value < waiter + 1;
  }
};

int bad_events(bool compares_outside) {
  const auto waiter = [&](int self) -> Process<EventModel> {
    return {2, [self, compares_outside](EventModel& s, int step, int*) {
              if (step == 0) {
                s.saw[self] = s.value;
                if (compares_outside) return true;
              } else if (!compares_outside) {
                return true;
              }
              if (s.saw[self] >= self + 1) {
                s.make_ready(self);
              } else {
                s.registered[self] = 1;
              }
              return true;
            }};
  };
  const Process<EventModel> raiser{1, [](EventModel& s, int, int*) {
                                     ++s.value;
                                     for (int w = 0; w < 2; ++w) {
                                       if (s.registered[w] == 0 || s.value < w + 1) continue;
                                       s.registered[w] = 0;
                                       s.make_ready(w);
                                     }
                                     return true;
                                   }};
  Explorer<EventModel> explorer({waiter(0), waiter(1), raiser, raiser}, [](const EventModel& s) {
    return s.readied[0] == 1 && s.readied[1] == 1 && s.is_early == 0;
  });
  return explorer.bad_ends(EventModel{});
}

// --- tokens ------------------------------------------------------------------------------------------------------

/// Three tasks, one token: [held | first waiter + 1]. Each process takes for its task; who releases takes for waiters.
struct Token {
  int held = 0;
  int head = 0;
  int next[3] = {0, 0, 0};
  int ran[3] = {0, 0, 0};
  int inside = 0;
  int overlap = 0;
  int at[3] = {1, 2, 3};  // task + 1 for which the process takes
  int rest[3] = {0, 0, 0};
  int mine[3] = {0, 0, 0};  // task + 1 that the process will run
  int saw_held[3] = {0, 0, 0}, saw_head[3] = {0, 0, 0};
  std::vector<int> key() const {
    std::vector<int> all{held, head, inside, overlap};
    for (const auto& triple : {next, ran, at, rest, mine, saw_held, saw_head}) {
      all.insert(all.end(), triple, triple + 3);
    }
    return all;
  }
};

Process<Token> commuter(int self, bool forgets_waiters) {
  return {5, [=](Token& s, int step, int* next) {
            const auto proceed = [&] {  // to the next waiter, or to run what was given
              s.at[self] = s.rest[self];
              s.rest[self] = s.at[self] != 0 ? s.next[s.at[self] - 1] : 0;
              *next = s.at[self] != 0 ? 0 : s.mine[self] != 0 ? 2 : 5;
            };
            const int task = s.at[self] - 1;
            switch (step) {
              case 0:
                s.saw_held[self] = s.held;
                s.saw_head[self] = s.head;
                return true;
              case 1:
                if (s.held != s.saw_held[self] || s.head != s.saw_head[self]) {
                  *next = 0;
                } else if (s.held == 0) {
                  s.held = 1;
                  s.mine[self] = task + 1;
                  proceed();
                } else {
                  s.next[task] = s.head;
                  s.head = task + 1;
                  proceed();
                }
                return true;
              case 2:
                s.overlap |= s.inside++ != 0;
                return true;
              case 3:
                --s.inside;
                ++s.ran[s.mine[self] - 1];
                return true;
              default:
                s.mine[self] = 0;
                s.held = 0;
                s.rest[self] = forgets_waiters ? 0 : s.head;
                s.head = 0;
                proceed();
                return true;
            }
          }};
}

int bad_tokens(bool forgets_waiters) {
  Explorer<Token> explorer(
      {commuter(0, forgets_waiters), commuter(1, forgets_waiters), commuter(2, forgets_waiters)},
      [](const Token& s) { return s.ran[0] == 1 && s.ran[1] == 1 && s.ran[2] == 1 && s.overlap == 0; });
  return explorer.bad_ends(Token{});
}

// --- ring --------------------------------------------------------------------------------------------------------

/// Two cells; the owner pushes 1, 2, 3; one taker takes one at a time, the other half of what there is.
struct RingModel {
  int cells[2] = {0, 0};
  int head = 0, tail = 0;
  int newest = 0;  // of the tail's word
  int saw_head[3] = {0, 0, 0}, saw_tail[2] = {0, 0}, saw_newest[2] = {0, 0}, saw_cell[2][2] = {};
  int taken[4] = {0, 0, 0, 0};
  std::vector<int> key() const {
    std::vector<int> all{cells[0],    cells[1],    head,          tail,         newest,
                         saw_tail[0], saw_tail[1], saw_newest[0], saw_newest[1]};
    all.insert(all.end(), saw_head, saw_head + 3);
    all.insert(all.end(), taken, taken + 4);
    for (const auto& pair : saw_cell) all.insert(all.end(), pair, pair + 2);
    return all;
  }
};

Process<RingModel> owner() {
  return {9, [](RingModel& s, int step, int*) {
            if (step % 3 == 0) {
              if (s.tail - s.head >= 2) return false;
            } else if (step % 3 == 1) {
              s.cells[s.tail % 2] = step / 3 + 1;
            } else {
              ++s.tail;
              s.newest = step / 3 + 1;
            }
            return true;
          }};
}

enum class RingFlaw { kNone, kReadsLate, kNewestOfAnotherLook };

Process<RingModel> taker(int self, RingFlaw flaw) {
  return {5, [=](RingModel& s, int step, int* next) {
            const int head = s.saw_head[self];
            const int count = self == 0 ? 1 : (s.saw_tail[self] - head + 1) / 2;
            const auto read = [&] {
              const int newest = flaw == RingFlaw::kNewestOfAnotherLook ? s.newest : s.saw_newest[self];
              for (int i = 0; i < count; ++i) {
                s.saw_cell[self][i] = head + i + 1 == s.saw_tail[self] ? newest : s.cells[(head + i) % 2];
              }
            };
            switch (step) {
              case 0:
                s.saw_head[self] = s.head;
                return true;
              case 1:
                s.saw_tail[self] = s.tail;
                s.saw_newest[self] = s.newest;
                if (s.tail == head) {
                  if (s.tail < 3) return false;
                  *next = 5;
                } else if (s.tail < head) {
                  *next = 0;
                }
                return true;
              case 2:
                if (flaw != RingFlaw::kReadsLate) read();
                return true;
              case 3:
                if (s.head != head) {
                  *next = 0;
                } else {
                  s.head += count;
                }
                return true;
              default:
                if (flaw == RingFlaw::kReadsLate) read();
                for (int i = 0; i < count; ++i) ++s.taken[s.saw_cell[self][i]];
                *next = 0;
                return true;
            }
          }};
}

int bad_rings(RingFlaw flaw) {
  Explorer<RingModel> explorer({owner(), taker(0, flaw), taker(1, flaw)}, [](const RingModel& s) {
    return s.taken[0] == 0 && s.taken[1] == 1 && s.taken[2] == 1 && s.taken[3] == 1;
  });
  return explorer.bad_ends(RingModel{});
}

}  // namespace

CASE("slots: every consumer becomes ready exactly once, behind two producers, one slot used again") {
  EXPECT_EQ(bad_slots(Flaw::kNone), 0);
}
CASE("model finds a waiter that does not compare the generation (mistake: ABA on slot reuse)") {
  EXPECT(bad_slots(Flaw::kNoGeneration) > 0);
}
CASE("model finds a waiter that stores without comparing (mistake: list changed without its lock)") {
  EXPECT(bad_slots(Flaw::kStoreWithoutCompare) > 0);
}
CASE("model finds a completion that wakes before it marks (mistake: completion store before the lock)") {
  EXPECT(bad_slots(Flaw::kMarkAfterWaking) > 0);
}
CASE("parking: under store buffers nobody sleeps over work, with membarrier or with fences") {
  EXPECT_EQ(bad_parking(Barrier::kAsymmetric), 0);
  EXPECT_EQ(bad_parking(Barrier::kFences), 0);
}
CASE("model finds parking without a barrier (mistake: store/load crossing)") {
  EXPECT(bad_parking(Barrier::kNone) > 0);
}
CASE("model finds a sleeper that looks before it announces itself") { EXPECT(bad_parking(Barrier::kLookFirst) > 0); }
CASE("events: compare and register in one section loses no raise") { EXPECT_EQ(bad_events(false), 0); }
CASE("model finds a comparison outside the section (mistake: lost wake-up)") { EXPECT(bad_events(true) > 0); }
CASE("tokens: three commuting tasks run once each, one at a time") { EXPECT_EQ(bad_tokens(false), 0); }
CASE("model finds a release that forgets its waiters") { EXPECT(bad_tokens(true) > 0); }
CASE("ring: one owner and two takers, one of them in batches, lose and duplicate nothing") {
  EXPECT_EQ(bad_rings(RingFlaw::kNone), 0);
}
CASE("model finds a taker that reads its cells after it has given them up") {
  EXPECT(bad_rings(RingFlaw::kReadsLate) > 0);
}
CASE("model finds a taker that believes the newest task of a later tail") {
  EXPECT(bad_rings(RingFlaw::kNewestOfAnotherLook) > 0);
}
TILEWISE_TEST_MAIN
