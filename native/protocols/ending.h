// The end of a task that another thread reports, before the kernel returns or after.
//
// Purpose: a task completes when its kernel has returned and another thread has reported how the task ended. The later
// of the two threads completes the task, with the status of the one report that was accepted. Callers: return_later()
// the thread that ran the kernel, once; end() any thread, and all calls but one are rejected. Blocks: never. Memory:
// one word of the task, whose State has these five values among others.
//
//   kRunning -> kExternal -> kEnding                     the kernel returns first
//   kRunning -> kEnding -> kEnded                        the report comes first: the kernel's thread completes
//   kRunning -> kEnding -> kLeft                         the kernel returns while the report is written
//
// Memory order: each side releases what it did to the side that comes second.
#pragma once
#include "protocols/memory.h"

namespace tilewise::protocols {

/// The result of end().
enum class EndResult { kRejected, kKernelCompletes, kCallerCompletes };

struct EndingOrders {
  static constexpr auto kLeave = std::memory_order_release;      // the kernel has returned
  static constexpr auto kClaim = std::memory_order_acquire;      // the kernel's work, when it has returned
  static constexpr auto kReport = std::memory_order_release;     // how the task ended
  static constexpr auto kSeeReport = std::memory_order_acquire;  // a swap that failed because the other side was first
};

template <class Memory, class State, class Orders = EndingOrders>
struct Endings {
  using Word = typename Memory::template Atomic<State>;

  /// Called when the kernel has returned and another thread will report the end. Returns true if that thread completes
  /// the task; the caller must then not access it. Returns false if the end has been reported and the caller completes
  /// the task.
  static bool return_later(Word& word) {
    State seen = State::kRunning;
    if (word.compare_exchange_strong(seen, State::kExternal, Orders::kLeave, Orders::kSeeReport)) return true;
    return seen == State::kEnding &&
           word.compare_exchange_strong(seen, State::kLeft, Orders::kLeave, Orders::kSeeReport);
  }

  /// Reports the end; record() must write how the task ended. kRejected, without a call of record(): the kernel neither
  /// runs nor has returned with the end open, or another thread has reported it. Then *state is the task's state.
  template <class Record>
  static EndResult end(Word& word, State* state, Record&& record) {
    State seen = State::kRunning;
    bool has_returned = false;
    if (!word.compare_exchange_strong(seen, State::kEnding, Orders::kClaim, std::memory_order_relaxed)) {
      if (seen == State::kExternal) {
        has_returned = word.compare_exchange_strong(seen, State::kEnding, Orders::kClaim, std::memory_order_relaxed);
      }
      if (!has_returned) {
        *state = seen;
        return EndResult::kRejected;
      }
    }
    record();
    if (has_returned) return EndResult::kCallerCompletes;
    seen = State::kEnding;
    return word.compare_exchange_strong(seen, State::kEnded, Orders::kReport, Orders::kSeeReport)
               ? EndResult::kKernelCompletes
               : EndResult::kCallerCompletes;
  }
};

}  // namespace tilewise::protocols
