// Workers of a device issue its tile program one at a time; the run ends after its last task.
//
// Purpose: `turn` says whether a worker is issuing instructions. `unfinished` counts the tasks that have not ended,
// added in batches, plus kOpen while the program has not been issued to its end, so it cannot reach zero before that.
// The thread that brings it to zero ends the run. The issuing worker gives up its turn first, because the next run may
// start at once. Callers: open() between runs; take(), pause() and close() by the issuing worker; left() by any worker.
// Blocking: only hold(), which spins. Memory: two words, each on its own cache line.
//
// Memory order: a pause releases what the issuing worker has written to the next worker that takes the turn. left()
// releases what a task has written to the thread that ends the run.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct IssueTurnOrders {
  static constexpr auto kStart = std::memory_order_release;
  static constexpr auto kTakeTurn = std::memory_order_acquire;
  static constexpr auto kPause = std::memory_order_release;
  static constexpr auto kClose = std::memory_order_release;  // to a thread in hold()
  static constexpr auto kLeave = std::memory_order_acq_rel;
};

template <class Memory, class Orders = IssueTurnOrders>
struct IssueTurn {
  enum Turn : uint32_t { kClosed, kFree, kTaken };
  static constexpr int64_t kOpen = int64_t{1} << 40;

  /// Between runs.
  void open() {
    unfinished.store(kOpen, std::memory_order_relaxed);
    turn.store(kFree, Orders::kStart);
  }
  /// The number of unfinished tasks while a run is open.
  int64_t num_live() const { return unfinished.load(std::memory_order_relaxed) - kOpen; }
  bool is_free() const { return turn.load(std::memory_order_relaxed) == kFree; }
  /// Returns true if this worker may issue instructions, until it pauses or closes.
  bool take() {
    Turn free = kFree;
    return turn.compare_exchange_strong(free, kTaken, Orders::kTakeTurn, std::memory_order_relaxed);
  }
  /// Ends the turn after `count` submissions; the program has further instructions.
  void pause(int64_t count) {
    unfinished.fetch_add(count, std::memory_order_relaxed);
    turn.store(kFree, Orders::kPause);
  }
  /// Ends the last turn after `count` submissions; the program has no further instructions. Returns true if all tasks,
  /// and so the run, have ended.
  bool close(int64_t count) {
    turn.store(kClosed, Orders::kClose);
    const int64_t change = count - kOpen;
    return unfinished.fetch_add(change, Orders::kLeave) + change == 0;
  }
  /// Counts the end of a task. Returns true if it was the last, which ends the run.
  bool left() { return unfinished.fetch_sub(1, Orders::kLeave) == 1; }

  /// Keeps workers from issuing until release(before); returns the state before.
  Turn hold() {
    Turn before = turn.exchange(kTaken, Orders::kTakeTurn);
    for (; before == kTaken; before = turn.exchange(kTaken, Orders::kTakeTurn)) Memory::relax();
    return before;
  }
  void release(Turn before) { turn.store(before, Orders::kPause); }

  alignas(128) typename Memory::template Atomic<Turn> turn{kClosed};
  alignas(128) typename Memory::template Atomic<int64_t> unfinished{0};
};

}  // namespace tilewise::protocols
