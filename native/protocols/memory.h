// The product's memory policy for the protocols: atomics, barriers and futexes.
//
// A protocol of this folder is a template over a memory policy and over its memory orders. The product instantiates it
// with StdMemory, its checked test with checker::CheckedMemory (checker/memory.h), so the checked code is the product's
// code. Tests plant mistakes from outside: weaker orders, a policy without a barrier, or a subclass whose step is
// wrong.
//
// heavy_barrier and light_barrier are a pair. A thread that does something rare announces it, then reads; threads that
// do the frequent thing do it, then read. Each must see the other's first step. A fence on both sides would suffice.
// With membarrier(2), the rare side makes every thread of the process issue a full fence, and the frequent side only
// keeps the compiler from reordering. With `fences`, both sides use a fence: across processes, and on systems without
// membarrier.
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

/// Prefetches a cache line that this thread will write. A plain prefetch would fetch it in the shared state, and the
/// store would need a second transaction with the other core.
inline void prefetch_for_write(const void* address) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
#endif
}

/// Whether membarrier works on this system; call once before threads start.
inline bool register_membarrier() {
#if defined(__SANITIZE_THREAD__)
  return false;  // ThreadSanitizer does not see it
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

  /// Sleeps while the word has the expected value, at most limit_ns; negative: no limit.
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
