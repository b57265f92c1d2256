// See wait.h.
#include "tasks/wait/wait.h"

#include <algorithm>

#include "tasks/engine/task_parts.h"
#include "tasks/run/run.h"

namespace tilewise::tasks {

namespace {

/// The status of a wait for a task that has ended. PTO_TIMEOUT would mean that the wait has timed out, so a task with
/// that status counts as failed.
int waited(int status) { return status == PTO_TIMEOUT ? PTO_TASK_FAILED : status; }

/// Whether a task is a child of another, or a child of such a child. ancestor: its slot + 1.
bool is_inside(const Engine& engine, uint32_t slot, uint32_t ancestor) {
  uint32_t outer = engine.store.slots[slot].parent;
  while (outer != 0 && outer != ancestor) outer = engine.store.slots[outer - 1].parent;
  return outer == ancestor;
}

// A task must not wait for itself or for a task that it stands inside. Nor must it wait for a task lower on its
// thread's stack, which runs it because that task had no room to submit. None of these waits could end.
void check_not_inside(const Engine& engine, pto_task task) {
  if (is_complete(engine, task)) return;
  const uint32_t slot = slot_of(task);
  const bool stands_below = engine.store.args[slot].runner.load(std::memory_order_relaxed) == running.thread + 1;
  if (!stands_below && !is_inside(engine, running.slot, slot + 1)) return;
  throw_error(PTO_DEADLOCK,
              "[runtime.wait] a task must not wait for itself or for a task that it is a child of; got such a wait; ",
              "wait from outside");
}

/// Runs a task on this thread. On a submitter's thread it counts as help.
void run_own(Engine& engine, uint32_t slot, uint32_t thread) {
  const uint32_t count = run(engine, slot, thread, true);
  if (thread < engine.store.header->num_workers) return;
  std::atomic<uint64_t>& helped = engine.thread_slot(thread).num_helped;
  helped.store(helped.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
}

/// Takes the task with the highest rank above 0, from the tasks that only this worker may run, then from the shared
/// queues.
template <class Rank>
uint32_t take_best_queued(Engine& engine, uint32_t thread, Rank&& rank) {
  Header& header = *engine.store.header;
  const auto take_from = [&](uint32_t queue) { return take_best(engine.store.queues[queue], engine.store.base, rank); };
  if (thread < header.num_workers) {
    const uint32_t slot = take_from(kNumSharedQueues * header.num_classes + thread);
    if (slot != kNone) return slot;
  }
  for (const SharedQueue which : {kUrgent, kOverflow, kBackground}) {
    for (uint32_t c = 0; c < header.num_classes; ++c) {
      if ((engine.thread_slot(thread).classes >> c & 1) == 0) continue;
      const uint32_t slot = take_from(which * header.num_classes + c);
      if (slot == kNone) continue;
      count_of(header, which).fetch_sub(1, std::memory_order_relaxed);
      return slot;
    }
  }
  return kNone;
}

// A waiting task must be able to run what it waits for itself, or workers that all wait would wait for ever. That
// includes tasks that its children have submitted, since the children's kernels may have returned. So it runs leaves
// and the tasks inside it. Other tasks that may submit are left alone: each could wait in turn, and add to this stack.
bool help_own_context(Engine& engine, uint32_t thread) {
  const uint32_t num_classes = engine.store.header->num_classes;
  const uint32_t classes = engine.thread_slot(thread).classes;
  const auto is_welcome = [&](uint32_t slot) {
    return is_leaf(engine.store.slots[slot]) || is_inside(engine, slot, running.parent);
  };
  uint32_t slot = kNone;
  for (uint32_t c = 0; c < num_classes && slot == kNone; ++c) {
    if ((classes >> c & 1) != 0) slot = engine.store.rings[thread * num_classes + c].take_one();
  }
  if (slot == kNone) slot = take_best_queued(engine, thread, [&](uint32_t s) { return is_welcome(s) ? 1u : 0u; });
  if (slot == kNone) slot = steal(engine, thread, classes);
  if (slot == kNone) return false;
  if (is_welcome(slot)) {
    run_own(engine, slot, thread);
  } else {
    pass_on(engine, slot);
  }
  return true;
}

}  // namespace

void check_open(const Engine& engine) {
  check_process(engine);
  if (engine.peer.is_lost.load(std::memory_order_relaxed)) {
    throw_error(PTO_PEER_LOST, "[runtime] the workers' process must be alive; got its end (process ",
                engine.store.header->processes.workers.load(), "); close this runtime and start again");
  }
}

// Calls the host's hook, if any, at most every 50 ms or after a kernel was interrupted.
void check_interrupted(int64_t* last_ns) {
  if (hooks.interrupted == nullptr || (!checks_at_once && now_ns() - *last_ns < kSliceNs)) return;
  checks_at_once = false;
  *last_ns = now_ns();
  if (hooks.interrupted() != 0) {
    throw_error(PTO_INTERRUPTED,
                "[runtime.wait] the wait was interrupted by its host; tasks continue; cancel them, or wait again");
  }
}

bool watch(Engine& engine, TaskRef task) {
  Slot& slot = engine.store.slots[slot_of(task)];
  return TaskWord::watch(slot.word, generation_of(task));
}

void watch_submitter(Engine& engine, uint32_t thread) {
  const uint32_t base = thread * engine.store.header->window;
  for (uint32_t s = base; s < base + engine.store.header->window; ++s) {
    const TaskWordBits word = TaskWord::look(engine.store.slots[s].word);
    if (TaskWord::is_live(word)) watch(engine, make_ref(TaskWord::generation_in(word), s));
  }
}

bool help(Engine& engine, uint32_t thread) {
  if (engine.peer.is_worker_side || engine.store.header->is_shared != 0) return false;
  if (running.engine == &engine) return help_own_context(engine, thread);
  const uint32_t slot = take(engine, thread, engine.store.header->num_workers == 0);
  if (slot == kNone) return false;
  ThreadSlot& me = engine.thread_slot(thread);
  const uint32_t count = run(engine, slot, thread, engine.store.header->num_workers == 0);
  me.num_helped.store(me.num_helped.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  return true;
}

// Runs the deepest task, which is the least likely to submit more.
bool help_without_room(Engine& engine, uint32_t thread) {
  if (help(engine, thread)) return true;
  if (running.engine != &engine || engine.thread_slot(thread).depth >= kMaxHelpDepth) return false;
  const auto depth_of = [&](uint32_t slot) {
    uint32_t depth = 1;
    for (uint32_t s = slot + 1; engine.store.slots[s - 1].parent != 0; s = engine.store.slots[s - 1].parent) ++depth;
    return depth;
  };
  const uint32_t slot = take_best_queued(engine, thread, depth_of);
  if (slot == kNone) return false;
  run_own(engine, slot, thread);
  return true;
}

int wait(Engine& engine, pto_task task, double timeout_s, bool helps) {
  if (running.engine == &engine) check_not_inside(engine, task);
  const bool done =
      wait_until(engine, [&] { return is_complete(engine, task); }, [&] { watch(engine, task); }, timeout_s, helps);
  return done ? waited(task_status(engine, task)) : PTO_TIMEOUT;
}

int wait_any(Engine& engine, const pto_task* tasks, uint32_t num_tasks, double timeout_s, uint32_t* first, bool helps) {
  if (num_tasks == 0)
    throw_error(PTO_BAD_ARGUMENT, "[runtime.wait_any] the list of tasks must not be empty; got no task; add one");
  uint32_t index = num_tasks;
  const auto done = [&] {
    for (index = 0; index < num_tasks; ++index) {
      if (is_complete(engine, tasks[index])) return true;
    }
    return false;
  };
  const auto watch_all = [&] {
    for (uint32_t t = 0; t < num_tasks; ++t) watch(engine, tasks[t]);
  };
  if (!wait_until(engine, done, watch_all, timeout_s, helps)) return PTO_TIMEOUT;
  if (first != nullptr) *first = index;
  return waited(task_status(engine, tasks[index]));
}

int wait_all(Engine& engine, double timeout_s, bool helps) {
  const uint32_t thread = current_thread(engine);
  ThreadSlot& me = engine.thread_slot(thread);
  bool done = false;
  uint32_t error = 0;
  if (running.engine == &engine) {
    Slot& parent = engine.store.slots[running.parent - 1];
    done = wait_until(
        engine, [&] { return Countdown::is_one_left(parent.children); },
        [&] {
          for (uint32_t s = 0; s < engine.store.threads_in_use(); ++s) watch_submitter(engine, s);
        },
        timeout_s, helps);
    if (done) error = parent.child_error.exchange(0, std::memory_order_acq_rel);
  } else {
    const uint32_t base = thread * engine.store.header->window;
    const uint32_t window = engine.store.header->window;
    const uint64_t end = me.cursor;
    uint64_t at = std::max(me.waited, end - std::min<uint64_t>(end, window));
    done = wait_until(
        engine,
        [&] {
          for (; at < end; ++at) {
            if (TaskWord::is_live(TaskWord::look(engine.store.slots[base + (at & (window - 1))].word))) return false;
          }
          return !engine.replays->has_replays(thread);
        },
        [&] {
          watch_submitter(engine, thread);
          engine.replays->watch_replays(thread);
        },
        timeout_s, helps);
    if (done) {
      me.waited = end;
      error = me.first_error.exchange(0, std::memory_order_acq_rel);
    }
  }
  if (!done) return PTO_TIMEOUT;
  if (error == 0) return PTO_OK;
  throw_error(waited(error_status(engine, error)), error_text(engine, error));
}

void notify(Engine& engine, pto_task task, void (*callback)(void*), void* context) {
  if (engine.store.header->is_shared != 0) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.notify] a callback needs workers in this process; got a shared file; use pto_wait");
  }
  is_complete(engine, task);  // checks the id
  engine.callbacks.add(task, callback, context);
  if (is_complete(engine, task) || !watch(engine, task)) engine.callbacks.run(task);
}

}  // namespace tilewise::tasks
