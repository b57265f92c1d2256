// The state word of a task slot, by which tasks learn that a task has completed.
//
// The word is [generation 40 | watched 1 | first waiter + 1, 23 bits]. An odd generation means that a task occupies the
// slot. Completing writes the next generation and takes the waiters in one exchange. A waiter adds itself by
// compare-and-swap against the generation that it expects. So no wake-up is lost, and a reused slot is never mistaken
// for the earlier task.
//
// Purpose: the order between tasks, and the reuse of their slots. Callers: begin() the slot's submitter; complete() the
// thread that ends the task; the rest any thread. Blocks: never. Memory: one word of the slot; the links are in the
// waiters.
//
// Memory order: completing releases what the task wrote, to threads that see the next generation and to the submitter
// that reuses the slot. Adding a waiter releases the waiter to the thread that completes the task.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct TaskWordOrders {
  static constexpr auto kSeeFree = std::memory_order_acquire;  // by the submitter, before it uses the slot again
  static constexpr auto kSeeEnded = std::memory_order_acquire;  // by a reader, and by a waiter's first load
  static constexpr auto kMiss = std::memory_order_acquire;  // by a waiter whose swap failed
  static constexpr auto kStand = std::memory_order_release;  // publishes the waiter
  static constexpr auto kComplete = std::memory_order_acq_rel;  // takes waiters, publishes the task's writes
};

template <class Memory, class Orders = TaskWordOrders>
struct TaskWords {
  using Bits = uint64_t;
  using Word = typename Memory::template Atomic<Bits>;
  static constexpr Bits kWatched = 1u << 23;
  static constexpr uint64_t generation_in(Bits bits) { return bits >> 24; }
  static constexpr bool is_live(Bits bits) { return (bits >> 24 & 1) != 0; }
  static constexpr uint32_t first_waiter(Bits bits) { return static_cast<uint32_t>(bits & (kWatched - 1)); }
  static constexpr Bits of_generation(uint64_t generation) { return generation << 24; }

  /// For a task that the caller knows to be live, or if no other access depends on the result.
  [[gnu::always_inline]] static uint64_t generation(const Word& word) {
    return generation_in(word.load(std::memory_order_relaxed));
  }

  /// The submitter's load. It may reuse the slot if no task is live in it.
  [[gnu::always_inline]] static Bits look(const Word& word) { return word.load(Orders::kSeeFree); }
  /// Begins a task in a free slot. seen: from look().
  [[gnu::always_inline]] static void begin(Word& word, Bits seen) {
    word.store(of_generation(generation_in(seen) + 1), std::memory_order_relaxed);
  }

  /// Whether the task of this generation has completed; if so, the caller may read what it wrote.
  [[gnu::always_inline]] static bool has_ended(const Word& word, uint64_t generation) {
    return generation_in(word.load(Orders::kSeeEnded)) != generation;
  }

  /// Adds a waiter to the list of a task. enlist(first) must set the waiter's link to `first`; it is called before each
  /// try. Returns false if the task has completed. If true, another thread may run the waiter at any time.
  template <class Enlist>
  [[gnu::always_inline]] static bool add_waiter(Word& word, uint64_t generation, uint32_t waiter, Enlist&& enlist) {
    Bits bits = word.load(Orders::kSeeEnded);
    while (generation_in(bits) == generation) {
      enlist(first_waiter(bits));
      const Bits with_me = (bits & ~(kWatched - 1)) | waiter;
      if (word.compare_exchange_weak(bits, with_me, Orders::kStand, Orders::kMiss)) return true;
    }
    return false;
  }

  /// Makes the thread that completes the task wake sleepers. Returns false if the task has completed.
  static bool watch(Word& word, uint64_t generation) {
    Bits bits = word.load(Orders::kSeeEnded);
    while (generation_in(bits) == generation) {
      if ((bits & kWatched) != 0) return true;
      if (word.compare_exchange_weak(bits, bits | kWatched, Orders::kStand, Orders::kMiss)) return true;
    }
    return false;
  }

  /// Completes the task and gives the slot the next generation. Afterwards the caller must not access the slot. Returns
  /// the previous word: the caller must wake its waiters, and sleeping threads if it was watched.
  [[gnu::always_inline]] static Bits complete(Word& word, uint64_t next_generation) {
    return word.exchange(of_generation(next_generation), Orders::kComplete);
  }

  /// Calls wake(waiter) for a list of waiters, in the order of arrival. next(waiter) is the waiter's link; it
  /// is read first, because a woken waiter may enter another list at once.
  template <class Next, class Wake>
  [[gnu::always_inline]] static void for_each_waiter(uint32_t waiter, Next&& next, Wake&& wake) {
    if (next(waiter) != 0) {
      uint32_t reversed = 0;
      while (waiter != 0) {
        const uint32_t behind = next(waiter);
        next(waiter) = reversed;
        reversed = waiter;
        waiter = behind;
      }
      waiter = reversed;
    }
    while (waiter != 0) {
      const uint32_t woken = waiter;
      waiter = next(waiter);
      wake(woken);
    }
  }
};

}  // namespace tilewise::protocols
