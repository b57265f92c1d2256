// The memory policy of a checked protocol; protocols/memory.h has the product's policy.
#pragma once
#include "checker/checker.h"

namespace tilewise::checker {

struct CheckedMemory {
  template <class T>
  using Atomic = checker::Atomic<T>;
  template <class T>
  using Plain = checker::Plain<T>;
  static constexpr bool kIsChecked = true;

  static void relax() { checker::relax(); }
  static void yield() { checker::relax(); }
  static void heavy_barrier(bool fences) { fences ? fence(std::memory_order_seq_cst) : heavy_fence(); }
  static void light_barrier(bool fences) { fences ? fence(std::memory_order_seq_cst) : light_fence(); }
  /// Without time: a thread that is not woken sleeps for ever.
  static void sleep(Atomic<uint32_t>& word, uint32_t expected, int64_t /*limit_ns*/, bool /*is_shared*/) {
    word.sleep(expected);
  }
  static void wake(Atomic<uint32_t>& word, int32_t count, bool /*is_shared*/) { word.wake_sleepers(count); }
};

}  // namespace tilewise::checker
