// See events.h.
#include "tasks/run/events.h"

#include <algorithm>
#include <mutex>

#include "tasks/engine/failures.h"
#include "tasks/engine/task_parts.h"
#include "tasks/engine/thread_slots.h"
#include "tasks/run/link.h"

namespace tilewise::tasks {

namespace {

/// Lowers the limit on workers' sleep to this deadline.
void expect_deadline(Engine& engine, int64_t deadline_ns) {
  Header& header = *engine.store.header;
  int64_t earliest = header.next_deadline_ns.load(std::memory_order_acquire);
  do {
    if (earliest != 0 && earliest <= deadline_ns) return;
  } while (!header.next_deadline_ns.compare_exchange_weak(earliest, deadline_ns, std::memory_order_acq_rel));
  header.parked.wake(1, header.is_shared != 0);
}

// Adds to the event (possibly 0) and wakes the tasks whose value it has reached, that were cancelled or that are past
// their deadlines. Returns the earliest deadline of the others; INT64_MAX: none.
int64_t wake_event(Engine& engine, uint32_t index, uint64_t add, uint32_t thread) {
  int64_t soonest = INT64_MAX;
  const Busy busy(engine.thread_slot(thread));
  auto& counter = engine.store.events[index].counter;
  const auto next = [&](uint32_t waiter) -> uint32_t& { return engine.store.slots[waiter - 1].next_waiter; };
  const auto is_free = [&](uint32_t waiter, uint64_t value) {
    const uint32_t slot = waiter - 1;
    if (engine.store.args[slot].awaited <= value || is_cancelled(engine, slot) || is_overdue(engine, slot)) return true;
    if ((engine.store.slots[slot].flags & kHasDeadline) != 0) {
      soonest = std::min(soonest, engine.store.notes[slot].deadline_ns);
    }
    return false;
  };
  const auto rise = [&](uint64_t before) { return before + std::min(add, UINT64_MAX - before); };  // saturates
  counter.wake_all(counter.post(rise, is_free, next), next, [&](uint32_t waiter) {
    if (advance(engine, waiter - 1, thread)) make_ready(engine, waiter - 1, thread);
  });
  return soonest;
}

// A cancelled task stops waiting for events: the thread that should post may have ended. A task checks its cancellation
// in the event's critical section, so it is either found in the list or never waits.
void wake_cancelled(Engine& engine) {
  const uint32_t thread = running.engine == &engine ? running.thread : current_thread(engine);
  for (uint32_t e = 0; e < engine.store.header->max_events; ++e) {
    if (engine.store.events[e].used.load(std::memory_order_acquire) != 0) wake_event(engine, e, 0, thread);
  }
  wake_waiters(engine);
}

}  // namespace

pto_event open_event(Engine& engine) {
  for (uint32_t e = 0; e < engine.store.header->max_events; ++e) {
    uint32_t unused = 0;
    if (engine.store.events[e].used.compare_exchange_strong(unused, 1)) return uint64_t{1} << 32 | e;
  }
  throw_error(PTO_NO_MEMORY, "[runtime.event_open] a runtime must have at most ", engine.store.header->max_events,
              " events; got one more; ", "increase max_events: an event counts up and serves any number of tasks");
}

uint64_t event_value(Engine& engine, pto_event name) {
  const uint64_t index = name & 0xFFFFFFFF;
  if (name >> 32 != 1 || index >= engine.store.header->max_events || engine.store.events[index].used.load() == 0) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.event] an event must have been opened; got ", name,
                "; call pto_event_open");
  }
  return engine.store.events[index].counter.load();
}

bool wait_for_event(Engine& engine, uint32_t slot, uint32_t index, uint64_t value) {
  const auto is_free = [&](uint64_t reached) {
    return reached >= value || is_cancelled(engine, slot) || is_overdue(engine, slot);
  };
  return engine.store.events[index].counter.wait(slot + 1, is_free, [&](uint32_t first) {
    Slot& task = engine.store.slots[slot];
    engine.store.args[slot].awaited = value;
    task.next_waiter = first;
    task.state.store(SlotState::kWaitsForEvent, std::memory_order_relaxed);
    if ((task.flags & kHasDeadline) != 0) expect_deadline(engine, engine.store.notes[slot].deadline_ns);
  });
}

void post_event(Engine& engine, pto_event name, uint64_t add) {
  event_value(engine, name);  // checks the name
  wake_event(engine, static_cast<uint32_t>(name & 0xFFFFFFFF), add,
             running.engine == &engine ? running.thread : current_thread(engine));
  wake_waiters(engine);
}

bool is_cancelled(const Engine& engine, uint32_t slot) {
  if (engine.store.header->num_cancels.load(std::memory_order_relaxed) == 0) return false;
  const Slot& task = engine.store.slots[slot];
  const auto generation = static_cast<uint32_t>(TaskWord::generation(task.word));
  const uint64_t below =
      engine.store.thread_slots[submitter_of(engine, slot)].cancel_below.load(std::memory_order_relaxed);
  return task.cancelled.load(std::memory_order_relaxed) == generation || sequence_of(engine, slot) <= below;
}

bool is_overdue(const Engine& engine, uint32_t slot) {
  return (engine.store.slots[slot].flags & kHasDeadline) != 0 && now_ns() >= engine.store.notes[slot].deadline_ns;
}

bool should_stop(const Engine& engine, uint32_t slot) {
  for (uint32_t at = slot + 1; at != 0; at = engine.store.slots[at - 1].parent) {
    if (is_cancelled(engine, at - 1) || is_overdue(engine, at - 1)) return true;
  }
  return engine.peer.is_lost.load(std::memory_order_relaxed);
}

// A task that starts at the same moment may still run; its status then says which.
void cancel(Engine& engine, pto_task task) {
  if (is_complete(engine, task)) return;
  engine.store.header->num_cancels.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = engine.store.slots[slot_of(task)];
  slot.cancelled.store(static_cast<uint32_t>(generation_of(task)), std::memory_order_release);
  wake_cancelled(engine);
}

void cancel_all(Engine& engine) {
  Header& header = *engine.store.header;
  header.num_cancels.fetch_add(1, std::memory_order_relaxed);
  const uint64_t newest = header.sequence.load(std::memory_order_acquire);
  for (uint32_t s = 0; s < engine.store.threads_in_use(); ++s)
    engine.store.thread_slots[s].cancel_below.store(newest, std::memory_order_release);
  wake_cancelled(engine);
}

void expire_overdue(Engine& engine, uint32_t thread) {
  Header& header = *engine.store.header;
  int64_t next = header.next_deadline_ns.load(std::memory_order_acquire);
  if (next == 0 || now_ns() < next) return;
  if (!header.next_deadline_ns.compare_exchange_strong(next, 0, std::memory_order_acq_rel)) return;
  int64_t soonest = INT64_MAX;
  for (uint32_t e = 0; e < header.max_events; ++e) {
    if (engine.store.events[e].used.load(std::memory_order_acquire) == 0) continue;
    soonest = std::min(soonest, wake_event(engine, e, 0, thread));
  }
  if (soonest != INT64_MAX) expect_deadline(engine, soonest);
  wake_waiters(engine);
}

}  // namespace tilewise::tasks
