// Ready tasks of one thread: the owner pushes, and any thread takes, several at once.
//
// Purpose: a first-in-first-out ring of numbers below 2^kBits; kNothing is not one of them. Callers: push() and
// is_full(): only the owner; the rest: any thread. Blocks: never. Memory: anywhere; all-zero bytes are an empty ring.
//
// Memory order: the owner publishes cells by the release of `tail`. A taker acquires `tail`, reads the cells, then
// takes them by compare-and-swap of `head`. The owner overwrites a cell only after it has seen `head` pass it, and then
// the swap of a taker that still reads the old cell fails. The word of `tail` also contains the newest number, so that
// a single number reaches another core with one cache line instead of two. Counts therefore have 44 bits; they wrap
// after days, and only a taker that sleeps that long between two loads would be wrong.
#pragma once
#include <algorithm>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct RingOrders {
  static constexpr auto kPublish = std::memory_order_release;  // tail: the cells and the tasks that they name
  static constexpr auto kSeeTail = std::memory_order_acquire;  // the taker's side of kPublish
  static constexpr auto kTake = std::memory_order_release;  // head: the cells have been read, and the tail seen
  static constexpr auto kSeeTaken = std::memory_order_acquire;  // by the owner, before it overwrites cells
  static constexpr auto kSeeHead =
      std::memory_order_acquire;  // by a taker, so that it reads no tail older than this head
  static constexpr auto kMiss = std::memory_order_acquire;  // the same, after another taker was faster
};

template <class Memory, uint32_t kCells, uint32_t kBits, uint32_t kNothing, class Orders = RingOrders>
struct ReadyRing {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;
  /// [count of numbers ever pushed | the newest number].
  using TailWord = uint64_t;
  static constexpr uint64_t kCountMask = ~uint64_t{0} >> kBits;
  static constexpr TailWord make_tail(uint64_t count, uint32_t newest) { return count << kBits | newest; }
  static constexpr uint64_t count_in(TailWord tail) { return tail >> kBits; }
  static constexpr uint32_t newest_in(TailWord tail) { return tail & ((1u << kBits) - 1); }
  static constexpr uint64_t distance(uint64_t from, uint64_t to) { return (to - from) & kCountMask; }

  /// Owner only. Returns false if the ring is full.
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

  /// The approximate number of entries.
  uint64_t size() const {
    const uint64_t first = head.load(std::memory_order_relaxed);
    return distance(first, count_in(tail.load(std::memory_order_relaxed)));
  }

  /// Takes half of the numbers, rounded up, at most `limit`, oldest first. Returns how many it took.
  uint32_t take_half(uint32_t* numbers, uint32_t limit) {
    uint64_t first = head.load(Orders::kSeeHead);
    while (true) {
      const TailWord end = tail.load(Orders::kSeeTail);
      const uint64_t available = distance(first, count_in(end));
      if (available == 0) return 0;
      const auto count = static_cast<uint32_t>(std::min<uint64_t>((available + 1) / 2, limit));
      for (uint32_t i = 0; i < count; ++i) numbers[i] = peek(first + i, end);
      const uint64_t taken = (first + count) & kCountMask;
      if (head.compare_exchange_weak(first, taken, Orders::kTake, Orders::kMiss)) {
        if constexpr (Memory::kIsChecked) pin(first, count, end);
        return count;
      }
    }
  }

  /// Takes the oldest number; kNothing if the ring is empty.
  uint32_t take_one() {
    uint32_t number = kNothing;
    return take_half(&number, 1) == 1 ? number : kNothing;
  }

  alignas(64) Atomic<uint64_t> head;
  alignas(64) Atomic<TailWord> tail;
  typename Memory::template Plain<uint64_t> seen_head;  // the owner's copy; refreshed when the ring seems full
  alignas(64) Atomic<uint32_t> cells[kCells];

 protected:
  /// The number at `at`, which is before `end`.
  uint32_t peek(uint64_t at, TailWord end) const {
    if (distance(at, count_in(end)) == 1) return newest_in(end);
    return cells[at % kCells].load(std::memory_order_relaxed);
  }
  /// For the checker: the cells that were read and are now taken must not have been overwritten, on any machine.
  void pin(uint64_t first, uint32_t count, TailWord end) const {
    for (uint32_t i = 0; i < count; ++i) {
      if (distance(first + i, count_in(end)) != 1) cells[(first + i) % kCells].pin();
    }
  }
};

}  // namespace tilewise::protocols
