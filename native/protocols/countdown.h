// Counters that end a lifetime: the thread that brings one to zero ends it, alone and behind all others.
//
// Countdown: a task and its children, the tasks of a run. Loan: a piece of memory with an owner, which lends it to
// others and keeps its own account of how often, so that the common case costs no atomic addition: while the loan is
// open, kOpen stands in `state`, and the uses of all others and all returns count there; closing takes kOpen away and
// adds the owner's account, in one step. Who may call: as the functions say. Blocks: never. Memory: one or two words.
//
// Memory order: leaving releases what was done in the lifetime, to the thread that finds zero and acquires it all.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct CountdownOrders {
  static constexpr auto kLeave = std::memory_order_acq_rel;
  static constexpr auto kSeeLast = std::memory_order_acquire;  // when one is left, to look is enough
  static constexpr bool kLeavesInOneStep = true;
  static constexpr bool kClosesInOneStep = true;
};

template <class Memory, class Orders = CountdownOrders>
struct Countdowns {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;

  /// One more, counted by a thread that is part of the lifetime itself.
  template <class T>
  static void join(Atomic<T>& left) {
    left.fetch_add(1, std::memory_order_relaxed);
  }
  /// `count` fewer. True: they were the last.
  template <class T>
  static bool leave(Atomic<T>& left, T count = 1) {
    if constexpr (!Orders::kLeavesInOneStep) {
      const T before = left.load(std::memory_order_acquire);
      left.store(before - count, std::memory_order_release);
      return before == count;
    }
    return left.fetch_sub(count, Orders::kLeave) == count;
  }
  /// One more must leave; what the others did is seen.
  template <class T>
  static bool is_one_left(const Atomic<T>& left) {
    return left.load(Orders::kSeeLast) == 1;
  }
  /// leave() where none joins: when one is left no other can come, and the count may stay as it is.
  template <class T>
  static bool arrive(Atomic<T>& left) {
    return is_one_left(left) || leave(left);
  }

  static constexpr int64_t kOpen = int64_t{1} << 40;
  struct Loan {
    Atomic<int64_t> state;
    Atomic<int64_t> uses;  // by its owner

    void open() {
      state.store(kOpen, std::memory_order_relaxed);
      uses.store(0, std::memory_order_relaxed);
    }
    /// By the owner, while it is open.
    void use() { uses.store(uses.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
    /// By another thread, which has a use of it already, or knows that it is open.
    void use_of_another() { state.fetch_add(1, std::memory_order_relaxed); }
    /// `count` uses have ended. True: it is closed and they were the last.
    bool give_back(int64_t count) { return leave(state, count); }
    /// By the owner. True: every use has ended.
    bool close() {
      if constexpr (!Orders::kClosesInOneStep) {
        if (state.fetch_sub(kOpen, Orders::kLeave) == kOpen) return true;
        const int64_t own = uses.load(std::memory_order_relaxed);
        return state.fetch_add(own, Orders::kLeave) + own == 0;
      }
      const int64_t change = uses.load(std::memory_order_relaxed) - kOpen;
      return state.fetch_add(change, Orders::kLeave) + change == 0;
    }
  };
};

}  // namespace tilewise::protocols
