// Threads that sleep until there is a reason not to, and those that give one.
//
// The sleeper announces itself, then looks for a reason to stay awake; the waker publishes the reason, then looks for
// sleepers. Each must see the other's first step, so a barrier stands between the two on both sides (memory.h): a light
// one for wakers, who are many, a heavy one for sleepers, who are few. Between the sleeper's last look and its sleep
// the waker changes `word`, which the sleeper has read before the look and the system compares: then it does not sleep.
// A waker that wakes all without looking for sleepers needs no barrier: the word alone orders its reason.
//
// Who may call: any thread. Blocks: sleep. Memory: two words; all-zero bytes mean that no thread sleeps.
#pragma once
#include <cstdint>

#include "protocols/memory.h"

namespace tilewise::protocols {

struct SleepersOrders {
  static constexpr auto kChangeWord = std::memory_order_release;  // the reason of a waker that did not look
  static constexpr bool kReadsWordFirst = true;
  static constexpr bool kAnnouncesFirst = true;
  static constexpr bool kSleeperHasBarrier = true;
  static constexpr bool kWakerHasBarrier = true;
  static constexpr bool kChangesWord = true;
};

template <class Memory, class Orders = SleepersOrders>
struct Sleepers {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;

  /// To be called before sleep(), whose barrier acquires what the last waker had published.
  uint32_t look() const { return word.load(std::memory_order_relaxed); }

  /// seen: by look(). stays_awake(): the last look. limit_ns(): how long to sleep at most; negative: for ever. False:
  /// there was a reason to stay awake.
  template <class StaysAwake, class Limit>
  bool sleep(uint32_t seen, bool fences, bool is_shared, StaysAwake&& stays_awake, Limit&& limit_ns) {
    bool stays = false;
    if constexpr (!Orders::kAnnouncesFirst) stays = stays_awake();
    count.fetch_add(1, std::memory_order_relaxed);
    if constexpr (Orders::kSleeperHasBarrier) Memory::heavy_barrier(fences);
    if constexpr (Orders::kAnnouncesFirst) stays = stays_awake();
    if constexpr (!Orders::kReadsWordFirst) seen = look();
    if (!stays) Memory::sleep(word, seen, limit_ns(), is_shared);
    count.fetch_sub(1, std::memory_order_relaxed);
    return !stays;
  }

  /// After the waker's barrier.
  bool has_any() const { return count.load(std::memory_order_relaxed) != 0; }
  static bool has_any(const Sleepers& one, const Sleepers& other) {
    return (one.count.load(std::memory_order_relaxed) | other.count.load(std::memory_order_relaxed)) != 0;
  }
  /// Between what it has published and its look for sleepers.
  static void barrier(bool fences) {
    if constexpr (Orders::kWakerHasBarrier) Memory::light_barrier(fences);
  }

  void wake(int32_t num_threads, bool is_shared) {
    if constexpr (Orders::kChangesWord) word.fetch_add(1, Orders::kChangeWord);
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
