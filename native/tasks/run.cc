// Taking, running and completing tasks; the workers. See engine.h.
#include <algorithm>
#include <cfenv>
#include <mutex>

#include "tasks/engine.h"
#include "tasks/hot.h"
#include "tasks/replay/instance.h"
#include "tasks/sched/queues.h"
#include "tasks/sched/sleep.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/pool.h"

namespace tilewise::tasks {

namespace {

constexpr uint32_t kStealLimit = 32;
constexpr uint32_t kWorkerStreak = 64;  // successors run one after the other without looking at the queues
constexpr uint32_t kHelperStreak = 16;

bool is_leaf(const Slot& task) { return (task.flags & kIsParent) == 0; }

/// Writes one word of each cache line as it is. A line that this thread has only read stays with its last writer as
/// well, who must then call it back before the next write: that costs a round trip which nothing hides, while a line
/// that somebody else has written comes in the background.
void take_over(uint64_t* words, uint32_t count) {
  for (uint32_t w = 0; w < count; w += 8) {
    const std::atomic_ref word(words[w]);
    word.store(word.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
}

}  // namespace

bool Engine::is_cancelled(uint32_t slot) const {
  if (region_.header->num_cancels.load(std::memory_order_relaxed) == 0) return false;
  const Slot& task = region_.slots[slot];
  const auto generation = static_cast<uint32_t>(generation_in(task.wake.load(std::memory_order_relaxed)));
  const uint64_t below = region_.seats[lane_of(slot)].cancel_below.load(std::memory_order_relaxed);
  return task.cancelled.load(std::memory_order_relaxed) == generation || sequence_of(slot) <= below;
}

// Tokens of commuting accesses are taken in the order of their handles, so that no two tasks wait for each other.
bool Engine::take_tokens(uint32_t slot) {
  constexpr uint32_t kHeld = 1u << 31;
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  while (args.num_tokens_held < args.num_tokens) {
    std::atomic<uint32_t>& token = region_.handles[args.tokens[args.num_tokens_held]].token;
    uint32_t seen = token.load(std::memory_order_acquire);
    if ((seen & kHeld) == 0) {
      if (token.compare_exchange_weak(seen, kHeld, std::memory_order_acq_rel, std::memory_order_acquire)) {
        ++args.num_tokens_held;
      }
      continue;
    }
    task.state.store(SlotState::kPending, std::memory_order_relaxed);
    task.next_waiter = seen & ~kHeld;
    if (token.compare_exchange_weak(seen, kHeld | (slot + 1), std::memory_order_acq_rel, std::memory_order_acquire)) {
      return false;
    }
  }
  return true;
}

void Engine::release_tokens(uint32_t slot, uint32_t seat_index) {
  constexpr uint32_t kHeld = 1u << 31;
  const SlotArgs& args = region_.args[slot];
  for (uint32_t t = 0; t < args.num_tokens_held; ++t) {
    uint32_t waiter = region_.handles[args.tokens[t]].token.exchange(0, std::memory_order_acq_rel) & ~kHeld;
    while (waiter != 0) {
      const uint32_t next = region_.slots[waiter - 1].next_waiter;
      if (take_tokens(waiter - 1)) make_ready(waiter - 1, seat_index);
      waiter = next;
    }
  }
}

/// Tasks with a priority, or for one worker, or that did not fit the ring.
void Engine::push_special(uint32_t slot) {
  const Slot& task = region_.slots[slot];
  Header& header = *region_.header;
  const OrderedEntry entry{task.priority, sequence_of(slot), slot};
  if ((task.flags & kHasTarget) != 0) {
    const uint32_t worker = region_.args[slot].target_worker - 1;
    return push(region_.queues[kNumSharedQueues * header.num_classes + worker], region_.base, entry);
  }
  const SharedQueue which = task.priority > 0 ? kUrgent : task.priority < 0 ? kBackground : kOverflow;
  push(region_.queues[which * header.num_classes + task.type_class], region_.base, entry);
  std::atomic<uint32_t>& count = which == kUrgent       ? header.num_urgent
                                 : which == kBackground ? header.num_background
                                                        : header.num_overflow;
  count.fetch_add(1, std::memory_order_release);
}

bool Engine::can_help(uint32_t slot) const { return region_.header->num_workers == 0 || is_leaf(region_.slots[slot]); }

uint32_t Engine::take(uint32_t seat_index, bool is_worker) {
  Header& header = *region_.header;
  const uint32_t classes = seat(seat_index).classes;
  const auto is_welcome = [&](uint32_t slot) { return is_worker || can_help(slot); };
  const auto take_shared = [&](SharedQueue which, std::atomic<uint32_t>& count) {
    if (count.load(std::memory_order_acquire) == 0) return kNone;
    for (uint32_t c = 0; c < header.num_classes; ++c) {
      if ((classes >> c & 1) == 0) continue;
      const uint32_t slot = take_first(region_.queues[which * header.num_classes + c], region_.base, is_welcome);
      if (slot == kNone) continue;
      count.fetch_sub(1, std::memory_order_relaxed);
      return slot;
    }
    return kNone;
  };
  uint32_t slot = take_shared(kUrgent, header.num_urgent);
  if (slot != kNone) return slot;
  if (is_worker && seat_index < header.num_workers) {
    slot = take_first(region_.queues[kNumSharedQueues * header.num_classes + seat_index], region_.base, is_welcome);
    if (slot != kNone) return slot;
  }
  for (uint32_t c = 0; c < header.num_classes && slot == kNone; ++c) {
    if ((classes >> c & 1) != 0) slot = take_one(region_.rings[seat_index * header.num_classes + c]);
  }
  if (slot == kNone) slot = steal(seat_index, classes);
  if (slot != kNone) {
    if (is_welcome(slot)) return slot;
    // A helper has drawn a task that may block: the workers get it.
    const Slot& task = region_.slots[slot];
    push(region_.queues[kOverflow * header.num_classes + task.type_class], region_.base,
         {task.priority, sequence_of(slot), slot});
    header.num_overflow.fetch_add(1, std::memory_order_release);
    wake_worker();
  }
  slot = take_shared(kOverflow, header.num_overflow);
  return slot != kNone ? slot : take_shared(kBackground, header.num_background);
}

uint32_t Engine::steal(uint32_t seat_index, uint32_t classes) {
  Header& header = *region_.header;
  Seat& me = seat(seat_index);
  const uint32_t num_seats = header.seats_in_use.load(std::memory_order_acquire);
  uint32_t victim = me.victim < num_seats ? me.victim : 0;
  for (uint32_t tries = 0; tries < num_seats; ++tries, victim = victim + 1 < num_seats ? victim + 1 : 0) {
    if (victim == seat_index) continue;
    for (uint32_t c = 0; c < header.num_classes; ++c) {
      Ring& ring = region_.rings[victim * header.num_classes + c];
      if ((classes >> c & 1) == 0 || !has_tasks(ring)) continue;
      uint32_t slots[kStealLimit];
      const uint32_t count = take_half(ring, slots, kStealLimit);
      if (count == 0) continue;
      me.victim = victim;
      for (uint32_t i = 0; i < count; ++i) protocols::prefetch_for_write(&region_.slots[slots[i]]);
      for (uint32_t i = 1; i < count; ++i) push_ready(slots[i], seat_index);
      if (count > 1) wake_worker();
      return slots[0];
    }
  }
  return kNone;
}

bool Engine::has_work(uint32_t seat_index) const {
  const Header& header = *region_.header;
  const uint32_t classes = region_.seats[seat_index].classes;
  const auto is_waiting = [&](uint32_t queue) {
    return region_.queues[queue].size.load(std::memory_order_acquire) != 0;
  };
  for (uint32_t c = 0; c < header.num_classes; ++c) {
    if ((classes >> c & 1) == 0) continue;
    for (uint32_t which = 0; which < kNumSharedQueues; ++which) {
      if (is_waiting(which * header.num_classes + c)) return true;
    }
    const uint32_t num_seats = header.seats_in_use.load(std::memory_order_acquire);
    for (uint32_t s = 0; s < num_seats; ++s) {
      if (has_tasks(region_.rings[s * header.num_classes + c])) return true;
    }
  }
  return seat_index < header.num_workers && is_waiting(kNumSharedQueues * header.num_classes + seat_index);
}

// Runs a task, and then successor after successor that its completion made ready. Returns how many. Nested: inside a
// task that waits.
[[gnu::flatten]] uint32_t Engine::run(uint32_t slot, uint32_t seat_index, bool is_worker) {
  const uint32_t streak = is_worker ? kWorkerStreak : kHelperStreak;
  const Busy busy(seat(seat_index));
  uint32_t n = 0;
  while (slot != kNone) {
    const int status = execute(slot, seat_index);
    const uint32_t next = finish(slot, seat_index, status, is_worker);
    if (++n >= streak && next != kNone) {
      push_ready(next, seat_index);
      wake_worker();
      break;
    }
    slot = next;
  }
  return n;
}

int Engine::execute(uint32_t slot, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  const SlotArgs& args = region_.args[slot];
  task.state.store(SlotState::kRunning, std::memory_order_relaxed);
  if (Trace* trace = active_trace_.load(std::memory_order_relaxed)) trace->start(seat_index);
  if (task.poison != 0) return PTO_TASK_FAILED;
  if (is_cancelled(slot)) return PTO_CANCELLED;
  if ((task.flags & kHasDeadline) != 0 && is_overdue(slot)) [[unlikely]]
    return PTO_TIMEOUT;
  if (task.kernel < 0) return PTO_OK;
  if ((task.flags & kHasPredicate) != 0 && *static_cast<const uint32_t*>(region_.at(args.predicate)) == 0) {
    return PTO_OK;
  }
  return call_kernel(slot, seat_index);
}

/// Calls a kernel as the task that `as` names. What it throws is its failure.
int Engine::invoke(int32_t kernel, pto_kernel_fn function, void* const* buffers, const uint64_t* scalars,
                   const Running& as) {
  const Running outer = running;
  running = as;
  int status = PTO_TASK_FAILED;
  try {
    status = function != nullptr ? function(buffers, scalars) : function_of(kernel)(buffers, scalars);
  } catch (const std::exception& error) {
    failure_reason = error.what();
  } catch (...) {
    failure_reason = "an unknown exception";
  }
  if (running.has_reason && (status == PTO_OK || status == PTO_LATER)) [[unlikely]]
    failure_reason.clear();
  running = outer;
  return status;
}

int Engine::call_kernel(uint32_t slot, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  if ((task.flags & kIsReplayed) != 0) {
    const Replayed& own = task.replayed;
    return invoke(task.kernel, own.function, own.buffers, own.scalars, {this, seat_index, slot, 0});
  }
  const pto_kernel_fn function = function_at(task.kernel);
  if (task.keeps_arguments() && is_leaf(task)) {
    if (task.room < kInlineProducers) take_over(task.producers, 1);
    return invoke(task.kernel, function, task.addresses(), task.scalars(), {this, seat_index, slot, 0});
  }
  SlotArgs& args = region_.args[slot];
  void* buffers[PTO_MAX_PARAMS];
  for (uint32_t p = 0; p < task.num_params; ++p) buffers[p] = region_.at(args.params[p].address);
  if ((task.flags & kHasViews) != 0) [[unlikely]] {
    pto_view* const views = region_.notes[slot].views;
    for (uint32_t p = 0; p < task.num_params; ++p) {
      views[p].data = buffers[p];
      buffers[p] = &views[p];
    }
  }
  uint64_t* const scalars = args.scalars(task.num_params);
  take_over(reinterpret_cast<uint64_t*>(args.params), 2 * task.num_params + task.num_scalars);
  if (is_leaf(task)) return invoke(task.kernel, function, buffers, scalars, {this, seat_index, slot, 0});
  Seat& me = seat(seat_index);
  if (me.depth == PTO_MAX_SCOPES) {
    failure_reason = "tasks inside tasks must not nest deeper than 64 scopes";
    return PTO_TASK_FAILED;
  }
  task.children.store(1, std::memory_order_relaxed);
  task.child_error.store(0, std::memory_order_relaxed);
  const uint32_t outer_base = me.base_depth;
  me.scopes[++me.depth] = {};
  me.num_open_scopes.store(me.depth, std::memory_order_release);
  me.base_depth = me.depth;
  args.runner.store(seat_index + 1, std::memory_order_relaxed);
  const int status = invoke(task.kernel, function, buffers, scalars, {this, seat_index, slot, slot + 1});
  while (me.depth >= me.base_depth) close_scope(seat_index);
  me.base_depth = outer_base;
  args.runner.store(0, std::memory_order_relaxed);
  return status;
}

// After the kernel: a task may still wait for its children, or for whoever ends it from outside.
uint32_t Engine::finish(uint32_t slot, uint32_t seat_index, int status, bool is_worker) {
  Slot& task = region_.slots[slot];
  if (status == PTO_LATER) {
    SlotState expected = SlotState::kRunning;
    if (task.state.compare_exchange_strong(expected, SlotState::kExternal, std::memory_order_acq_rel)) return kNone;
    status = status_of(slot);  // it was ended before its kernel returned
  }
  const bool has_children = !is_leaf(task) && task.kernel >= 0 && task.poison == 0 && task.children.load() != 0;
  if (has_children) {
    status_of(slot) = status;
    task.state.store(SlotState::kChildren, std::memory_order_relaxed);
    if (task.children.fetch_sub(1, std::memory_order_acq_rel) != 1) return kNone;
    end_parent(slot, seat_index);
    return kNone;
  }
  return complete(slot, seat_index, status, is_worker);
}

void Engine::complete_external(pto_task name, int status) {
  const uint32_t slot = slot_of(name);
  if (is_complete(name)) {
    raise(PTO_BAD_ARGUMENT,
          "[runtime.task_complete] a task is ended once, by a kernel that returned PTO_LATER; got one ",
          "that has completed; check who ends it");
  }
  Slot& task = region_.slots[slot];
  const uint32_t seat_index = running.engine == this ? running.seat : seat_here();
  status_of(slot) = status;
  SlotState expected = SlotState::kRunning;
  if (task.state.compare_exchange_strong(expected, SlotState::kEnded, std::memory_order_acq_rel)) return;
  if (expected != SlotState::kExternal) {
    raise(PTO_BAD_ARGUMENT, "[runtime.task_complete] a task is ended after its kernel has begun; got one that has not ",
          "started; let the kernel hand out its id");
  }
  if (!is_leaf(task)) {  // its children may still run
    task.state.store(SlotState::kChildren, std::memory_order_relaxed);
    return child_ended(slot, seat_index);
  }
  const Busy busy(seat(seat_index));
  const uint32_t next = complete(slot, seat_index, status, false);
  if (next != kNone) {
    push_ready(next, seat_index);
    wake_worker();
  }
}

bool Engine::may_follow(uint32_t slot, uint32_t seat_index, bool is_worker) const {
  const Slot& task = region_.slots[slot];
  return task.priority == 0 && (task.flags & kHasTarget) == 0 && (is_worker || can_help(slot)) &&
         (region_.seats[seat_index].classes >> task.type_class & 1) != 0 &&
         region_.header->num_urgent.load(std::memory_order_relaxed) == 0;
}

/// A task that a completion made ready: the thread runs the first that it may at once; others get the rest.
inline void Engine::follow_up(uint32_t& next, uint32_t slot, uint32_t seat_index, bool is_worker) {
  if (next != kNone || !may_follow(slot, seat_index, is_worker)) return make_ready(slot, seat_index);
  next = slot;
  region_.slots[slot].state.store(SlotState::kReady, std::memory_order_relaxed);
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    ready_ticks_of(slot) = ticks();
}

/// Those that stood behind a task, in the order of submission. Returns one of them for this thread to run next.
uint32_t Engine::wake_list(uint32_t waiter, uint32_t next, uint32_t seat_index, bool is_worker) {
  protocols::prefetch_for_write(&region_.slots[waiter - 1]);
  protocols::prefetch_for_write(&region_.slots[waiter - 1].producers);
  if (region_.slots[waiter - 1].next_waiter != 0) {
    uint32_t reversed = 0;
    while (waiter != 0) {
      const uint32_t after = region_.slots[waiter - 1].next_waiter;
      region_.slots[waiter - 1].next_waiter = reversed;
      reversed = waiter;
      waiter = after;
    }
    waiter = reversed;
  }
  while (waiter != 0) {
    const uint32_t woken = waiter - 1;
    waiter = region_.slots[woken].next_waiter;
    if (advance(woken, seat_index)) follow_up(next, woken, seat_index, is_worker);
  }
  return next;
}

// The exchange of the wake word is the completion: it publishes the task's writes, frees the slot for its lane and
// takes the waiters. Nothing of the slot is read after it. Returns a successor for this thread to run next.
uint32_t Engine::complete(uint32_t slot, uint32_t seat_index, int status, bool is_worker) {
  Slot& task = region_.slots[slot];
  Seat& me = seat(seat_index);
  if (status != PTO_OK) [[unlikely]]
    fail(slot, seat_index, status);
  const TaskRef self = name_at(slot);
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    trace_end(slot, seat_index, self, status);
  me.num_completed.store(me.num_completed.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if ((task.flags & kIsReplayed) != 0) return complete_replayed(slot, seat_index, self, is_worker);
  if ((task.flags & kUsesTokens) != 0) release_tokens(slot, seat_index);
  if ((task.flags & kUsesHeap) != 0) release_heap(task, region_.args[slot]);
  const uint32_t parent = task.parent;
  const WakeWord word = task.wake.exchange((generation_of(self) + 1) << 24, std::memory_order_acq_rel);
  uint32_t next = kNone;
  if (first_waiter(word) != 0) next = wake_list(first_waiter(word), next, seat_index, is_worker);
  if ((word & kWatched) != 0) [[unlikely]]
    tell_watchers(self);
  if (parent != 0) child_ended(parent - 1, seat_index);
  return next;
}

// The same for a task of an instance, which waits in its place for the next round. A round ends when all have counted
// themselves; nothing of the instance is touched after that.
uint32_t Engine::complete_replayed(uint32_t slot, uint32_t seat_index, TaskRef self, bool is_worker) {
  Slot& task = region_.slots[slot];
  const Replayed& own = task.replayed;
  std::atomic<uint64_t>& done = own.instance->done[seat_index].count;
  task.children.store(own.num_arrivals, std::memory_order_relaxed);
  task.poison = 0;
  task.state.store(SlotState::kPending, std::memory_order_relaxed);
  const WakeWord word = task.wake.exchange((generation_of(self) + 2) << 24, std::memory_order_acq_rel);
  uint32_t next = kNone;
  for (uint32_t s = 0; s < own.num_successors; ++s) {
    const uint32_t successor = own.successors[s];
    if (arrive(successor)) follow_up(next, successor, seat_index, is_worker);
  }
  if (first_waiter(word) != 0) [[unlikely]]
    next = wake_list(first_waiter(word), next, seat_index, is_worker);
  done.store(done.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  if ((word & kWatched) != 0) [[unlikely]]
    tell_watchers(self);
  return next;
}

void Engine::tell_watchers(TaskRef task) {
  wake_waiters();
  if (num_callbacks_.load(std::memory_order_acquire) != 0) run_callbacks(task);
}

void Engine::trace_end(uint32_t slot, uint32_t seat_index, TaskRef self, int status) {
  const Slot& task = region_.slots[slot];
  Trace::Before before{lane_of(slot), 0, 0, ready_ticks_of(slot), task_name(slot)};
  if ((task.flags & kIsReplayed) != 0) {
    before.scope_depth = task.replayed.instance->scope_depth;
    before.submit_ticks = task.replayed.instance->submit_ticks;
  } else {
    before.scope_depth = region_.args[slot].scope_depth;
    before.submit_ticks = region_.args[slot].submit_ticks;
  }
  active_trace_.load(std::memory_order_relaxed)
      ->end(seat_index, region_.header->num_workers, self, task, before, status);
}

void Engine::child_ended(uint32_t parent, uint32_t seat_index) {
  if (region_.slots[parent].children.fetch_sub(1, std::memory_order_acq_rel) == 1) end_parent(parent, seat_index);
}

// The last of a parent's kernel and children: what its children knew of its buffers goes, then it completes.
void Engine::end_parent(uint32_t slot, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  for (uint32_t p = 0; p < task.num_params; ++p) {
    if (args.params[p].shadow == 0) continue;
    give_handle(args.params[p].shadow - 1, seat_index);
    args.params[p].shadow = 0;
  }
  int status = args.status;
  const uint32_t error = task.child_error.load(std::memory_order_relaxed);
  if (status == PTO_OK && error != 0) {
    task.poison = error;
    status = PTO_TASK_FAILED;
  }
  const uint32_t next = complete(slot, seat_index, status, false);
  if (next == kNone) return;
  push_ready(next, seat_index);
  wake_worker();
}

// Workers.

void Engine::worker_loop(uint32_t worker) {
  std::fesetenv(FE_DFL_ENV);  // a thread inherits its maker's rounding and denormal modes; bits must not
  Header& header = *region_.header;
  Idle idle;
  Pace pace;
  bool is_replayed = false;  // what it took last
  while (header.closing.load(std::memory_order_acquire) == 0 && !peer_lost_.load(std::memory_order_relaxed)) {
    const uint32_t slot = take(worker, true);
    if (slot != kNone) {
      if (is_worker_side_) [[unlikely]]
        follow_trace();
      if (idle.is_idle()) pace.found();
      is_replayed = (region_.slots[slot].flags & kIsReplayed) != 0;
      idle.reset();
      run(slot, worker, true);
    } else if (!idle.is_idle()) {
      const uint64_t num_run = region_.seats[worker].num_completed.load(std::memory_order_relaxed);
      if (is_replayed) {
        pace.ran_dry_of_rounds(num_run);
      } else {
        pace.ran_dry(num_run, [&] { return num_submitted(); });
      }
      idle.begin();
    } else if (idle.should_sleep()) {
      park_worker(worker);
      idle.reset();
    }
  }
}

// A worker counts itself as parked before it looks for work the last time; whoever makes work looks at the count after
// it has published the work. The barrier between the two steps is issued here, for everybody, because sleeping is rare.
void Engine::park_worker(uint32_t worker) {
  Header& header = *region_.header;
  const uint32_t word = header.worker_word.load(std::memory_order_acquire);
  header.num_parked.fetch_add(1, std::memory_order_seq_cst);
  heavy_barrier(fences_);
  const bool has_any = has_work(worker) || (host_ != nullptr && host_->has_more());
  if (!has_any && header.closing.load(std::memory_order_seq_cst) == 0) {
    int64_t sleep_ns = header.is_shared != 0 ? 50'000'000 : -1;
    const int64_t deadline = header.next_deadline_ns.load(std::memory_order_acquire);
    if (deadline != 0) {
      const int64_t left = std::max<int64_t>(deadline - now_ns(), 1);
      sleep_ns = sleep_ns < 0 ? left : std::min(sleep_ns, left);
    }
    futex_wait(header.worker_word, word, sleep_ns, header.is_shared != 0);
  }
  header.num_parked.fetch_sub(1, std::memory_order_seq_cst);
  expire_overdue(worker);
  if (header.is_shared != 0 && worker == 0) check_peer();
}

// Workers of one class are alike, so one is enough; otherwise the right one must be among the woken.
void Engine::wake_sleeper(bool all) {
  Header& header = *region_.header;
  if (header.num_parked.load(std::memory_order_relaxed) == 0) return wake_waiters();
  header.worker_word.fetch_add(1, std::memory_order_acq_rel);
  futex_wake(header.worker_word, all || header.num_classes > 1 ? INT32_MAX : 1, header.is_shared != 0);
}

void Engine::wake_waiters() {
  Header& header = *region_.header;
  light_barrier(fences_);
  if (header.num_waiting.load(std::memory_order_relaxed) == 0) return;
  header.wait_word.fetch_add(1, std::memory_order_acq_rel);
  futex_wake(header.wait_word, INT32_MAX, header.is_shared != 0);
}

}  // namespace tilewise::tasks
