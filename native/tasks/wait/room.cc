// See room.h.
#include "tasks/wait/room.h"

#include <algorithm>
#include <mutex>
#include <sstream>

#include "tasks/engine/task_parts.h"
#include "tasks/run/ready.h"
#include "tasks/sched/float_modes.h"

namespace tilewise::tasks {

namespace {

void note_stall(Engine& engine, uint32_t thread, Resource cause, int64_t begin_ns) {
  ThreadSlot& me = engine.thread_slot(thread);
  const int64_t end_ns = now_ns();
  me.stall_ns.store(me.stall_ns.load(std::memory_order_relaxed) + static_cast<uint64_t>(end_ns - begin_ns),
                    std::memory_order_relaxed);
  me.num_stalls.store(me.num_stalls.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (cause == Resource::kWindow) me.window_high.store(engine.store.header->window, std::memory_order_relaxed);
  if (Trace* trace = engine.active_trace.load(std::memory_order_relaxed)) {
    trace->stall(thread, static_cast<int32_t>(cause), begin_ns, end_ns, num_submitted(engine) - num_completed(engine),
                 engine.store.header->heap_use.used.load(std::memory_order_relaxed) * kSegmentBytes);
  }
}

bool has_room(const Engine& engine, uint32_t thread, Resource resource, uint64_t size) {
  const Header& header = *engine.store.header;
  switch (resource) {
    case Resource::kWindow: {
      const uint32_t base = thread * header.window;
      for (uint32_t s = base; s < base + header.window; ++s) {
        if (!TaskWord::is_live(TaskWord::look(engine.store.slots[s].word))) return true;
      }
      return false;
    }
    case Resource::kHeap:
      return has_run(engine.store, size);
    case Resource::kHandles: {
      std::lock_guard guard(engine.store.header->pools.lock);
      return header.pools.free_handles != 0 ||
             header.pools.fresh_handles.load(std::memory_order_relaxed) < header.max_handles;
    }
    default:
      return false;
  }
}

/// Whether the task's kernel itself waits for room, as its thread's slot says.
bool is_blocked_parent(const Engine& engine, uint32_t slot) {
  for (uint32_t s = 0; s < engine.store.threads_in_use(); ++s) {
    const ThreadSlot& thread_slot = engine.store.thread_slots[s];
    if (thread_slot.blocked.load(std::memory_order_seq_cst) != 0 &&
        engine.store.args[slot].runner.load(std::memory_order_relaxed) == s + 1) {
      return true;
    }
  }
  return false;
}

/// Whether no thread will run any of the ready tasks. That is so if every worker waits for room and has reached the
/// depth limit of help_without_room(), and all ready tasks may submit and stand in queues. A ready task outside the
/// queues has been taken by a thread, which will run it or give it back.
bool stay_ready(const Engine& engine, uint32_t num_ready) {
  const Header& header = *engine.store.header;
  const uint32_t num_runners = header.num_workers == 0 ? engine.store.threads_in_use() : header.num_workers;
  for (uint32_t s = 0; s < num_runners; ++s) {
    const ThreadSlot& runner = engine.store.thread_slots[s];
    if (runner.blocked.load(std::memory_order_seq_cst) == 0) return false;
    if (runner.num_open_scopes.load(std::memory_order_acquire) < kMaxHelpDepth) return false;
  }
  uint32_t num_parents = 0;
  for (uint32_t q = 0; q < kNumSharedQueues * header.num_classes + header.num_workers; ++q) {
    for_each(engine.store.queues[q], engine.store.base,
             [&](uint32_t slot) { num_parents += is_leaf(engine.store.slots[slot]) ? 0 : 1; });
  }
  return num_parents == num_ready;
}

// Whether no task runs or can run, none waits for the outside, and no other thread has an open scope.
bool is_stuck(const Engine& engine, uint32_t thread, Resource resource) {
  const Header& header = *engine.store.header;
  const uint32_t num_thread_slots = engine.store.threads_in_use();
  // Checked first: between the end of a task and the start of its successor no slot shows either, but a thread is busy.
  for (uint32_t s = 0; s < num_thread_slots; ++s) {
    const ThreadSlot& other = engine.store.thread_slots[s];
    const uint32_t blocked = other.blocked.load(std::memory_order_seq_cst);
    if (other.is_busy.load(std::memory_order_acquire) != 0 && blocked == 0) return false;
    // It may have got room since its last check.
    if (s != thread && blocked != 0 &&
        has_room(engine, s, static_cast<Resource>(blocked - 1), other.blocked_size.load(std::memory_order_relaxed))) {
      return false;
    }
  }
  if (engine.replays->has_live_replays()) return false;
  uint32_t num_ready = 0;
  for (uint32_t s = 0; s < num_thread_slots; ++s) {
    const ThreadSlot& other = engine.store.thread_slots[s];
    const bool may_free = resource != Resource::kWindow && other.is_taken.load(std::memory_order_acquire) != 0 &&
                          other.num_open_scopes.load(std::memory_order_acquire) > 0;
    if (s != thread && may_free && other.blocked.load(std::memory_order_seq_cst) == 0) return false;
    for (uint32_t slot = s * header.window; slot < (s + 1) * header.window; ++slot) {
      const Slot& task = engine.store.slots[slot];
      if (!TaskWord::is_live(TaskWord::look(task.word))) continue;
      const SlotState state = task.state.load(std::memory_order_acquire);
      if (state == SlotState::kPending || state == SlotState::kChildren) continue;
      if (state == SlotState::kFilling && (s == thread || other.blocked.load(std::memory_order_seq_cst) != 0)) {
        continue;
      }
      if (state == SlotState::kRunning && is_blocked_parent(engine, slot)) continue;
      if (state != SlotState::kReady) return false;
      ++num_ready;
    }
  }
  return num_ready == 0 || stay_ready(engine, num_ready);
}

// A submitter without a slot helps until an eighth of the window is done, so that it need not wait again for each task.
// Tasks end roughly in the order in which they began, so the next slot is tried before all others.
uint32_t take_slot_slowly(Engine& engine, uint32_t thread) {
  ThreadSlot& me = engine.thread_slot(thread);
  const uint32_t window = engine.store.header->window;
  const uint32_t base = thread * window;
  const int64_t begin = now_ns();
  {
    Blocking let_others_run;  // the task that it runs may take long
    const DefaultFloatModes modes;
    for (uint32_t n = 0; n < std::max(window / 8, 1u) && help(engine, thread); n += 1) {
    }
  }
  note_stall(engine, thread, Resource::kWindow, begin);
  for (uint32_t step = 0; step < 8; ++step) {
    const uint32_t at = static_cast<uint32_t>(me.cursor + step) & (window - 1);
    const TaskWordBits word = TaskWord::look(engine.store.slots[base + at].word);
    if (TaskWord::is_live(word)) continue;
    me.cursor += step;
    return find_free_slot(engine, thread);
  }
  uint32_t slot = find_free_slot(engine, thread);
  while (slot == kNone) {
    wait_for_room(engine, thread, Resource::kWindow, window);
    slot = find_free_slot(engine, thread);
  }
  return slot;
}

}  // namespace

uint64_t allocate_heap_slowly(Engine& engine, uint32_t thread, uint64_t bytes) {
  ThreadSlot& me = engine.thread_slot(thread);
  Scope& scope = me.scopes[me.depth];
  uint64_t address = heap_in_new_run(engine.store, scope, thread, bytes);
  while (address == 0) {
    wait_for_room(engine, thread, Resource::kHeap, bytes);
    address = heap_in_new_run(engine.store, scope, thread, bytes);
  }
  return address;
}

// Usually takes a handle from the thread's own stock.
uint32_t take_handle(Engine& engine, uint32_t thread) {
  uint32_t index = try_take_handle(engine, thread);
  while (index == kNone) {
    wait_for_room(engine, thread, Resource::kHandles, 1);
    index = try_take_handle(engine, thread);
  }
  return index;
}

uint32_t find_free_slot(Engine& engine, uint32_t thread) {
  ThreadSlot& me = engine.thread_slot(thread);
  const uint32_t base = thread * engine.store.header->window;
  const uint32_t mask = engine.store.header->window - 1;
  for (uint32_t step = 0; step <= mask; ++step) {
    const uint32_t at = static_cast<uint32_t>(me.cursor + step) & mask;
    Slot& task = engine.store.slots[base + at];
    const TaskWordBits word = TaskWord::look(task.word);
    if (TaskWord::is_live(word)) continue;
    me.cursor += step + 1;
    task.state.store(SlotState::kFilling, std::memory_order_relaxed);
    TaskWord::begin(task.word, word);
    return base + at;
  }
  return kNone;
}

// Skips slots of long-running tasks. Regularly counts live tasks for the window's high-water mark; replays have
// separate slots.
uint32_t take_slot_carefully(Engine& engine, uint32_t thread) {
  ThreadSlot& me = engine.thread_slot(thread);
  if ((me.cursor & kCursorsPerLook) == 0 && !engine.replays->has_instantiated.load(std::memory_order_relaxed)) {
    const uint64_t live =
        std::min<uint64_t>(num_submitted(engine) - num_completed(engine), engine.store.header->window);
    if (live > me.window_high.load(std::memory_order_relaxed)) me.window_high.store(live, std::memory_order_relaxed);
  }
  const uint32_t base = thread * engine.store.header->window;
  const uint32_t mask = engine.store.header->window - 1;
  for (uint32_t tries = 0; tries < 8; ++tries) {
    const uint32_t slot = base + (static_cast<uint32_t>(me.cursor++) & mask);
    Slot& task = engine.store.slots[slot];
    const TaskWordBits word = TaskWord::look(task.word);
    if (TaskWord::is_live(word)) continue;
    task.state.store(SlotState::kFilling, std::memory_order_relaxed);
    TaskWord::begin(task.word, word);
    return slot;
  }
  return take_slot_slowly(engine, thread);
}

void raise_deadlock(Engine& engine, uint32_t thread, Resource resource, uint64_t size) {
  const Header& header = *engine.store.header;
  uint32_t oldest = kNone;
  for (uint32_t s = thread * header.window; s < (thread + 1) * header.window; ++s) {
    const Slot& task = engine.store.slots[s];
    if (!TaskWord::is_live(TaskWord::look(task.word)) || task.state.load() == SlotState::kFilling) continue;
    if (oldest == kNone || task.sequence.load() < engine.store.slots[oldest].sequence.load()) oldest = s;
  }
  std::ostringstream who;
  if (oldest == kNone) {
    who << "no task can free any";
  } else {
    const Slot& task = engine.store.slots[oldest];
    who << "the oldest task, number " << task.sequence.load() << " ("
        << (task.kernel >= 0 ? engine.kernels.name_of(task.kernel) : "empty") << "), waits for this submitter";
  }
  const uint32_t depth = engine.store.thread_slots[thread].depth;
  const auto fail = [&](const char* rule, const char* unit, uint64_t total, const auto&... advice) {
    throw_error(PTO_DEADLOCK, "[runtime.submit] ", rule, "; got a request for ", size, " ", unit,
                " without room among ", total, ", and ", who.str(), "; ", advice...);
  };
  switch (resource) {
    case Resource::kWindow:
      return fail("the window must have a free slot for each task", "slots", header.window, "increase window");
    case Resource::kHeap:
      return fail("outputs of tasks must fit the heap", "bytes", uint64_t{header.num_segments} * kSegmentBytes,
                  "end scopes earlier, since outputs live as long as theirs (this thread has ", depth,
                  " open), or increase heap_bytes");
    case Resource::kHandles: {
      uint64_t num_outputs = 0;
      for (uint32_t h = 0; h < header.max_handles; ++h) {
        num_outputs += (engine.store.handles[h].flags & kOwnedByHeap) != 0 ? 1 : 0;
      }
      return fail("buffers must fit the table of handles", "handles", header.max_handles, "unregister buffers (",
                  header.max_handles - num_outputs, " are registered), end scopes earlier (", num_outputs,
                  " are outputs of tasks, and this thread has ", depth, " open scopes), or increase max_handles");
    }
    case Resource::kRegions:
      return fail("boxes of buffers must fit their table", "boxes", header.max_regions,
                  "wait for tasks before more are submitted, or increase max_regions");
  }
}

bool wait_for_room(Engine& engine, uint32_t thread, Resource resource, uint64_t size) {
  ThreadSlot& me = engine.thread_slot(thread);
  Header& header = *engine.store.header;
  Blocking let_others_run;
  const DefaultFloatModes modes;
  const int64_t begin = now_ns();
  const uint32_t seen = header.waiting.look();
  check_open(engine);
  check_interrupted(&me.interruption_checked_ns);
  expire_overdue(engine, thread);
  if (help_without_room(engine, thread)) {
    note_stall(engine, thread, resource, begin);
    return false;
  }
  me.blocked_size.store(size, std::memory_order_relaxed);
  me.blocked.store(1 + static_cast<uint32_t>(resource), std::memory_order_seq_cst);
  struct Unblock {
    ThreadSlot& thread_slot;
    ~Unblock() { thread_slot.blocked.store(0, std::memory_order_seq_cst); }
  } unblock{me};
  // Checked twice, with unchanged counters between: a real deadlock persists, an inconsistent snapshot does not.
  const uint64_t before = num_completed(engine);
  if (is_stuck(engine, thread, resource) && is_stuck(engine, thread, resource) && before == num_completed(engine)) {
    if (resource == Resource::kRegions) return true;
    if (!has_room(engine, thread, resource, size)) raise_deadlock(engine, thread, resource, size);
  }
  if (now_ns() - begin < 1'000'000 && me.stall_rounds++ < 1000) {
    sched_yield();
  } else {
    const auto stays_awake = [&] {
      for (uint32_t s = 0; s < engine.store.threads_in_use(); ++s) watch_submitter(engine, s);
      return has_room(engine, thread, resource, size) || has_work(engine, thread);
    };
    const bool is_shared = header.is_shared != 0;
    if (!header.waiting.sleep(seen, engine.fences, is_shared, stays_awake, [] { return kSliceNs; })) sched_yield();
    me.stall_rounds = 0;
  }
  check_peer(engine);
  note_stall(engine, thread, resource, begin);
  return false;
}

}  // namespace tilewise::tasks
