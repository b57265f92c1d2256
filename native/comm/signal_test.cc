// Signals: thresholds, poison, exactly-once calls, no lost wake-up between threads.
#include "comm/signal.h"

#include <thread>
#include <vector>

#include "base/testing.h"

using namespace tilewise::comm;

namespace {

struct Counting : Waiter {
  std::atomic<int> calls{0};
  uint64_t poison = 0;
  Counting() {
    on_posted = [](Waiter* self, uint64_t id) {
      auto* me = static_cast<Counting*>(self);
      me->poison = id;
      me->calls.fetch_add(1, std::memory_order_release);
    };
  }
};

}  // namespace

CASE("signals are 128 bytes apart and start at zero") {
  SignalBoard board(3);
  EXPECT_EQ(reinterpret_cast<char*>(&board[1]) - reinterpret_cast<char*>(&board[0]), 128);
  EXPECT_EQ(board[2].value(), 0u);
}

CASE("a met wait returns at once, an unmet one is notified once when its value is reached") {
  SignalBoard board(1);
  Counting low, high, met;
  uint64_t poison = 0;
  low.threshold = 1;
  high.threshold = 3;
  EXPECT(!board[0].wait(&low, &poison));
  EXPECT(!board[0].wait(&high, &poison));
  board[0].post(0);
  EXPECT_EQ(low.calls.load(), 1);
  EXPECT_EQ(high.calls.load(), 0);
  board[0].post(9);
  board[0].post(0);
  EXPECT_EQ(high.calls.load(), 1);
  EXPECT_EQ(high.poison, 9u);
  met.threshold = 2;
  EXPECT(board[0].wait(&met, &poison));
  EXPECT_EQ(poison, 9u);
  EXPECT_EQ(low.calls.load(), 1);
}

CASE("no wake-up is lost between a waiting and a posting thread (mistake: lost wake-ups)") {
  SignalBoard board(1);
  constexpr int kRounds = 20000;
  std::thread poster([&] {
    for (int i = 0; i < kRounds; ++i) board[0].post(0);
  });
  std::vector<Counting> waiters(kRounds);
  int64_t data_seen = 0;
  for (int i = 0; i < kRounds; ++i) {
    waiters[i].threshold = i + 1;
    uint64_t poison = 0;
    if (board[0].wait(&waiters[i], &poison)) ++data_seen;
  }
  poster.join();
  int64_t notified = 0;
  for (auto& waiter : waiters) notified += waiter.calls.load();
  EXPECT_EQ(notified + data_seen, kRounds);
}

TILEWISE_TEST_MAIN
