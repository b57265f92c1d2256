// Signals: 64-bit counters between devices, and tasks that wait for them without occupying a worker.
//
// A signal only counts up. post() releases: everything that the poster wrote before is visible to the waiter, whose
// wait() or on_posted acquires the value.
//
// No wake-up can be lost; protocols/counter.h explains why. on_posted runs without the lock, once per waiter, in the
// posting thread; the waiter's memory may be reused by then. No other lock is taken inside a signal's lock.
#pragma once
#include <atomic>
#include <cstdint>

#include "memory/arena.h"
#include "protocols/counter.h"

namespace tilewise::comm {

/// One wait of one task. It is in the task's slot, and in the signal's list while unmet.
struct Waiter {
  uint64_t threshold = 0;
  Waiter* next = nullptr;
  void (*on_posted)(Waiter*, uint64_t poison) = nullptr;
};

/// One signal: 128 bytes, so that it shares no cache line pair (adjacent-line prefetch) with its neighbours. Who may
/// call: any thread. Blocks: only for a lock's few instructions, and only if a task waits. Memory: symmetric (same
/// index on every device).
class alignas(128) Signal {
 public:
  /// Returns true if the value has reached waiter->threshold, with the posters' poison in *poison. Otherwise registers
  /// the waiter, whose on_posted will be called exactly once.
  bool wait(Waiter* waiter, uint64_t* poison);

  /// Adds one. A poison (an error's id, 0 for none) is written before the value; the first one remains.
  void post(uint64_t poison);

  uint64_t value() const { return counter_.load(); }
  uint64_t poison() const { return poison_.load(std::memory_order_acquire); }

  /// Only between runs, when no task waits.
  void clear_poison() { poison_.store(0, std::memory_order_relaxed); }

 private:
  protocols::Counter<protocols::StdMemory, Waiter*> counter_{};
  std::atomic<uint64_t> poison_{0};  // written before the value
};
static_assert(sizeof(Signal) == 128);

/// The signals of one device. The n-th has the same index on every device of the device group.
class SignalBoard {
 public:
  explicit SignalBoard(int64_t num_signals);
  Signal& operator[](int64_t index) { return signals_[index]; }
  const Signal& operator[](int64_t index) const { return signals_[index]; }
  int64_t size() const { return size_; }
  /// After a failed run, so that its errors do not reach the next.
  void clear_poison();
  int64_t bytes() const { return arena_.bytes(); }

 private:
  memory::Arena arena_;
  Signal* signals_;
  int64_t size_;
};

}  // namespace tilewise::comm
