// Waiting: for tasks, for room, and the proof that waiting is in vain. See engine.h.
#include <poll.h>

#include <algorithm>

#include "tasks/engine.h"
#include "tasks/hot.h"
#include "tasks/sched/float_modes.h"
#include "tasks/sched/queues.h"
#include "tasks/sched/sleep.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/pool.h"
#include "tasks/waiting.h"

namespace tilewise::tasks {

namespace {

/// PTO_TIMEOUT is what a wait itself says when it is over too early: a task that has ended with it has failed.
int waited(int status) { return status == PTO_TIMEOUT ? PTO_TASK_FAILED : status; }

}  // namespace

void Engine::check_open() const {
  check_process();
  if (peer_lost_.load(std::memory_order_relaxed)) {
    raise(PTO_PEER_LOST, "[runtime] the workers' process must live; got its death (process ",
          region_.header->workers_pid.load(), "); close this runtime and start again");
  }
}

// Asked at most every 50 ms, or when a kernel has been interrupted, and only of a host that wants to be asked.
void Engine::check_interrupted(int64_t* last_ns) const {
  if (hooks.interrupted == nullptr || (!asks_at_once && now_ns() - *last_ns < kSliceNs)) return;
  asks_at_once = false;
  *last_ns = now_ns();
  if (hooks.interrupted() != 0) {
    raise(PTO_INTERRUPTED,
          "[runtime.wait] the wait was interrupted by its host; tasks go on; cancel them, or wait again");
  }
}

void Engine::check_peer() {
  if (peer_fd_ < 0) return;
  pollfd poll_peer{peer_fd_, POLLIN, 0};
  if (poll(&poll_peer, 1, 0) > 0) peer_lost_.store(true, std::memory_order_relaxed);
}

bool Engine::is_complete(pto_task task) const {
  const uint32_t slot = slot_of(task);
  if (task == 0 || slot >= region_.header->num_slots) {
    raise(PTO_BAD_ARGUMENT, "[runtime.wait] a task must be one that this runtime returned; got ", task,
          "; check that submit succeeded");
  }
  const WakeWord word = region_.slots[slot].wake.load(std::memory_order_acquire);
  return generation_in(word) != generation_of(task);
}

/// Asks whoever completes the task to wake sleepers. False when it has completed.
bool Engine::watch(TaskRef task) {
  Slot& slot = region_.slots[slot_of(task)];
  WakeWord word = slot.wake.load(std::memory_order_acquire);
  while (generation_in(word) == generation_of(task)) {
    if ((word & kWatched) != 0) return true;
    if (slot.wake.compare_exchange_weak(word, word | kWatched, std::memory_order_acq_rel, std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
}

void Engine::watch_lane(uint32_t seat_index) {
  const uint32_t base = seat_index * region_.header->window;
  for (uint32_t s = base; s < base + region_.header->window; ++s) {
    const WakeWord word = region_.slots[s].wake.load(std::memory_order_acquire);
    if (is_live(word)) watch(make_ref(generation_in(word), s));
  }
}

/// Runs something while waiting, under the caller's DefaultFloatModes: outside tasks any leaf; inside a task leaves,
/// and its own lane's tasks.
bool Engine::help(uint32_t seat_index) {
  if (is_worker_side_ || region_.header->is_shared != 0) return false;
  if (running.engine == this) return help_own_lane(seat_index);
  const uint32_t slot = take(seat_index, region_.header->num_workers == 0);
  if (slot == kNone) return false;
  Seat& me = seat(seat_index);
  const uint32_t count = run(slot, seat_index, region_.header->num_workers == 0);
  me.num_helped.store(me.num_helped.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  return true;
}

/// On a submitter's thread (there are no workers, or it helped into the task that waits) this is help too.
void Engine::run_own(uint32_t slot, uint32_t seat_index) {
  const uint32_t count = run(slot, seat_index, true);
  if (seat_index < region_.header->num_workers) return;
  std::atomic<uint64_t>& helped = seat(seat_index).num_helped;
  helped.store(helped.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
}

// A task that waits must be able to run its own children itself, or workers that all wait would wait for ever.
bool Engine::help_own_lane(uint32_t seat_index) {
  Header& header = *region_.header;
  const uint32_t classes = seat(seat_index).classes;
  // Leaves, and children of the task that waits: others' parents would pile up on this thread's stack.
  const auto is_welcome = [&](uint32_t slot) {
    const Slot& task = region_.slots[slot];
    return (task.flags & kIsParent) == 0 || task.parent == running.parent;
  };
  if (seat_index < header.num_workers) {  // children that only this worker may run
    const uint32_t slot =
        take_any(region_.queues[kNumSharedQueues * header.num_classes + seat_index], region_.base, is_welcome);
    if (slot != kNone) {
      run_own(slot, seat_index);
      return true;
    }
  }
  for (uint32_t c = 0; c < header.num_classes; ++c) {
    if ((classes >> c & 1) == 0) continue;
    uint32_t slot = take_one(region_.rings[seat_index * header.num_classes + c]);
    if (slot != kNone && !is_welcome(slot)) {
      const Slot& task = region_.slots[slot];
      push(region_.queues[kOverflow * header.num_classes + c], region_.base, {task.priority, sequence_of(slot), slot});
      header.num_overflow.fetch_add(1, std::memory_order_release);
      wake_worker();
      return true;
    }
    for (const SharedQueue which : {kUrgent, kOverflow, kBackground}) {
      if (slot != kNone) break;
      slot = take_any(region_.queues[which * header.num_classes + c], region_.base, is_welcome);
      if (slot == kNone) continue;
      std::atomic<uint32_t>& count = which == kUrgent     ? header.num_urgent
                                     : which == kOverflow ? header.num_overflow
                                                          : header.num_background;
      count.fetch_sub(1, std::memory_order_relaxed);
    }
    if (slot == kNone) continue;
    run_own(slot, seat_index);
    return true;
  }
  const uint32_t stolen = steal(seat_index, classes);
  if (stolen == kNone) return false;
  if (is_welcome(stolen)) {
    run_own(stolen, seat_index);
  } else {
    const Slot& task = region_.slots[stolen];
    push(region_.queues[kOverflow * header.num_classes + task.type_class], region_.base,
         {task.priority, sequence_of(stolen), stolen});
    header.num_overflow.fetch_add(1, std::memory_order_release);
    wake_worker();  // a worker that looked between the two queues saw neither
  }
  return true;
}

// A task that waits for itself, or for one whose child it is, would wait for ever.
void Engine::check_not_inside(pto_task task) const {
  uint32_t outer = running.engine == this ? running.parent : 0;
  for (; outer != 0; outer = region_.slots[outer - 1].parent) {
    const WakeWord word = region_.slots[outer - 1].wake.load(std::memory_order_relaxed);
    if (make_ref(generation_in(word), outer - 1) != task) continue;
    raise(PTO_DEADLOCK,
          "[runtime.wait] a task must not wait for itself or for a task that it is a child of; got such a wait; ",
          "wait from outside");
  }
}

int Engine::wait(pto_task task, double timeout_s, bool helps) {
  if (running.engine == this) check_not_inside(task);
  const bool done = wait_until([&] { return is_complete(task); }, [&] { watch(task); }, timeout_s, helps);
  return done ? waited(task_status(task)) : PTO_TIMEOUT;
}

int Engine::wait_any(const pto_task* tasks, uint32_t num_tasks, double timeout_s, uint32_t* first, bool helps) {
  if (num_tasks == 0) raise(PTO_BAD_ARGUMENT, "[runtime.wait_any] there must be a task to wait for; got none; add one");
  uint32_t found = num_tasks;
  const auto done = [&] {
    for (found = 0; found < num_tasks; ++found) {
      if (is_complete(tasks[found])) return true;
    }
    return false;
  };
  const auto watch_all = [&] {
    for (uint32_t t = 0; t < num_tasks; ++t) watch(tasks[t]);
  };
  if (!wait_until(done, watch_all, timeout_s, helps)) return PTO_TIMEOUT;
  if (first != nullptr) *first = found;
  return waited(task_status(tasks[found]));
}

int Engine::wait_all(double timeout_s, bool helps) {
  const uint32_t seat_index = seat_here();
  Seat& me = seat(seat_index);
  bool done = false;
  uint32_t error = 0;
  if (running.engine == this) {
    Slot& parent = region_.slots[running.parent - 1];
    done = wait_until([&] { return parent.children.load(std::memory_order_acquire) == 1; },
                      [&] {
                        for (uint32_t s = 0; s < header_seats(); ++s) watch_lane(s);
                      },
                      timeout_s, helps);
    if (done) error = parent.child_error.exchange(0, std::memory_order_acq_rel);
  } else {
    const uint32_t base = seat_index * region_.header->window;
    const uint32_t window = region_.header->window;
    const uint64_t end = me.cursor;
    uint64_t at = std::max(me.waited, end - std::min<uint64_t>(end, window));
    done = wait_until(
        [&] {
          for (; at < end; ++at) {
            if (is_live(region_.slots[base + (at & (window - 1))].wake.load(std::memory_order_acquire))) return false;
          }
          return !has_rounds(seat_index);
        },
        [&] {
          watch_lane(seat_index);
          watch_rounds(seat_index);
        },
        timeout_s, helps);
    if (done) {
      me.waited = end;
      error = me.first_error.exchange(0, std::memory_order_acq_rel);
    }
  }
  if (!done) return PTO_TIMEOUT;
  if (error == 0) return PTO_OK;
  raise(waited(error_status(error)), error_text(error));
}

// A submitter without a slot helps until an eighth of the window is done, so that it does not come back for each task.
// Tasks end roughly in the order in which they began, so the next slot is tried before all are looked at.
uint32_t Engine::take_slot_slowly(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  const uint32_t window = region_.header->window;
  const uint32_t base = seat_index * window;
  const int64_t begin = now_ns();
  {
    Blocking let_others_run;  // what it runs may take long
    const DefaultFloatModes modes;
    for (uint32_t n = 0; n < std::max(window / 8, 1u) && help(seat_index); n += 1) {
    }
  }
  note_stall(seat_index, Resource::kWindow, begin);
  for (uint32_t step = 0; step < 8; ++step) {
    const uint32_t at = static_cast<uint32_t>(me.cursor + step) & (window - 1);
    const WakeWord word = region_.slots[base + at].wake.load(std::memory_order_acquire);
    if (is_live(word)) continue;
    me.cursor += step;
    return find_free_slot(seat_index);
  }
  uint32_t slot = find_free_slot(seat_index);
  while (slot == kNone) {
    wait_for_room(seat_index, Resource::kWindow, window);
    slot = find_free_slot(seat_index);
  }
  return slot;
}

uint32_t Engine::find_free_slot(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  const uint32_t base = seat_index * region_.header->window;
  const uint32_t mask = region_.header->window - 1;
  for (uint32_t step = 0; step <= mask; ++step) {
    const uint32_t at = static_cast<uint32_t>(me.cursor + step) & mask;
    Slot& task = region_.slots[base + at];
    const WakeWord word = task.wake.load(std::memory_order_acquire);
    if (is_live(word)) continue;
    me.cursor += step + 1;
    task.state.store(SlotState::kFilling, std::memory_order_relaxed);
    task.wake.store((generation_in(word) + 1) << 24, std::memory_order_relaxed);
    return base + at;
  }
  return kNone;
}

void Engine::note_stall(uint32_t seat_index, Resource cause, int64_t begin_ns) {
  Seat& me = seat(seat_index);
  const int64_t end_ns = now_ns();
  me.stall_ns.store(me.stall_ns.load(std::memory_order_relaxed) + static_cast<uint64_t>(end_ns - begin_ns),
                    std::memory_order_relaxed);
  me.num_stalls.store(me.num_stalls.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (cause == Resource::kWindow) me.window_high.store(region_.header->window, std::memory_order_relaxed);
  if (Trace* trace = active_trace_.load(std::memory_order_relaxed)) {
    trace->stall(seat_index, static_cast<int32_t>(cause), begin_ns, end_ns, num_submitted() - num_completed(),
                 region_.header->segments_used.load(std::memory_order_relaxed) * kSegmentBytes);
  }
}

/// One step of waiting for a resource: helps, or sleeps until something completes, or proves that nothing ever will.
/// True, for boxes only: no task can free any; the caller looks once more, because only it can tell.
bool Engine::wait_for_room(uint32_t seat_index, Resource resource, uint64_t size) {
  Seat& me = seat(seat_index);
  Header& header = *region_.header;
  Blocking let_others_run;
  const DefaultFloatModes modes;
  const int64_t begin = now_ns();
  const uint64_t word = header.wait_word.load(std::memory_order_acquire);
  check_open();
  check_interrupted(&me.asked_ns);
  expire_overdue(seat_index);
  if (help(seat_index)) {
    note_stall(seat_index, resource, begin);
    return false;
  }
  me.blocked_size.store(size, std::memory_order_relaxed);
  me.blocked.store(1 + static_cast<uint32_t>(resource), std::memory_order_seq_cst);
  struct Unblock {
    Seat& seat;
    ~Unblock() { seat.blocked.store(0, std::memory_order_seq_cst); }
  } unblock{me};
  // Twice with a look at the counters between: what is stuck stays stuck, so a state seen torn is not taken for it.
  const uint64_t before = num_completed();
  if (is_stuck(seat_index, resource) && is_stuck(seat_index, resource) && before == num_completed()) {
    if (resource == Resource::kRegions) return true;
    if (!has_room(seat_index, resource, size)) raise_deadlock(seat_index, resource, size);
  }
  if (now_ns() - begin < 1'000'000 && me.stall_rounds++ < 1000) {
    sched_yield();
  } else {
    header.num_waiting.fetch_add(1, std::memory_order_seq_cst);
    for (uint32_t s = 0; s < header_seats(); ++s) watch_lane(s);
    heavy_barrier(fences_);
    if (!has_room(seat_index, resource, size) && !has_work(seat_index)) {
      futex_wait(header.wait_word, static_cast<uint32_t>(word), kSliceNs, header.is_shared != 0);
    } else {
      sched_yield();
    }
    header.num_waiting.fetch_sub(1, std::memory_order_seq_cst);
    me.stall_rounds = 0;
  }
  check_peer();
  note_stall(seat_index, resource, begin);
  return false;
}

bool Engine::has_room(uint32_t seat_index, Resource resource, uint64_t size) const {
  const Header& header = *region_.header;
  switch (resource) {
    case Resource::kWindow: {
      const uint32_t base = seat_index * header.window;
      for (uint32_t s = base; s < base + header.window; ++s) {
        if (!is_live(region_.slots[s].wake.load(std::memory_order_acquire))) return true;
      }
      return false;
    }
    case Resource::kHeap: {
      const auto count = static_cast<uint32_t>((size + kSegmentBytes - 1) / kSegmentBytes);
      std::lock_guard guard(region_.header->heap_lock);
      return find_run(count) != kNone;
    }
    case Resource::kHandles: {
      std::lock_guard guard(region_.header->pool_lock);
      return header.free_handles != 0 || header.fresh_handles.load(std::memory_order_relaxed) < header.max_handles;
    }
    default:
      return false;
  }
}

// No task runs or could run, none waits for the outside, and nobody else has a scope to close.
bool Engine::is_stuck(uint32_t seat_index, Resource resource) const {
  const Header& header = *region_.header;
  const uint32_t num_seats = header_seats();
  // First: between the end of a task and the start of its successor no slot shows either, but a thread is busy.
  for (uint32_t s = 0; s < num_seats; ++s) {
    const Seat& other = region_.seats[s];
    const uint32_t blocked = other.blocked.load(std::memory_order_seq_cst);
    if (other.is_busy.load(std::memory_order_acquire) != 0 && blocked == 0) return false;
    // It may have been given room since it looked, and not know yet.
    if (s != seat_index && blocked != 0 &&
        has_room(s, static_cast<Resource>(blocked - 1), other.blocked_size.load(std::memory_order_relaxed))) {
      return false;
    }
  }
  if (has_live_rounds()) return false;
  for (uint32_t s = 0; s < num_seats; ++s) {
    const Seat& other = region_.seats[s];
    const bool may_free = resource != Resource::kWindow && other.is_taken.load(std::memory_order_acquire) != 0 &&
                          other.num_open_scopes.load(std::memory_order_acquire) > 0;
    if (s != seat_index && may_free && other.blocked.load(std::memory_order_seq_cst) == 0) return false;
    for (uint32_t slot = s * header.window; slot < (s + 1) * header.window; ++slot) {
      const Slot& task = region_.slots[slot];
      if (!is_live(task.wake.load(std::memory_order_acquire))) continue;
      const SlotState state = task.state.load(std::memory_order_acquire);
      if (state == SlotState::kPending || state == SlotState::kChildren) continue;
      if (state == SlotState::kFilling && (s == seat_index || other.blocked.load(std::memory_order_seq_cst) != 0)) {
        continue;
      }
      if (state == SlotState::kRunning && is_blocked_parent(slot)) continue;
      return false;
    }
  }
  return true;
}

/// A task whose kernel itself waits for room, in a thread that says so.
bool Engine::is_blocked_parent(uint32_t slot) const {
  for (uint32_t s = 0; s < header_seats(); ++s) {
    const Seat& seat = region_.seats[s];
    if (seat.blocked.load(std::memory_order_seq_cst) != 0 &&
        region_.args[slot].runner.load(std::memory_order_relaxed) == s + 1) {
      return true;
    }
  }
  return false;
}

void Engine::raise_deadlock(uint32_t seat_index, Resource resource, uint64_t size) {
  const Header& header = *region_.header;
  uint32_t oldest = kNone;
  for (uint32_t s = seat_index * header.window; s < (seat_index + 1) * header.window; ++s) {
    const Slot& task = region_.slots[s];
    if (!is_live(task.wake.load(std::memory_order_acquire)) || task.state.load() == SlotState::kFilling) continue;
    if (oldest == kNone || task.sequence.load() < region_.slots[oldest].sequence.load()) oldest = s;
  }
  std::ostringstream who;
  if (oldest == kNone) {
    who << "no task is left to free any";
  } else {
    const Slot& task = region_.slots[oldest];
    who << "the oldest task, number " << task.sequence.load() << " ("
        << (task.kernel >= 0 ? kernel_name(task.kernel) : "empty") << "), waits for this submitter";
  }
  static constexpr const char* kNames[] = {"task slots of the window", "bytes of the heap", "handles", "boxes"};
  static constexpr const char* kKnobs[] = {"window", "heap_bytes", "max_handles", "max_regions"};
  const uint64_t total = resource == Resource::kWindow    ? header.window
                         : resource == Resource::kHeap    ? uint64_t{header.num_segments} * kSegmentBytes
                         : resource == Resource::kHandles ? header.max_handles
                                                          : header.max_regions;
  const auto which = static_cast<size_t>(resource);
  raise(PTO_DEADLOCK, "[runtime.submit] open scopes must leave room for the next task; got a deadlock: ", size, " ",
        kNames[which], " wanted, all ", total, " held by open scopes (depth ", region_.seats[seat_index].depth,
        "), and ", who.str(), "; end scopes earlier, or raise ", kKnobs[which]);
}

}  // namespace tilewise::tasks
