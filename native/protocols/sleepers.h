// Threads that sleep until there is a reason to stay awake, and threads that publish such reasons.
//
// A sleeper announces itself, then looks for a reason to stay awake. A waker publishes the reason, then looks for
// sleepers. Each must see the other's first step, so both sides have a barrier between their steps (memory.h): a light
// one for wakers, which are many, a heavy one for sleepers, which are few. A waker changes `word`. The sleeper has read
// `word` before its last look, and the system compares it before the thread sleeps, so a wake-up between the look and
// the sleep is not lost. A waker that wakes all threads without looking for sleepers needs no barrier: `word` alone
// orders its reason.
//
// Callers: any thread. Blocks: sleep(). Memory: two words; all-zero bytes mean that no thread sleeps.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct SleepersOrders {
  static constexpr auto kChangeWord =
      std::memory_order_release;  // the reason of a waker that did not check for sleepers
};

template <class Memory, class Orders = SleepersOrders>
struct Sleepers {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;

  /// Call before sleep(). The barrier of sleep() acquires what the last waker had published.
  uint32_t look() const { return word.load(std::memory_order_relaxed); }

  /// seen: from look(). stays_awake(): the last check for a reason. limit_ns(): the longest sleep; negative: no limit.
  /// Returns false if there was a reason to stay awake.
  template <class StaysAwake, class Limit>
  bool sleep(uint32_t seen, bool fences, bool is_shared, StaysAwake&& stays_awake, Limit&& limit_ns) {
    count.fetch_add(1, std::memory_order_relaxed);
    Memory::heavy_barrier(fences);
    const bool stays = stays_awake();
    if (!stays) Memory::sleep(word, seen, limit_ns(), is_shared);
    count.fetch_sub(1, std::memory_order_relaxed);
    return !stays;
  }

  /// Call after barrier().
  bool has_any() const { return count.load(std::memory_order_relaxed) != 0; }
  static bool has_any(const Sleepers& one, const Sleepers& other) {
    return (one.count.load(std::memory_order_relaxed) | other.count.load(std::memory_order_relaxed)) != 0;
  }
  /// The waker's barrier, between publishing the reason and has_any().
  static void barrier(bool fences) { Memory::light_barrier(fences); }

  void wake(int32_t num_threads, bool is_shared) {
    word.fetch_add(1, Orders::kChangeWord);
    Memory::wake(word, num_threads, is_shared);
  }
  void wake_all(bool is_shared) { wake(INT32_MAX, is_shared); }
  void wake_all_if_any(bool fences, bool is_shared) {
    barrier(fences);
    if (has_any()) wake_all(is_shared);
  }

  Atomic<uint32_t> count;
  Atomic<uint32_t> word;
};

}  // namespace tilewise::protocols
