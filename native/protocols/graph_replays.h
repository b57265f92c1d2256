// Replays of an instantiated graph: the same tasks again and again, one replay at a time.
//
// A task that ends first prepares its slot for the next replay, then advances its state word, then counts down its
// successors, and last increments the counter of its worker. The sum of these counters says whether a replay is over;
// then no thread accesses anything of it. Callers: the thread that replays (one at a time) calls
// is_over() before it begins; the worker that ends the task calls the rest. Blocks: never. Memory: anywhere.
//
// Memory order: counting releases all that was done to the task, and the sum acquires it. The beginning of a replay
// reaches the tasks through their arrivals (countdown.h).
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct GraphReplayOrders {
  static constexpr auto kCount = std::memory_order_release;
  static constexpr auto kSeeCounts = std::memory_order_acquire;
};

template <class Memory, class Orders = GraphReplayOrders>
struct GraphReplays {
  using Count = typename Memory::template Atomic<uint64_t>;

  /// Only the worker that owns the counter calls this.
  static void count(Count& own) { own.store(own.load(std::memory_order_relaxed) + 1, Orders::kCount); }
  /// The sum of count_of(worker) over all workers.
  template <class CountOf>
  static uint64_t num_done(uint32_t num_workers, CountOf&& count_of) {
    uint64_t total = 0;
    for (uint32_t w = 0; w < num_workers; ++w) total += count_of(w).load(Orders::kSeeCounts);
    return total;
  }
  /// has_last_ended(): a cheap test of one task of the replay. If false, the replay is not over; if true, it may be, so
  /// the counters are summed.
  template <class HasLastEnded, class CountOf>
  static bool is_over(HasLastEnded&& has_last_ended, uint64_t target, uint32_t num_workers, CountOf&& count_of) {
    return has_last_ended() && num_done(num_workers, count_of) == target;
  }
  /// Ends a task. prepare() prepares its slot for the next replay, move_on() advances its state word and wakes waiters,
  /// notify() counts down its successors.
  template <class Prepare, class MoveOn, class Notify>
  static void end_task(Count& own, Prepare&& prepare, MoveOn&& move_on, Notify&& notify) {
    prepare();
    move_on();
    notify();
    count(own);
  }
};

}  // namespace tilewise::protocols
