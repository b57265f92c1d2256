// Ready tasks of one thread: it pushes, every thread takes, several at once.
//
// Purpose: a ring of numbers below 2^kBits, first in, first out; kNothing is none of them. Who may call: push and
// is_full by its owner alone, the rest by any thread. Blocks: never. Memory: wherever it lies; all-zero bytes are an
// empty ring.
//
// Memory order: the owner publishes cells with the release of `tail`; a taker acquires `tail`, reads the cells, then
// takes them by compare-and-swap of `head`. The owner overwrites a cell only after it has seen `head` pass it, and then
// the swap of a taker that still reads the old cell fails. The newest number stands in the tail's word too, so that a
// single one crosses to another core with one cache line, not two; so counts are of 44 bits and wrap, after days: a
// taker is deceived only if it sleeps that long between two looks.
#pragma once
#include <algorithm>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct RingOrders {
  static constexpr auto kPublish = std::memory_order_release;  // tail: the cells and what they name
  static constexpr auto kSeeTail = std::memory_order_acquire;  // the other side of it
  static constexpr auto kTake = std::memory_order_release;  // head: the cells have been read, and the tail seen
  static constexpr auto kSeeTaken = std::memory_order_acquire;  // by the owner, before it overwrites cells
  static constexpr auto kSeeHead = std::memory_order_acquire;  // by a taker: no tail before the head that it knows
  static constexpr auto kMiss = std::memory_order_acquire;  // the same, after another was faster
  static constexpr bool kReadsBeforeTaking = true;
  static constexpr bool kNewestOfSameLook = true;
};

template <class Memory, uint32_t kCells, uint32_t kBits, uint32_t kNothing, class Orders = RingOrders>
struct ReadyRing {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;
  /// [numbers ever pushed | the newest].
  using TailWord = uint64_t;
  static constexpr uint64_t kCountMask = ~uint64_t{0} >> kBits;
  static constexpr TailWord make_tail(uint64_t count, uint32_t newest) { return count << kBits | newest; }
  static constexpr uint64_t count_in(TailWord tail) { return tail >> kBits; }
  static constexpr uint32_t newest_in(TailWord tail) { return tail & ((1u << kBits) - 1); }
  static constexpr uint64_t distance(uint64_t from, uint64_t to) { return (to - from) & kCountMask; }

  /// Owner only. False when full.
  bool push(uint32_t number) {
    const uint64_t count = count_in(tail.load(std::memory_order_relaxed));
    if (distance(seen_head, count) >= kCells) {
      seen_head = head.load(Orders::kSeeTaken);
      if (distance(seen_head, count) >= kCells) return false;
    }
    cells[count % kCells].store(number, std::memory_order_relaxed);
    tail.store(make_tail(count + 1, number), Orders::kPublish);
    return true;
  }

  /// Owner only.
  bool is_full() const {
    const uint64_t count = count_in(tail.load(std::memory_order_relaxed));
    return distance(head.load(std::memory_order_relaxed), count) >= kCells;
  }

  bool has_any() const {
    return head.load(std::memory_order_relaxed) != count_in(tail.load(std::memory_order_relaxed));
  }

  /// How many there are, about.
  uint64_t num_held() const {
    const uint64_t first = head.load(std::memory_order_relaxed);
    return distance(first, count_in(tail.load(std::memory_order_relaxed)));
  }

  /// Takes half of what is there, rounded up, at most `limit`, oldest first. Returns how many.
  uint32_t take_half(uint32_t* numbers, uint32_t limit) {
    uint64_t first = head.load(Orders::kSeeHead);
    while (true) {
      const TailWord end = tail.load(Orders::kSeeTail);
      const uint64_t available = distance(first, count_in(end));
      if (available == 0) return 0;
      const auto count = static_cast<uint32_t>(std::min<uint64_t>((available + 1) / 2, limit));
      if constexpr (Orders::kReadsBeforeTaking) read(first, count, end, numbers);
      const uint64_t taken = (first + count) & kCountMask;
      if (head.compare_exchange_weak(first, taken, Orders::kTake, Orders::kMiss)) {
        if constexpr (!Orders::kReadsBeforeTaking) read(first, count, end, numbers);
        if constexpr (Memory::kIsChecked) pin(first, count, end);
        return count;
      }
    }
  }

  /// Takes the oldest; kNothing when there is none.
  uint32_t take_one() {
    uint32_t number = kNothing;
    return take_half(&number, 1) == 1 ? number : kNothing;
  }

  alignas(64) Atomic<uint64_t> head;
  alignas(64) Atomic<TailWord> tail;
  typename Memory::template Plain<uint64_t> seen_head;  // by the owner: looked up again only when the ring seems full
  alignas(64) Atomic<uint32_t> cells[kCells];

 private:
  void read(uint64_t first, uint32_t count, TailWord end, uint32_t* numbers) const {
    for (uint32_t i = 0; i < count; ++i) numbers[i] = peek(first + i, end);
  }
  /// What stands at `at`, before the end.
  uint32_t peek(uint64_t at, TailWord end) const {
    if (distance(at, count_in(end)) == 1) {
      if constexpr (!Orders::kNewestOfSameLook) end = tail.load(Orders::kSeeTail);
      return newest_in(end);
    }
    return cells[at % kCells].load(std::memory_order_relaxed);
  }
  /// The cells that were read and are now taken must not have been overwritten, on any machine.
  void pin(uint64_t first, uint32_t count, TailWord end) const {
    for (uint32_t i = 0; i < count; ++i) {
      if (distance(first + i, count_in(end)) != 1) cells[(first + i) % kCells].pin();
    }
  }
};

}  // namespace tilewise::protocols
