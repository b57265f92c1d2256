// See wait.h.
#include "tasks/wait/wait.h"

#include <algorithm>

#include "tasks/engine/task_parts.h"
#include "tasks/run/run.h"

namespace tilewise::tasks {

namespace {

/// PTO_TIMEOUT is what a wait itself says when it is over too early: a task that has ended with it has failed.
int waited(int status) { return status == PTO_TIMEOUT ? PTO_TASK_FAILED : status; }

// A task that waits for itself, or for one whose child it is, would wait for ever.
void check_not_inside(const Engine& engine, pto_task task) {
  uint32_t outer = running.engine == &engine ? running.parent : 0;
  for (; outer != 0; outer = engine.store.slots[outer - 1].parent) {
    if (engine.store.name_at(outer - 1) != task) continue;
    throw_error(PTO_DEADLOCK,
                "[runtime.wait] a task must not wait for itself or for a task that it is a child of; got such a wait; ",
                "wait from outside");
  }
}

/// On a submitter's thread (there are no workers, or it helped into the task that waits) this is help too.
void run_own(Engine& engine, uint32_t slot, uint32_t thread) {
  const uint32_t count = run(engine, slot, thread, true);
  if (thread < engine.store.header->num_workers) return;
  std::atomic<uint64_t>& helped = engine.thread_slot(thread).num_helped;
  helped.store(helped.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
}

// A task that waits must be able to run its own children itself, or workers that all wait would wait for ever.
bool help_own_context(Engine& engine, uint32_t thread) {
  Header& header = *engine.store.header;
  const uint32_t classes = engine.thread_slot(thread).classes;
  // Leaves, and children of the task that waits: others' parents would pile up on this thread's stack.
  const auto is_welcome = [&](uint32_t slot) {
    const Slot& task = engine.store.slots[slot];
    return (task.flags & kIsParent) == 0 || task.parent == running.parent;
  };
  if (thread < header.num_workers) {  // children that only this worker may run
    const uint32_t slot =
        take_any(engine.store.queues[kNumSharedQueues * header.num_classes + thread], engine.store.base, is_welcome);
    if (slot != kNone) {
      run_own(engine, slot, thread);
      return true;
    }
  }
  for (uint32_t c = 0; c < header.num_classes; ++c) {
    if ((classes >> c & 1) == 0) continue;
    uint32_t slot = engine.store.rings[thread * header.num_classes + c].take_one();
    if (slot != kNone && !is_welcome(slot)) {
      const Slot& task = engine.store.slots[slot];
      push(engine.store.queues[kOverflow * header.num_classes + c], engine.store.base,
           {task.priority, sequence_of(engine, slot), slot});
      header.num_overflow.fetch_add(1, std::memory_order_release);
      wake_worker(engine);
      return true;
    }
    for (const SharedQueue which : {kUrgent, kOverflow, kBackground}) {
      if (slot != kNone) break;
      slot = take_any(engine.store.queues[which * header.num_classes + c], engine.store.base, is_welcome);
      if (slot == kNone) continue;
      std::atomic<uint32_t>& count = which == kUrgent     ? header.num_urgent
                                     : which == kOverflow ? header.num_overflow
                                                          : header.num_background;
      count.fetch_sub(1, std::memory_order_relaxed);
    }
    if (slot == kNone) continue;
    run_own(engine, slot, thread);
    return true;
  }
  const uint32_t stolen = steal(engine, thread, classes);
  if (stolen == kNone) return false;
  if (is_welcome(stolen)) {
    run_own(engine, stolen, thread);
  } else {
    const Slot& task = engine.store.slots[stolen];
    push(engine.store.queues[kOverflow * header.num_classes + task.type_class], engine.store.base,
         {task.priority, sequence_of(engine, stolen), stolen});
    header.num_overflow.fetch_add(1, std::memory_order_release);
    wake_worker(engine);  // a worker that looked between the two queues saw neither
  }
  return true;
}

}  // namespace

void check_open(const Engine& engine) {
  check_process(engine);
  if (engine.peer.is_lost.load(std::memory_order_relaxed)) {
    throw_error(PTO_PEER_LOST, "[runtime] the workers' process must live; got its death (process ",
                engine.store.header->processes.workers.load(), "); close this runtime and start again");
  }
}

// Asked at most every 50 ms, or when a kernel has been interrupted, and only of a host that wants to be asked.
void check_interrupted(int64_t* last_ns) {
  if (hooks.interrupted == nullptr || (!asks_at_once && now_ns() - *last_ns < kSliceNs)) return;
  asks_at_once = false;
  *last_ns = now_ns();
  if (hooks.interrupted() != 0) {
    throw_error(PTO_INTERRUPTED,
                "[runtime.wait] the wait was interrupted by its host; tasks go on; cancel them, or wait again");
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

int wait(Engine& engine, pto_task task, double timeout_s, bool helps) {
  if (running.engine == &engine) check_not_inside(engine, task);
  const bool done =
      wait_until(engine, [&] { return is_complete(engine, task); }, [&] { watch(engine, task); }, timeout_s, helps);
  return done ? waited(task_status(engine, task)) : PTO_TIMEOUT;
}

int wait_any(Engine& engine, const pto_task* tasks, uint32_t num_tasks, double timeout_s, uint32_t* first, bool helps) {
  if (num_tasks == 0)
    throw_error(PTO_BAD_ARGUMENT, "[runtime.wait_any] there must be a task to wait for; got none; add one");
  uint32_t found = num_tasks;
  const auto done = [&] {
    for (found = 0; found < num_tasks; ++found) {
      if (is_complete(engine, tasks[found])) return true;
    }
    return false;
  };
  const auto watch_all = [&] {
    for (uint32_t t = 0; t < num_tasks; ++t) watch(engine, tasks[t]);
  };
  if (!wait_until(engine, done, watch_all, timeout_s, helps)) return PTO_TIMEOUT;
  if (first != nullptr) *first = found;
  return waited(task_status(engine, tasks[found]));
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
  is_complete(engine, task);  // checks the name
  engine.callbacks.add(task, callback, context);
  if (is_complete(engine, task) || !watch(engine, task)) engine.callbacks.run(task);
}

}  // namespace tilewise::tasks
