// The submission lock, which costs almost nothing while only one thread submits.
//
// Purpose: it protects the buffers' dependency states. Most programs submit from one thread, the first submitter, which
// owns the lock in the sense of protocols/biased_lock.h. Who may call: any thread. Blocks: for the lock. Memory: the
// store.
#pragma once
#include "tasks/sched/sleep.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/layout.h"

namespace tilewise::tasks {

class SubmitGuard {
 public:
  /// thread: the calling thread's slot. has_boxes: also locks the index of boxes. Children of a task need only that,
  /// because one thread submits them and they share no buffer state with other tasks.
  [[gnu::always_inline]] SubmitGuard(Header& header, uint32_t thread, bool fences, bool is_child = false,
                                     bool has_boxes = false)
      : header_(header),
        is_first_submitter_(thread == header.num_workers),
        fences_(fences),
        needs_submit_(!is_child),
        needs_boxes_(has_boxes) {
    lock();
  }
  [[gnu::always_inline]] ~SubmitGuard() { unlock(); }
  SubmitGuard(const SubmitGuard&) = delete;
  SubmitGuard& operator=(const SubmitGuard&) = delete;

  [[gnu::always_inline]] void lock() {
    if (needs_submit_) lock_submissions();
    if (needs_boxes_) header_.boxes_lock.lock();
  }
  [[gnu::always_inline]] void lock_boxes() {
    needs_boxes_ = true;
    header_.boxes_lock.lock();
  }
  [[gnu::always_inline]] void unlock() {
    if (needs_boxes_) header_.boxes_lock.unlock();
    if (!needs_submit_) return;
    if (is_light_) {
      header_.submit_lock.leave_lightly();
    } else {
      header_.submit_lock.leave();
    }
  }

 private:
  [[gnu::always_inline]] void lock_submissions() {
    is_light_ = is_first_submitter_ && header_.submit_lock.enter_lightly(fences_);
    if (!is_light_) lock_heavily(header_, fences_);
  }
  // Static, so that the guard itself can stay in registers.
  [[gnu::noinline]] static void lock_heavily(Header& header, bool fences) {
    header.submit_lock.enter(fences, [](auto&& done) { wait_for(done); });
  }
  /// A replay keeps the lock while it waits for slots, possibly for a task that needs the host's lock (the GIL).
  template <class Done>
  static void wait_for(Done&& done) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (done()) return;
      protocols::relax();
    }
    Blocking let_others_run;
    while (!done()) sched_yield();
  }
  static constexpr int kSpins = 256;
  Header& header_;
  bool is_first_submitter_;
  bool fences_;
  bool needs_submit_;
  bool needs_boxes_;
  bool is_light_ = false;
};

}  // namespace tilewise::tasks
