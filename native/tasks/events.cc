// External events: counters that rise, and the tasks that wait for a value of one.
#include <algorithm>
#include <mutex>

#include "tasks/hot.h"

namespace tilewise::tasks {

pto_event Engine::open_event() {
  for (uint32_t e = 0; e < region_.header->max_events; ++e) {
    uint32_t unused = 0;
    if (region_.events[e].used.compare_exchange_strong(unused, 1)) return uint64_t{1} << 32 | e;
  }
  raise(PTO_NO_MEMORY, "[runtime.event_open] a runtime has at most ", region_.header->max_events,
        " events; got one more; ", "raise max_events: an event counts up and serves any number of tasks");
}

uint64_t Engine::event_value(pto_event name) {
  const uint64_t index = name & 0xFFFFFFFF;
  if (name >> 32 != 1 || index >= region_.header->max_events || region_.events[index].used.load() == 0) {
    raise(PTO_BAD_ARGUMENT, "[runtime.event] an event must have been opened; got ", name, "; call pto_event_open");
  }
  return region_.events[index].value.load(std::memory_order_acquire);
}

// Compared and registered in one critical section of the event, raised in another: no wake-up is lost.
bool Engine::wait_for_event(uint32_t slot, uint32_t index, uint64_t value) {
  Event& event = region_.events[index];
  std::lock_guard guard(event.lock);
  if (event.value.load(std::memory_order_relaxed) >= value || is_cancelled(slot) || is_overdue(slot)) return true;
  Slot& task = region_.slots[slot];
  region_.args[slot].awaited = value;
  task.next_waiter = event.waiters;
  task.state.store(SlotState::kWaitsForEvent, std::memory_order_relaxed);
  event.waiters = slot + 1;
  if ((task.flags & kHasDeadline) != 0) expect_deadline(region_.notes[slot].deadline_ns);
  return false;
}

void Engine::raise_event(pto_event name, uint64_t add) {
  event_value(name);  // checks the name
  wake_event(static_cast<uint32_t>(name & 0xFFFFFFFF), add, running.engine == this ? running.seat : seat_here());
  wake_waiters();
}

// Raises the event, perhaps by nothing, and lets go of the tasks that it has reached, that were cancelled or that are
// past their deadlines. Returns the next deadline of the others; INT64_MAX: none.
int64_t Engine::wake_event(uint32_t index, uint64_t add, uint32_t seat_index) {
  int64_t soonest = INT64_MAX;
  const Busy busy(seat(seat_index));
  Event& event = region_.events[index];
  uint32_t reached = 0;
  {
    std::lock_guard guard(event.lock);
    const uint64_t before = event.value.load(std::memory_order_relaxed);
    const uint64_t value = before + std::min(add, UINT64_MAX - before);  // it never falls
    event.value.store(value, std::memory_order_release);
    uint32_t left = 0;
    for (uint32_t w = event.waiters; w != 0;) {
      Slot& waiter = region_.slots[w - 1];
      const uint32_t next = waiter.next_waiter;
      const bool is_free = region_.args[w - 1].awaited <= value || is_cancelled(w - 1) || is_overdue(w - 1);
      if (!is_free && (waiter.flags & kHasDeadline) != 0) {
        soonest = std::min(soonest, region_.notes[w - 1].deadline_ns);
      }
      uint32_t& list = is_free ? reached : left;
      waiter.next_waiter = list;
      list = w;
      w = next;
    }
    event.waiters = left;
  }
  while (reached != 0) {
    const uint32_t slot = reached - 1;
    reached = region_.slots[slot].next_waiter;
    if (advance(slot, seat_index)) make_ready(slot, seat_index);
  }
  return soonest;
}

}  // namespace tilewise::tasks
