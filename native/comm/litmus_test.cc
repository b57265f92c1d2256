// Litmus shapes on our signals, twice: with threads as devices on the real Signal, thousands of rounds, and in an
// exhaustive model of release/acquire memory, in which every planted mistake must be found.
//
// What docs/memory_model.md promises, per shape (x is a tile, s and t are signals, all start at 0):
//   message passing   x = 1; raise s             | s seen; read x                      x = 0 forbidden
//   reuse             x = 1; raise s; ack; x = 2 | s seen; read x; raise ack           x = 2 forbidden
//   ISA2              x = 1; raise s | s seen; raise t | t seen; read x                x = 0 forbidden
//   store buffering   raise s; look at t         | raise t; look at s                  both 0: allowed for value(),
//                                                                                      forbidden for wait()
//   IRIW              raise s | raise t | look at s, t | look at t, s                  opposite orders: as above
// value() is an acquire load. wait() compares inside the signal's lock, in which raise() adds: that is a total order
// per signal, and what a lost wake-up would have to break. Tasks only ever use wait().
#include <algorithm>
#include <array>
#include <barrier>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "comm/signal.h"

using namespace tilewise::comm;

namespace {

constexpr int64_t kRounds = 4000;
constexpr int64_t kTileElements = 48;  // several cache lines

// --- on threads ------------------------------------------------------------------------------------------------

/// Waits as a task does: one compare-and-register, then the raiser tells. Odd epochs poll value() instead.
void await(Signal& signal, uint64_t epoch) {
  if (epoch % 2 == 1) {
    while (signal.value() < epoch) std::this_thread::yield();
    return;
  }
  struct Told : Waiter {
    std::atomic<bool> told{false};
  } waiter;
  waiter.threshold = epoch;
  waiter.on_raised = [](Waiter* self, uint64_t) {
    static_cast<Told*>(self)->told.store(true, std::memory_order_release);
  };
  uint64_t poison = 0;
  if (signal.wait(&waiter, &poison)) return;
  while (!waiter.told.load(std::memory_order_acquire)) std::this_thread::yield();
}

/// Whether wait() finds the epoch reached. An unmet waiter stays registered, so it lives as long as the board.
bool has_reached(Signal& signal, Waiter& waiter, uint64_t epoch) {
  waiter.threshold = epoch;
  waiter.on_raised = [](Waiter*, uint64_t) {};
  uint64_t poison = 0;
  return signal.wait(&waiter, &poison);
}

/// Runs the devices' loops side by side.
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
    return std::all_of(data.begin(), data.end(), [&](int64_t found) { return found == value; });
  }
};

/// One device writes and raises, `hops` devices pass the news on, the last reads and acknowledges. Counts wrong tiles.
int64_t stale_reads(int64_t hops) {
  SignalBoard board(hops + 2);
  Signal& ack = board[hops + 1];
  Tile tile;
  int64_t stale = 0;
  std::vector<std::function<void()>> devices{[&] {
    for (int64_t r = 1; r <= kRounds; ++r) {
      await(ack, r - 1);
      tile.write(r);
      board[0].raise(0);
    }
  }};
  for (int64_t hop = 0; hop < hops; ++hop) {
    devices.push_back([&, hop] {
      for (int64_t r = 1; r <= kRounds; ++r) {
        await(board[hop], r);
        board[hop + 1].raise(0);
      }
    });
  }
  devices.push_back([&] {
    for (int64_t r = 1; r <= kRounds; ++r) {
      await(board[hops], r);
      stale += tile.holds(r) ? 0 : 1;
      ack.raise(0);
    }
  });
  run_devices(devices);
  return stale;
}

/// Store buffering with looks through wait(): rounds in which both devices saw the other's signal unraised.
int64_t both_missed() {
  SignalBoard board(2 * kRounds);
  std::vector<Waiter> waiters(2 * kRounds);
  std::vector<char> saw(2 * kRounds);
  std::barrier start(2);
  const auto device = [&](int64_t me) {
    for (int64_t r = 0; r < kRounds; ++r) {
      start.arrive_and_wait();
      board[2 * r + me].raise(0);
      saw[2 * r + me] = has_reached(board[2 * r + 1 - me], waiters[2 * r + me], 1);
    }
  };
  run_devices({[&] { device(0); }, [&] { device(1); }});
  int64_t missed = 0;
  for (int64_t r = 0; r < kRounds; ++r) missed += !saw[2 * r] && !saw[2 * r + 1];
  return missed;
}

/// IRIW with looks through wait(): rounds in which two readers saw two raises in opposite orders. Each writer fills a
/// tile before it raises; `stale` counts readers that saw a raise without its tile.
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
      board[2 * r + me].raise(0);
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

// --- in the model ----------------------------------------------------------------------------------------------

constexpr int kLocations = 4;
using View = std::array<int, kLocations>;  // per location the oldest write a device may still read

enum class Kind {
  kWrite,         // plain store of `value`
  kRead,          // plain load
  kRaise,         // Signal::raise: add in the lock, release store
  kLook,          // Signal::value: acquire load
  kWait,          // Signal::wait: compare in the lock
  kAwait,         // kWait that goes on only when the signal is raised
  kAwaitLook,     // kLook that goes on only when the signal is raised
  kRelaxedRaise,  // planted: no lock, relaxed store
  kRelaxedAwait,  // planted: relaxed load
};
struct Step {
  Kind kind;
  int location;
  int value = 1;
};
using Device = std::vector<Step>;
using Outcome = std::vector<int>;  // what the loads found, device after device

/// Release/acquire memory, operationally: a location is the list of its writes; each carries what its writer had seen
/// (release) or nothing (relaxed). A load takes any write that is not older than the device's view and, as an acquire,
/// joins what that write carries. So stores may reach devices late and in different orders.
class Model {
 public:
  explicit Model(std::vector<Device> devices) : devices_(std::move(devices)) {}

  std::set<Outcome> outcomes() {
    State start;
    for (auto& writes : start.writes) writes.push_back({});
    start.at.resize(devices_.size());
    start.views.resize(devices_.size());
    start.found.resize(devices_.size());
    visit(start);
    return outcomes_;
  }

 private:
  struct Write {
    int value = 0;
    View carried{};
    auto operator<=>(const Write&) const = default;
  };
  struct State {
    std::array<std::vector<Write>, kLocations> writes;
    std::array<View, kLocations> locks{};  // what the last holder of a signal's lock had seen
    std::vector<size_t> at;
    std::vector<View> views;
    std::vector<Outcome> found;
    auto operator<=>(const State&) const = default;
  };

  static void join(View& view, const View& other) {
    for (int l = 0; l < kLocations; ++l) view[l] = std::max(view[l], other[l]);
  }

  void visit(const State& state) {
    if (!seen_.insert(state).second) return;
    bool done = true;
    for (size_t d = 0; d < devices_.size(); ++d) {
      if (state.at[d] == devices_[d].size()) continue;
      done = false;
      advance(state, d, devices_[d][state.at[d]]);
    }
    if (!done) return;
    Outcome all;
    for (const Outcome& found : state.found) all.insert(all.end(), found.begin(), found.end());
    outcomes_.insert(all);
  }

  void advance(State state, size_t device, const Step& step) {
    View& view = state.views[device];
    auto& writes = state.writes[step.location];
    const bool is_locked = step.kind == Kind::kRaise || step.kind == Kind::kWait || step.kind == Kind::kAwait;
    ++state.at[device];
    if (is_locked) join(view, state.locks[step.location]);
    if (step.kind == Kind::kWrite || step.kind == Kind::kRaise || step.kind == Kind::kRelaxedRaise) {
      view[step.location] = static_cast<int>(writes.size());
      View carried{};
      carried[step.location] = view[step.location];
      writes.push_back({step.value, step.kind == Kind::kRaise ? view : carried});
      if (is_locked) state.locks[step.location] = view;
      visit(state);
      return;
    }
    for (int w = view[step.location]; w < static_cast<int>(writes.size()); ++w) load(state, device, step, w);
  }

  void load(State state, size_t device, const Step& step, int which) {
    const Write& write = state.writes[step.location][which];
    const bool must_be_raised =
        step.kind == Kind::kAwait || step.kind == Kind::kAwaitLook || step.kind == Kind::kRelaxedAwait;
    if (must_be_raised && write.value == 0) return;
    View& view = state.views[device];
    view[step.location] = which;
    if (step.kind == Kind::kLook || step.kind == Kind::kAwaitLook) join(view, write.carried);
    if (step.kind == Kind::kWait || step.kind == Kind::kAwait) state.locks[step.location] = view;
    if (!must_be_raised) state.found[device].push_back(write.value);
    visit(state);
  }

  std::vector<Device> devices_;
  std::set<State> seen_;
  std::set<Outcome> outcomes_;
};

bool can_end(std::vector<Device> devices, const Outcome& outcome) {
  return Model(std::move(devices)).outcomes().count(outcome) != 0;
}

constexpr int kTile = 0, kS = 1, kT = 2, kAck = 3;

std::vector<Device> message(Kind raise, Kind await_s) {
  return {{{Kind::kWrite, kTile}, {raise, kS}}, {{await_s, kS}, {Kind::kRead, kTile}}};
}

std::vector<Device> third_device(Kind raise, Kind await_s, Kind pass_on) {
  return {{{Kind::kWrite, kTile}, {raise, kS}}, {{await_s, kS}, {pass_on, kT}}, {{await_s, kT}, {Kind::kRead, kTile}}};
}

std::vector<Device> reuse(Kind await_s, bool waits_for_ack) {
  Device owner{{Kind::kWrite, kTile}, {Kind::kRaise, kS}};
  if (waits_for_ack) owner.push_back({await_s, kAck});
  owner.push_back({Kind::kWrite, kTile, 2});
  return {owner, {{await_s, kS}, {Kind::kRead, kTile}, {Kind::kRaise, kAck}}};
}

std::vector<Device> store_buffering(Kind look) {
  return {{{Kind::kRaise, kS}, {look, kT}}, {{Kind::kRaise, kT}, {look, kS}}};
}

std::vector<Device> iriw(Kind look) {
  return {{{Kind::kRaise, kS}}, {{Kind::kRaise, kT}}, {{look, kS}, {look, kT}}, {{look, kT}, {look, kS}}};
}

/// Two workers of a device raise one signal, the first after writing the tile; the reader waits for the first raise.
/// kAck stands for the first worker's task being complete: the second may have to wait for that.
std::vector<Device> two_raisers(bool in_order) {
  Device second{{Kind::kRaise, kS}};
  if (in_order) second.insert(second.begin(), {Kind::kAwait, kAck});
  const Device first{{Kind::kWrite, kTile}, {Kind::kRaise, kS}, {Kind::kRaise, kAck}};
  return {first, second, {{Kind::kAwait, kS}, {Kind::kRead, kTile}}};
}

}  // namespace

CASE("message passing: who sees the signal sees the tile, and no tile is reused under its reader") {
  EXPECT_EQ(stale_reads(0), 0);
}

CASE("ISA2: the news may come through a third and a fourth device") {
  EXPECT_EQ(stale_reads(1), 0);
  EXPECT_EQ(stale_reads(2), 0);
}

CASE("store buffering: two waits cannot both miss the other's raise") { EXPECT_EQ(both_missed(), 0); }

CASE("IRIW: waits see two raises in one order, each with its tile") {
  int64_t stale = 0;
  EXPECT_EQ(opposite_orders(&stale), 0);
  EXPECT_EQ(stale, 0);
}

CASE("who sees a poisoned raise sees the poison") {
  SignalBoard board(kRounds);
  int64_t unpoisoned = 0;
  run_devices({[&] {
                 for (int64_t r = 0; r < kRounds; ++r) board[r].raise(r + 1);
               },
               [&] {
                 for (int64_t r = 0; r < kRounds; ++r) {
                   await(board[r], 1);
                   unpoisoned += board[r].poison() != static_cast<uint64_t>(r + 1);
                 }
               }});
  EXPECT_EQ(unpoisoned, 0);
}

CASE("model: message passing, reuse and ISA2 hold for value() and wait()") {
  for (Kind await_s : {Kind::kAwait, Kind::kAwaitLook}) {
    EXPECT(!can_end(message(Kind::kRaise, await_s), {0}));
    EXPECT(can_end(message(Kind::kRaise, await_s), {1}));
    EXPECT(!can_end(reuse(await_s, true), {0}));
    EXPECT(!can_end(reuse(await_s, true), {2}));
    EXPECT(!can_end(third_device(Kind::kRaise, await_s, Kind::kRaise), {0}));
  }
}

CASE("model finds a relaxed raise (mistake: a raise that does not release)") {
  EXPECT(can_end(message(Kind::kRelaxedRaise, Kind::kAwaitLook), {0}));
  EXPECT(can_end(third_device(Kind::kRelaxedRaise, Kind::kAwaitLook, Kind::kRaise), {0}));
  EXPECT(can_end(third_device(Kind::kRaise, Kind::kAwaitLook, Kind::kRelaxedRaise), {0}));
}

CASE("model finds a relaxed look (mistake: a wait that does not acquire)") {
  EXPECT(can_end(message(Kind::kRaise, Kind::kRelaxedAwait), {0}));
}

CASE("model finds memory reused without acknowledgement") { EXPECT(can_end(reuse(Kind::kAwait, false), {2})); }

CASE("model: an epoch stands for its own raise when a device raises a signal in order, and only then") {
  EXPECT(!can_end(two_raisers(true), {0}));
  EXPECT(can_end(two_raisers(false), {0}));
}

CASE("model: store buffering and IRIW are weak for value(), not for wait()") {
  EXPECT(can_end(store_buffering(Kind::kLook), {0, 0}));
  EXPECT(!can_end(store_buffering(Kind::kWait), {0, 0}));
  EXPECT(can_end(iriw(Kind::kLook), {1, 0, 1, 0}));
  EXPECT(!can_end(iriw(Kind::kWait), {1, 0, 1, 0}));
}

TILEWISE_TEST_MAIN
