// The memory of a protocol: what its template needs of the machine, here as the product has it.
//
// A protocol of this folder is a template over a memory policy and over its orders: the product instantiates it with
// StdMemory, its checked test with checker::CheckedMemory (checker/memory.h), so that what runs is what is checked.
// Every memory order and every order of steps that a protocol depends on has a name in its orders; a test plants a
// wrong one by deriving from them.
//
// heavy_barrier and light_barrier are a pair. A thread that does something rare says so, then looks; those that do the
// frequent thing do it, then look. Each must see the other's first step. A fence on both sides would do; but with
// membarrier(2) the rare side issues a full fence on every thread of the process, and the frequent side only keeps the
// compiler from reordering. `fences`: across processes, and where the system lacks it, both sides use a fence.
#pragma once
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace tilewise::protocols {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// Begins to fetch a cache line that this thread will write. A plain prefetch would fetch it shared, and the store
/// would have to ask the other core a second time.
inline void prefetch_for_write(const void* address) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
#endif
}

/// True when membarrier works here; call once before threads start.
inline bool register_membarrier() {
#if defined(__SANITIZE_THREAD__)
  return false;  // the sanitizer does not see it
#else
  return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
#endif
}

struct StdMemory {
  template <class T>
  using Atomic = std::atomic<T>;
  template <class T>
  using Plain = T;
  static constexpr bool kIsChecked = false;

  static void relax() { protocols::relax(); }
  static void yield() { sched_yield(); }

  static void heavy_barrier(bool fences) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!fences) syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
  }
  static void light_barrier(bool fences) {
    if (fences) {
      std::atomic_thread_fence(std::memory_order_seq_cst);
    } else {
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
  }

  /// Sleeps while the word has the value expected, at most so long; limit_ns < 0: for ever.
  static void sleep(std::atomic<uint32_t>& word, uint32_t expected, int64_t limit_ns, bool is_shared) {
    const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
    syscall(SYS_futex, &word, is_shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, expected, limit_ns < 0 ? nullptr : &limit,
            nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word, int32_t count, bool is_shared) {
    syscall(SYS_futex, &word, is_shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
  }
};

}  // namespace tilewise::protocols
