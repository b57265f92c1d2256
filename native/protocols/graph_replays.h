// Replays of a recording: the same tasks again and again, one replay at a time.
//
// A task that ends prepares its place for the next replay, moves its word on, counts down its successors, and only then
// counts itself as done, in a counter of its worker's own. A replay is over when these counters' sum says so; then
// nothing of the replay is touched any more. Who may call: begin the thread that replays (one at a time), after
// is_over; the rest the worker that ends the task. Blocks: never. Memory: wherever it lies.
//
// Memory order: counting releases all that was done to the task, the sum acquires it; a beginning reaches the tasks
// through their arrivals (countdown.h).
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct GraphReplayOrders {
  static constexpr auto kCount = std::memory_order_release;
  static constexpr auto kSeeCounts = std::memory_order_acquire;
  static constexpr bool kPreparesFirst = true;
  static constexpr bool kCountsLast = true;
  static constexpr bool kSumsCounts = true;
};

template <class Memory, class Orders = GraphReplayOrders>
struct GraphReplays {
  using Count = typename Memory::template Atomic<uint64_t>;

  /// By its worker alone.
  static void count(Count& own) { own.store(own.load(std::memory_order_relaxed) + 1, Orders::kCount); }
  /// count_of(worker) for all of them.
  template <class CountOf>
  static uint64_t num_done(uint32_t num_workers, CountOf&& count_of) {
    uint64_t total = 0;
    for (uint32_t w = 0; w < num_workers; ++w) total += count_of(w).load(Orders::kSeeCounts);
    return total;
  }
  /// has_last_ended(): a cheap look at one task of the replay. False from it is the truth, true is not enough.
  template <class HasLastEnded, class CountOf>
  static bool is_over(HasLastEnded&& has_last_ended, uint64_t target, uint32_t num_workers, CountOf&& count_of) {
    if (!has_last_ended()) return false;
    if constexpr (!Orders::kSumsCounts) return true;
    return num_done(num_workers, count_of) == target;
  }
  /// A task ends. prepare(): its place for the next replay. move_on(): its word, and its waiters. tell(): its
  /// successors.
  template <class Prepare, class MoveOn, class Tell>
  static void end_task(Count& own, Prepare&& prepare, MoveOn&& move_on, Tell&& tell) {
    if constexpr (Orders::kPreparesFirst) prepare();
    if constexpr (!Orders::kCountsLast) count(own);
    move_on();
    tell();
    if constexpr (Orders::kCountsLast) count(own);
    if constexpr (!Orders::kPreparesFirst) prepare();
  }
};

}  // namespace tilewise::protocols
