// A task that its kernel's return does not end: another thread does, before the kernel returns or after.
//
// Purpose: whichever of the two comes second completes the task, with the other thread's word on how it ended, which is
// said once. Who may call: return_later the thread that ran the kernel, once; end any thread, and all but one are
// refused. Blocks: never. Memory: one word of the task, whose State has these five values among others.
//
//   kRunning -> kExternal -> kEnding                     the kernel returns first
//   kRunning -> kEnding -> kEnded                        the end is told first: the kernel's thread completes
//   kRunning -> kEnding -> kLeft                         the kernel returns while it is told
//
// Memory order: each side releases what it did to the side that comes second.
#pragma once
#include "protocols/memory.h"

namespace tilewise::protocols {

enum class Told { kRefused, kKernelCompletes, kComplete };

struct EndingOrders {
  static constexpr auto kLeave = std::memory_order_release;  // the kernel has returned
  static constexpr auto kClaim = std::memory_order_acquire;  // the kernel's work, when it has returned
  static constexpr auto kTell = std::memory_order_release;  // how it ended
  static constexpr auto kSeeTold = std::memory_order_acquire;  // a swap that failed because the other came first
  static constexpr bool kClaimsFirst = true;
};

template <class Memory, class State, class Orders = EndingOrders>
struct Endings {
  using Word = typename Memory::template Atomic<State>;

  /// The kernel has returned and leaves the end to another thread. True: that thread will complete the task, and
  /// nothing of it may be touched. False: the end has been told, and this thread completes it.
  static bool return_later(Word& word) {
    State seen = State::kRunning;
    if (word.compare_exchange_strong(seen, State::kExternal, Orders::kLeave, Orders::kSeeTold)) return true;
    return seen == State::kEnding && word.compare_exchange_strong(seen, State::kLeft, Orders::kLeave, Orders::kSeeTold);
  }

  /// tell(): writes how the task ended. Refused: its kernel does not run and has not left the end to another thread, or
  /// another thread has told it; then tell() is not called. *found: what the word was then.
  template <class Tell>
  static Told end(Word& word, State* found, Tell&& tell) {
    if constexpr (!Orders::kClaimsFirst) tell();
    State seen = State::kRunning;
    bool has_returned = false;
    if (!word.compare_exchange_strong(seen, State::kEnding, Orders::kClaim, std::memory_order_relaxed)) {
      if (seen == State::kExternal) {
        has_returned = word.compare_exchange_strong(seen, State::kEnding, Orders::kClaim, std::memory_order_relaxed);
      }
      if (!has_returned) {
        *found = seen;
        return Told::kRefused;
      }
    }
    if constexpr (Orders::kClaimsFirst) tell();
    if (has_returned) return Told::kComplete;
    seen = State::kEnding;
    return word.compare_exchange_strong(seen, State::kEnded, Orders::kTell, Orders::kSeeTold) ? Told::kKernelCompletes
                                                                                              : Told::kComplete;
  }
};

}  // namespace tilewise::protocols
