// Counters that end a lifetime: the thread that brings the counter to zero ends it, after all other threads have left.
//
// Countdown: a task and its children, or the tasks of a run. Loan: a piece of memory whose owner lends it to tasks. The
// owner counts its own uses in `uses`, so the common case needs no atomic addition. Uses by other threads and all
// returns are counted in `state`, which also contains kOpen while the loan is open. Closing subtracts kOpen and adds
// the owner's count in one step. Callers: see the functions. Blocks: never. Memory: one or two words.
//
// Memory order: leaving releases what a thread did in the lifetime; the thread that finds zero acquires all of it.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct CountdownOrders {
  static constexpr auto kLeave = std::memory_order_acq_rel;
  static constexpr auto kSeeLast = std::memory_order_acquire;  // a load suffices if the count is one
};

template <class Memory, class Orders = CountdownOrders>
struct Countdowns {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;

  /// Adds one. The calling thread must already be counted.
  template <class T>
  static void join(Atomic<T>& left) {
    left.fetch_add(1, std::memory_order_relaxed);
  }
  /// Subtracts `count`. Returns whether the counter is now zero.
  template <class T>
  static bool leave(Atomic<T>& left, T count = 1) {
    return left.fetch_sub(count, Orders::kLeave) == count;
  }
  /// Whether exactly one has not left. If so, the caller sees what the others did.
  template <class T>
  static bool is_one_left(const Atomic<T>& left) {
    return left.load(Orders::kSeeLast) == 1;
  }
  /// leave() for counters that no thread joins: at a count of one no other thread can come, so it need not change.
  template <class T>
  static bool arrive(Atomic<T>& left) {
    return is_one_left(left) || leave(left);
  }

  static constexpr int64_t kOpen = int64_t{1} << 40;
  struct Loan {
    Atomic<int64_t> state;
    Atomic<int64_t> uses;  // counted by the owner

    void open() {
      state.store(kOpen, std::memory_order_relaxed);
      uses.store(0, std::memory_order_relaxed);
    }
    /// Counts a use by the owner, while the loan is open.
    void use() { uses.store(uses.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
    /// Counts a use by another thread, which already has one or knows that the loan is open.
    void use_of_another() { state.fetch_add(1, std::memory_order_relaxed); }
    /// Ends `count` uses. Returns true if the loan is closed and these were the last.
    bool give_back(int64_t count) { return leave(state, count); }
    /// Closes the loan; owner only. Returns true if every use has ended.
    bool close() {
      const int64_t change = uses.load(std::memory_order_relaxed) - kOpen;
      return state.fetch_add(change, Orders::kLeave) + change == 0;
    }
  };
};

}  // namespace tilewise::protocols
