// Litmus tests of our signals: threads act as devices on the real Signal, in thousands of rounds, also under
// ThreadSanitizer. protocols/tests/counter_checked_test.cc checks the same shapes in every execution.
//
// The promises of docs/memory_model.md, per shape (x is a tile, s and t are signals, all start at 0):
//   message passing   x = 1; post s             | s seen; read x                      x = 0 forbidden
//   reuse             x = 1; post s; ack; x = 2 | s seen; read x; post ack           x = 2 forbidden
//   ISA2              x = 1; post s | s seen; post t | t seen; read x                x = 0 forbidden
//   store buffering   post s; read t            | post t; read s                     both 0: allowed for value(),
//                                                                                      forbidden for wait()
//   IRIW              post s | post t | read s, t | read t, s                        opposite orders: as above
// value() is an acquire load. wait() registers, then compares; post() adds, then checks for waiters. All four are in
// one order that every thread agrees on; a lost wake-up would contradict it. Tasks only use wait().
#include <algorithm>
#include <array>
#include <barrier>
#include <functional>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "comm/signal.h"

using namespace tilewise::comm;

namespace {

constexpr int64_t kRounds = 4000;
constexpr int64_t kTileElements = 48;  // several cache lines

/// Waits like a task: compares and registers once, then the poster calls on_posted. Odd epochs poll value() instead.
void await(Signal& signal, uint64_t epoch) {
  if (epoch % 2 == 1) {
    while (signal.value() < epoch) std::this_thread::yield();
    return;
  }
  struct Notified : Waiter {
    std::atomic<bool> notified{false};
  } waiter;
  waiter.threshold = epoch;
  waiter.on_posted = [](Waiter* self, uint64_t) {
    static_cast<Notified*>(self)->notified.store(true, std::memory_order_release);
  };
  uint64_t poison = 0;
  if (signal.wait(&waiter, &poison)) return;
  while (!waiter.notified.load(std::memory_order_acquire)) std::this_thread::yield();
}

/// Whether wait() returns true. An unmet waiter stays registered, so it must live as long as the board.
bool has_reached(Signal& signal, Waiter& waiter, uint64_t epoch) {
  waiter.threshold = epoch;
  waiter.on_posted = [](Waiter*, uint64_t) {};
  uint64_t poison = 0;
  return signal.wait(&waiter, &poison);
}

/// Runs the devices' loops in parallel.
void run_devices(const std::vector<std::function<void()>>& devices) {
  std::vector<std::thread> threads;
  for (const auto& device : devices) threads.emplace_back(device);
  for (std::thread& thread : threads) thread.join();
}

/// A tile in plain memory: ThreadSanitizer reports every access that the signals do not order.
struct Tile {
  std::array<int64_t, kTileElements> data{};
  void write(int64_t value) { data.fill(value); }
  bool holds(int64_t value) const {
    return std::all_of(data.begin(), data.end(), [&](int64_t element) { return element == value; });
  }
};

/// One device writes and posts, `hops` devices forward the signal, the last reads and acknowledges. Counts wrong tiles.
int64_t stale_reads(int64_t hops) {
  SignalBoard board(hops + 2);
  Signal& ack = board[hops + 1];
  Tile tile;
  int64_t stale = 0;
  std::vector<std::function<void()>> devices{[&] {
    for (int64_t r = 1; r <= kRounds; ++r) {
      await(ack, r - 1);
      tile.write(r);
      board[0].post(0);
    }
  }};
  for (int64_t hop = 0; hop < hops; ++hop) {
    devices.push_back([&, hop] {
      for (int64_t r = 1; r <= kRounds; ++r) {
        await(board[hop], r);
        board[hop + 1].post(0);
      }
    });
  }
  devices.push_back([&] {
    for (int64_t r = 1; r <= kRounds; ++r) {
      await(board[hops], r);
      stale += tile.holds(r) ? 0 : 1;
      ack.post(0);
    }
  });
  run_devices(devices);
  return stale;
}

/// Store buffering with wait(): the number of rounds in which both devices saw the other's signal unposted.
int64_t both_missed() {
  SignalBoard board(2 * kRounds);
  std::vector<Waiter> waiters(2 * kRounds);
  std::vector<char> saw(2 * kRounds);
  std::barrier start(2);
  const auto device = [&](int64_t me) {
    for (int64_t r = 0; r < kRounds; ++r) {
      start.arrive_and_wait();
      board[2 * r + me].post(0);
      saw[2 * r + me] = has_reached(board[2 * r + 1 - me], waiters[2 * r + me], 1);
    }
  };
  run_devices({[&] { device(0); }, [&] { device(1); }});
  int64_t missed = 0;
  for (int64_t r = 0; r < kRounds; ++r) missed += !saw[2 * r] && !saw[2 * r + 1];
  return missed;
}

/// IRIW with wait(): the number of rounds in which two readers saw two posts in opposite orders. Each writer fills a
/// tile before it posts; `stale` counts readers that saw a post without its tile.
int64_t opposite_orders(int64_t* stale) {
  SignalBoard board(2 * kRounds);
  std::vector<Tile> tiles(2 * kRounds);
  std::vector<Waiter> waiters(4 * kRounds);
  std::vector<char> saw(4 * kRounds);
  std::array<int64_t, 2> missing{};
  std::barrier start(4);
  const auto writer = [&](int64_t me) {
    for (int64_t r = 0; r < kRounds; ++r) {
      start.arrive_and_wait();
      tiles[2 * r + me].write(r);
      board[2 * r + me].post(0);
    }
  };
  const auto reader = [&](int64_t me) {
    for (int64_t r = 0; r < kRounds; ++r) {
      start.arrive_and_wait();
      for (int64_t look = 0; look < 2; ++look) {
        const int64_t which = look == 0 ? me : 1 - me;
        const int64_t at = 4 * r + 2 * me + look;
        saw[at] = has_reached(board[2 * r + which], waiters[at], 1);
        if (saw[at] && !tiles[2 * r + which].holds(r)) ++missing[me];
      }
    }
  };
  run_devices({[&] { writer(0); }, [&] { writer(1); }, [&] { reader(0); }, [&] { reader(1); }});
  *stale = missing[0] + missing[1];
  int64_t opposite = 0;
  for (int64_t r = 0; r < kRounds; ++r) {
    const char* s = &saw[4 * r];
    opposite += s[0] && !s[1] && s[2] && !s[3];
  }
  return opposite;
}

}  // namespace

CASE("message passing: a thread that sees the signal sees the tile, and no tile is reused while it is read") {
  EXPECT_EQ(stale_reads(0), 0);
}

CASE("ISA2: the signal may be forwarded by a third and a fourth device") {
  EXPECT_EQ(stale_reads(1), 0);
  EXPECT_EQ(stale_reads(2), 0);
}

CASE("store buffering: two waits cannot both miss the other's post") { EXPECT_EQ(both_missed(), 0); }

CASE("IRIW: waits see two posts in one order, each with its tile") {
  int64_t stale = 0;
  EXPECT_EQ(opposite_orders(&stale), 0);
  EXPECT_EQ(stale, 0);
}

CASE("a thread that sees a poisoned post sees the poison") {
  SignalBoard board(kRounds);
  int64_t unpoisoned = 0;
  run_devices({[&] {
                 for (int64_t r = 0; r < kRounds; ++r) board[r].post(r + 1);
               },
               [&] {
                 for (int64_t r = 0; r < kRounds; ++r) {
                   await(board[r], 1);
                   unpoisoned += board[r].poison() != static_cast<uint64_t>(r + 1);
                 }
               }});
  EXPECT_EQ(unpoisoned, 0);
}

TILEWISE_TEST_MAIN
