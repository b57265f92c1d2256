// See run.h.
#include "tasks/run/run.h"

#include <exception>
#include <string>

#include "tasks/engine/handles.h"
#include "tasks/engine/thread_slots.h"
#include "tasks/run/link.h"
#include "tasks/store/heap.h"

namespace tilewise::tasks {

namespace {

constexpr uint32_t kWorkerStreak = 64;  // successors run in a row without checking the queues
constexpr uint32_t kHelperStreak = 16;

/// Writes one word of each cache line back unchanged. A line that this thread has only read also stays in its last
/// writer's cache, which must invalidate it before the next write: a round trip that is not hidden. A line that another
/// thread has written is transferred in the background.
void take_over(uint64_t* words, uint32_t count) {
  for (uint32_t w = 0; w < count; w += 8) {
    const std::atomic_ref word(words[w]);
    word.store(word.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
}

/// Calls a kernel on behalf of the task `as`. An exception is its failure.
int invoke(Engine& engine, int32_t kernel, pto_kernel_fn function, void* const* buffers, const uint64_t* scalars,
           const Running& as) {
  const Running outer = running;
  running = as;
  int status = PTO_TASK_FAILED;
  try {
    status = function != nullptr ? function(buffers, scalars) : engine.kernels.function_of(kernel)(buffers, scalars);
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

int call_kernel(Engine& engine, uint32_t slot, uint32_t thread) {
  Slot& task = engine.store.slots[slot];
  if ((task.flags & kIsReplayed) != 0) {
    const Replayed& own = task.replayed;
    return invoke(engine, task.kernel, own.function, own.buffers, own.scalars, {&engine, thread, slot, 0});
  }
  const pto_kernel_fn function = engine.kernels.function_at(task.kernel);
  if (task.has_inline_arguments() && is_leaf(task)) {
    if (task.room < kInlineProducers) take_over(task.producers, 1);
    return invoke(engine, task.kernel, function, task.addresses(), task.scalars(), {&engine, thread, slot, 0});
  }
  SlotArgs& args = engine.store.args[slot];
  void* buffers[PTO_MAX_PARAMS];
  for (uint32_t p = 0; p < task.num_params; ++p) buffers[p] = engine.store.at(args.params[p].address);
  if ((task.flags & kHasViews) != 0) [[unlikely]] {
    pto_view* const views = engine.store.notes[slot].views;
    for (uint32_t p = 0; p < task.num_params; ++p) {
      views[p].data = buffers[p];
      buffers[p] = &views[p];
    }
  }
  uint64_t* const scalars = args.scalars(task.num_params);
  take_over(reinterpret_cast<uint64_t*>(args.params), 2 * task.num_params + task.num_scalars);
  if (is_leaf(task)) return invoke(engine, task.kernel, function, buffers, scalars, {&engine, thread, slot, 0});
  ThreadSlot& me = engine.thread_slot(thread);
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
  args.runner.store(thread + 1, std::memory_order_relaxed);
  const int status = invoke(engine, task.kernel, function, buffers, scalars, {&engine, thread, slot, slot + 1});
  while (me.depth >= me.base_depth) close_scope(engine, thread);
  me.base_depth = outer_base;
  args.runner.store(0, std::memory_order_relaxed);
  return status;
}

int execute(Engine& engine, uint32_t slot, uint32_t thread) {
  Slot& task = engine.store.slots[slot];
  const SlotArgs& args = engine.store.args[slot];
  task.state.store(SlotState::kRunning, std::memory_order_relaxed);
  if (Trace* trace = engine.active_trace.load(std::memory_order_relaxed)) trace->start(thread);
  if (task.poison != 0) return PTO_TASK_FAILED;
  if (is_cancelled(engine, slot)) return PTO_CANCELLED;
  if ((task.flags & kHasDeadline) != 0 && is_overdue(engine, slot)) [[unlikely]]
    return PTO_TIMEOUT;
  if (task.kernel < 0) return PTO_OK;
  if ((task.flags & kHasPredicate) != 0 && *static_cast<const uint32_t*>(engine.store.at(args.predicate)) == 0) {
    return PTO_OK;
  }
  return call_kernel(engine, slot, thread);
}

bool may_follow(const Engine& engine, uint32_t slot, uint32_t thread, bool is_worker) {
  const Slot& task = engine.store.slots[slot];
  return task.priority == 0 && (task.flags & kHasTarget) == 0 && (is_worker || can_help(engine, slot)) &&
         (engine.store.thread_slots[thread].classes >> task.type_class & 1) != 0 &&
         engine.store.header->num_urgent.load(std::memory_order_relaxed) == 0;
}

/// Handles a task that a completion made ready: this thread runs the first that it may run; others get the rest.
inline void follow_up(Engine& engine, uint32_t& next, uint32_t slot, uint32_t thread, bool is_worker) {
  if (next != kNone || !may_follow(engine, slot, thread, is_worker)) return make_ready(engine, slot, thread);
  next = slot;
  engine.store.slots[slot].state.store(SlotState::kReady, std::memory_order_relaxed);
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    ready_ticks_of(engine, slot) = ticks();
}

/// Wakes the tasks that waited for a task, in the order of submission. Returns one of them for this thread to run next.
uint32_t wake_list(Engine& engine, uint32_t waiter, uint32_t next, uint32_t thread, bool is_worker) {
  protocols::prefetch_for_write(&engine.store.slots[waiter - 1]);
  protocols::prefetch_for_write(&engine.store.slots[waiter - 1].producers);
  const bool is_alone = engine.store.slots[waiter - 1].next_waiter == 0;
  TaskWord::for_each_waiter(
      waiter, [&](uint32_t number) -> uint32_t& { return engine.store.slots[number - 1].next_waiter; },
      [&](uint32_t woken) {
        if (advance(engine, woken - 1, thread)) follow_up(engine, next, woken - 1, thread, is_worker);
      });
  if (!is_alone && next != kNone && engine.store.header->num_urgent.load(std::memory_order_relaxed) != 0) [[unlikely]] {
    push_ready(engine, next, thread);  // a more urgent one has become ready after it
    wake_worker(engine);
    return kNone;
  }
  return next;
}

[[gnu::noinline]] void tell_watchers(Engine& engine, TaskRef task) {
  if (engine.host != nullptr) return engine.host->completed();  // all waiters of an embedded task are its host
  wake_waiters(engine);
  if (engine.callbacks.has_any()) engine.callbacks.run(task);
}

/// 1 + the worker that the task is for; negative if it only prefers this worker; 0 if it is for any.
int32_t signed_target(const Engine& engine, uint32_t slot) {
  const uint32_t flags = engine.store.slots[slot].flags;
  if ((flags & kHasTarget) == 0) return 0;
  const auto target = static_cast<int32_t>(engine.store.args[slot].target_worker);
  return (flags & kPrefersTarget) != 0 ? -target : target;
}

[[gnu::noinline]] void trace_end(Engine& engine, uint32_t slot, uint32_t thread, TaskRef self, int status) {
  const Slot& task = engine.store.slots[slot];
  Trace::Before before{submitter_of(engine, slot), 0, 0, ready_ticks_of(engine, slot), task_name(engine, slot)};
  if ((task.flags & kIsReplayed) != 0) {
    before.scope_depth = task.replayed.replay->scope_depth;
    before.submit_ticks = task.replayed.replay->submit_ticks;
  } else {
    before.scope_depth = engine.store.args[slot].scope_depth;
    before.submit_ticks = engine.store.args[slot].submit_ticks;
  }
  TraceLabel label{task.kernel, static_cast<int64_t>(self)};
  if ((task.flags & kIsEmbedded) != 0) {
    label = engine.host->label_of(engine.store.place_of(slot));
    before.scope_depth = signed_target(engine, slot);  // such tasks have no scopes
  }
  engine.active_trace.load(std::memory_order_relaxed)
      ->end(thread, engine.store.header->num_workers, static_cast<TaskRef>(label.row_begin), label.label, task.priority,
            before, status);
}

// Called by the last of a parent's kernel and children: releases the children's tracking handles, then completes it.
void end_parent(Engine& engine, uint32_t slot, uint32_t thread) {
  Slot& task = engine.store.slots[slot];
  SlotArgs& args = engine.store.args[slot];
  for (uint32_t p = 0; p < task.num_params; ++p) {
    if (args.params[p].shadow == 0) continue;
    give_handle(engine, args.params[p].shadow - 1, thread);
    args.params[p].shadow = 0;
  }
  int status = args.status;
  const uint32_t error = task.child_error.load(std::memory_order_relaxed);
  if (status == PTO_OK && error != 0) {
    task.poison = error;
    status = PTO_TASK_FAILED;
  }
  const uint32_t next = complete(engine, slot, thread, status, false);
  if (next == kNone) return;
  push_ready(engine, next, thread);
  wake_worker(engine);
}

void child_ended(Engine& engine, uint32_t parent, uint32_t thread) {
  if (Countdown::leave(engine.store.slots[parent].children)) end_parent(engine, parent, thread);
}

// The same for a task of an instantiated graph, whose slot waits for the next replay. A replay ends when all its tasks
// have counted themselves; afterwards this thread must not access the graph.
inline uint32_t complete_replayed(Engine& engine, uint32_t slot, uint32_t thread, TaskRef self, bool is_worker) {
  Slot& task = engine.store.slots[slot];
  const Replayed& own = task.replayed;
  GraphReplays::Count& done = own.replay->done[thread].count;
  TaskWordBits word = 0;
  uint32_t next = kNone;
  GraphReplays::end_task(
      done,
      [&] {
        task.children.store(own.num_arrivals, std::memory_order_relaxed);
        task.poison = 0;
        task.state.store(SlotState::kPending, std::memory_order_relaxed);
      },
      [&] { word = TaskWord::complete(task.word, generation_of(self) + 2); },
      [&] {
        for (uint32_t s = 0; s < own.num_successors; ++s) {
          const uint32_t successor = own.successors[s];
          if (arrive(engine, successor)) follow_up(engine, next, successor, thread, is_worker);
        }
        if (TaskWord::first_waiter(word) != 0) [[unlikely]]
          next = wake_list(engine, TaskWord::first_waiter(word), next, thread, is_worker);
      });
  if ((word & TaskWord::kWatched) != 0) [[unlikely]]
    tell_watchers(engine, self);
  return next;
}

[[gnu::noinline]] uint32_t complete_replayed_apart(Engine& engine, uint32_t slot, uint32_t thread, TaskRef self,
                                                   bool is_worker) {
  return complete_replayed(engine, slot, thread, self, is_worker);
}

// The exchange of the task state word is the completion: it publishes the task's writes, frees the slot for its
// submitter and takes the waiters. The slot is not read after it. Returns a successor for this thread to run
// next. is_flat: everything inline, for run(); elsewhere the code for replays is a call, so that the rest is faster.
template <bool is_flat>
[[gnu::always_inline]] inline uint32_t complete_as(Engine& engine, uint32_t slot, uint32_t thread, int status,
                                                   bool is_worker) {
  Slot& task = engine.store.slots[slot];
  ThreadSlot& me = engine.thread_slot(thread);
  if (status != PTO_OK) [[unlikely]]
    fail(engine, slot, thread, status);
  const TaskRef self = engine.store.name_at(slot);
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    trace_end(engine, slot, thread, self, status);
  me.num_completed.store(me.num_completed.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  const uint32_t flags = task.flags;
  if ((flags & (kIsReplayed | kUsesMutexes | kUsesHeap)) != 0) [[unlikely]] {
    if ((flags & kIsReplayed) != 0) {
      return is_flat ? complete_replayed(engine, slot, thread, self, is_worker)
                     : complete_replayed_apart(engine, slot, thread, self, is_worker);
    }
    if ((flags & kUsesMutexes) != 0) unlock_mutexes(engine, slot, thread);
    if ((flags & kUsesHeap) != 0 && release_heap(engine.store, task, engine.store.args[slot])) wake_waiters(engine);
  }
  const uint32_t parent = task.parent;
  const TaskWordBits word = TaskWord::complete(task.word, generation_of(self) + 1);
  uint32_t next = kNone;
  if (TaskWord::first_waiter(word) != 0)
    next = wake_list(engine, TaskWord::first_waiter(word), next, thread, is_worker);
  if ((word & TaskWord::kWatched) != 0) [[unlikely]]
    tell_watchers(engine, self);
  if (parent != 0) child_ended(engine, parent - 1, thread);
  return next;
}

// Called after the kernel. The task may still wait for its children, or for the thread that ends it from outside.
uint32_t finish(Engine& engine, uint32_t slot, uint32_t thread, int status, bool is_worker) {
  Slot& task = engine.store.slots[slot];
  if (status == PTO_LATER) {
    if (engine.host != nullptr) return kNone;  // it may already run again, on another thread
    if (Ending::return_later(task.state)) return kNone;
    status = status_of(engine, slot);  // it was ended before its kernel returned
  }
  const bool has_children = !is_leaf(task) && task.kernel >= 0 && task.poison == 0 && task.children.load() != 0;
  if (has_children) {
    status_of(engine, slot) = status;
    task.state.store(SlotState::kChildren, std::memory_order_relaxed);
    if (!Countdown::leave(task.children)) return kNone;
    end_parent(engine, slot, thread);
    return kNone;
  }
  return complete_as<true>(engine, slot, thread, status, is_worker);
}

}  // namespace

uint32_t complete(Engine& engine, uint32_t slot, uint32_t thread, int status, bool is_worker) {
  return complete_as<false>(engine, slot, thread, status, is_worker);
}

// Runs a task, then successors that its completion made ready, one after the other. Returns the number of tasks run.
[[gnu::flatten]] uint32_t run(Engine& engine, uint32_t slot, uint32_t thread, bool is_worker) {
  const uint32_t streak = is_worker ? kWorkerStreak : kHelperStreak;
  const Busy busy(engine.thread_slot(thread));
  uint32_t n = 0;
  while (slot != kNone) {
    const int status = execute(engine, slot, thread);
    const uint32_t next = finish(engine, slot, thread, status, is_worker);
    if (++n >= streak && next != kNone) {
      push_ready(engine, next, thread);
      wake_worker(engine);
      break;
    }
    slot = next;
  }
  return n;
}

void run_alone(Engine& engine, uint32_t slot, uint32_t thread) {
  const Busy busy(engine.thread_slot(thread));
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    ready_ticks_of(engine, slot) = ticks();
  const int status = execute(engine, slot, thread);
  const uint32_t next = finish(engine, slot, thread, status, false);
  std::atomic<uint64_t>& helped = engine.thread_slot(thread).num_helped;
  helped.store(helped.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (next == kNone) return;
  push_ready(engine, next, thread);
  wake_worker(engine);
}

void complete_external(Engine& engine, pto_task name, int status) {
  const uint32_t slot = slot_of(name);
  if (is_complete(engine, name)) {
    throw_error(
        PTO_BAD_ARGUMENT,
        "[runtime.task_complete] a task must be ended only once, and its kernel must return PTO_LATER; got one ",
        "that has completed; check which thread ends it");
  }
  Slot& task = engine.store.slots[slot];
  const uint32_t thread = running.engine == &engine ? running.thread : current_thread(engine);
  SlotState state = SlotState::kRunning;
  const protocols::EndResult result = Ending::end(task.state, &state, [&] { status_of(engine, slot) = status; });
  if (result == protocols::EndResult::kKernelCompletes) return;
  if (result == protocols::EndResult::kRejected && state < SlotState::kRunning) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.task_complete] a task must be ended after its kernel has begun; got one that has not ",
                "started; let the kernel pass on its id");
  }
  if (result == protocols::EndResult::kRejected) {
    throw_error(
        PTO_BAD_ARGUMENT,
        "[runtime.task_complete] a task must be ended only once, and its kernel must return PTO_LATER; got one ",
        "that has been ended; check which thread ends it");
  }
  if (!is_leaf(task)) {  // its children may still run
    task.state.store(SlotState::kChildren, std::memory_order_relaxed);
    return child_ended(engine, slot, thread);
  }
  const Busy busy(engine.thread_slot(thread));
  const uint32_t next = complete(engine, slot, thread, status, false);
  if (next != kNone) {
    push_ready(engine, next, thread);
    wake_worker(engine);
  }
}

}  // namespace tilewise::tasks
