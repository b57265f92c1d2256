// The word by which a task tells those behind it that it has completed.
//
// [generation 40 | watched 1 | first waiter + 1, 23 bits]. Odd generation: a task lives in the slot. Completing posts
// the generation and takes the waiters in one exchange; a waiter adds itself by compare-and-swap against the generation
// that it knows. So a wake-up cannot be lost, and a slot that was used again cannot be mistaken.
//
// Purpose: order between tasks, and the reuse of their slots. Who may call: begin the slot's submitter; complete the
// thread that ends the task; the rest any thread. Blocks: never. Memory: one word of the slot; the links lie in the
// waiters.
//
// Memory order: completing releases what the task wrote to those that find its generation posted, and to the submitter
// that uses the slot again; standing behind a task releases the waiter to the thread that completes the task.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct TaskWordOrders {
  static constexpr auto kSeeFree = std::memory_order_acquire;  // by the submitter, before it uses the slot again
  static constexpr auto kSeeEnded = std::memory_order_acquire;  // by a reader, and by a waiter's first look
  static constexpr auto kMiss = std::memory_order_acquire;  // by a waiter whose swap failed
  static constexpr auto kStand = std::memory_order_release;  // the waiter is handed over
  static constexpr auto kComplete = std::memory_order_acq_rel;  // takes waiters, gives the task's writes
  static constexpr bool kComparesGeneration = true;
  static constexpr bool kComparesWord = true;
  static constexpr bool kMarksWithExchange = true;
  static constexpr bool kReadsNextFirst = true;
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

  /// Of a task that the caller knows to live, or for a look that orders nothing.
  [[gnu::always_inline]] static uint64_t generation(const Word& word) {
    return generation_in(word.load(std::memory_order_relaxed));
  }

  /// What the submitter sees of a slot that it may use again when no task lives in it.
  [[gnu::always_inline]] static Bits look(const Word& word) { return word.load(Orders::kSeeFree); }
  /// A new task in a free slot. seen: by look().
  [[gnu::always_inline]] static void begin(Word& word, Bits seen) {
    word.store(of_generation(generation_in(seen) + 1), std::memory_order_relaxed);
  }

  /// The task of this generation has completed; the caller may read what it wrote.
  [[gnu::always_inline]] static bool has_ended(const Word& word, uint64_t generation) {
    return generation_in(word.load(Orders::kSeeEnded)) != generation;
  }

  /// Puts a waiter on the list of those that wait for a task. enlist(first): `first` stands behind it; called before
  /// each try. False: the task has completed. After true the waiter may be any thread's.
  template <class Enlist>
  [[gnu::always_inline]] static bool stand_behind(Word& word, uint64_t generation, uint32_t waiter, Enlist&& enlist) {
    Bits bits = word.load(Orders::kSeeEnded);
    while (Orders::kComparesGeneration ? generation_in(bits) == generation : is_live(bits)) {
      enlist(first_waiter(bits));
      const Bits with_me = (bits & ~(kWatched - 1)) | waiter;
      if constexpr (!Orders::kComparesWord) {
        word.store(with_me, Orders::kStand);
        return true;
      }
      if (word.compare_exchange_weak(bits, with_me, Orders::kStand, Orders::kMiss)) return true;
    }
    return false;
  }

  /// Asks the thread that completes the task to wake sleepers. False when it has completed.
  static bool watch(Word& word, uint64_t generation) {
    Bits bits = word.load(Orders::kSeeEnded);
    while (generation_in(bits) == generation) {
      if ((bits & kWatched) != 0) return true;
      if (word.compare_exchange_weak(bits, bits | kWatched, Orders::kStand, Orders::kMiss)) return true;
    }
    return false;
  }

  /// The task ends; the slot has the next generation. Nothing of it may be touched afterwards. Returns the word as it
  /// was: the caller wakes its waiters, and sleepers if it was watched.
  [[gnu::always_inline]] static Bits complete(Word& word, uint64_t next_generation) {
    if constexpr (!Orders::kMarksWithExchange) {
      const Bits bits = word.exchange(of_generation(next_generation - 1), Orders::kComplete);
      word.store(of_generation(next_generation), Orders::kComplete == std::memory_order_relaxed
                                                     ? std::memory_order_relaxed
                                                     : std::memory_order_release);
      return bits;
    }
    return word.exchange(of_generation(next_generation), Orders::kComplete);
  }

  /// Calls wake(waiter) for a list of waiters in the order in which they came. next(waiter) is its link. A woken waiter
  /// may be in another list at once.
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
      if constexpr (Orders::kReadsNextFirst) waiter = next(waiter);
      wake(woken);
      if constexpr (!Orders::kReadsNextFirst) waiter = next(woken);
    }
  }
};

}  // namespace tilewise::protocols
