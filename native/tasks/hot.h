// The short functions on every task's path, inline in the sources that use them. See engine.h.
#pragma once
#include "tasks/embed/embedded.h"
#include "tasks/engine.h"
#include "tasks/observe/graph_log.h"
#include "tasks/order/boxes.h"
#include "tasks/order/dependencies.h"
#include "tasks/sched/queues.h"
#include "tasks/sched/sleep.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/pool.h"

namespace tilewise::tasks {

/// Says that this thread holds tasks that no slot shows as ready or running.
class Busy {
 public:
  explicit Busy(Seat& seat) : seat_(seat), before_(seat.is_busy.load(std::memory_order_relaxed)) {
    seat_.is_busy.store(1, std::memory_order_release);
  }
  ~Busy() { seat_.is_busy.store(before_, std::memory_order_release); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Seat& seat_;
  uint32_t before_;
};

[[gnu::always_inline]] inline void Engine::add_producer(Slot& task, uint64_t word, uint32_t seat_index) {
  if (task.num_producers < task.room) [[likely]] {
    task.producers[task.num_producers++] = word;
    return;
  }
  add_many(task, word, seat_index);
}

/// Waits for a live producer; of a completed one only the failure matters, and that is asked for at once.
[[gnu::always_inline]] inline void Engine::order_after(Slot& task, TaskRef producer, uint32_t seat_index) {
  const WakeWord word = region_.slots[slot_of(producer)].wake.load(std::memory_order_acquire);
  if (generation_in(word) == generation_of(producer)) {
    add_producer(task, producer, seat_index);
  } else if (has_failures()) [[unlikely]] {
    inherit(task, producer);
  }
}

inline void Engine::collect_param(uint32_t slot, uint32_t seat_index, Handle& handle, const pto_region* region,
                                  int mode) {
  SeatPool pool{*this, seat(seat_index)};
  const auto sink = [&](TaskRef producer) {
    if (graph_ != nullptr) graph_->note(producer);
    order_after(region_.slots[slot], producer, seat_index);
  };
  if (region == nullptr && (handle.flags & kHasRegions) == 0) {
    collect(handle.state, pool, mode, sink);
    return;
  }
  collect_boxes(boxes_, index_of(handle), handle, region, mode, pool, sink);
}

inline void Engine::record_param(TaskRef task, uint32_t seat_index, Handle& handle, const pto_region* region,
                                 int mode) {
  SeatPool pool{*this, seat(seat_index)};
  if (region == nullptr && (handle.flags & kHasRegions) == 0) {
    record(handle.state, pool, mode, task);
  } else {
    record_box(boxes_, index_of(handle), handle, region, mode, pool, task);
  }
}

/// Puts a task on the list of those that wait for a producer. False: the producer has completed. After true the task
/// may be anybody's.
[[gnu::always_inline]] inline bool Engine::stand_behind(uint32_t slot, TaskRef producer_name) {
  Slot& task = region_.slots[slot];
  Slot& producer = region_.slots[slot_of(producer_name)];
  WakeWord wake = producer.wake.load(std::memory_order_acquire);
  while (generation_in(wake) == generation_of(producer_name)) {
    task.state.store(SlotState::kPending, std::memory_order_relaxed);
    task.next_waiter = first_waiter(wake);
    const WakeWord with_me = (wake & ~(kWatched - 1)) | (slot + 1);
    if (producer.wake.compare_exchange_weak(wake, with_me, std::memory_order_acq_rel, std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
}

// Waits behind the last producer that has not completed. Exactly one thread at a time advances a task: its submitter,
// then whoever completes the producer it stands behind.
inline bool Engine::advance(uint32_t slot, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  while (task.num_producers > 0 || task.more_producers != 0) {
    const Chunk* more = task.more_producers != 0 ? &region_.chunks[task.more_producers - 1] : nullptr;
    const uint64_t word = more != nullptr ? more->refs[more->count - 1] : task.producers[task.num_producers - 1];
    if ((word & kIsEvent) != 0) {
      drop_producer(task, seat_index);
      const Chunk* next = task.more_producers != 0 ? &region_.chunks[task.more_producers - 1] : nullptr;
      const uint64_t value = next != nullptr ? next->refs[next->count - 1] : task.producers[task.num_producers - 1];
      drop_producer(task, seat_index);
      if (!wait_for_event(slot, static_cast<uint32_t>(word >> 32), value)) return false;
      continue;
    }
    if (stand_behind(slot, word)) return false;
    if (has_failures()) [[unlikely]]
      inherit(task, word);
    drop_producer(task, seat_index);
  }
  if ((task.flags & (kUsesTokens | kIsEmbedded | kIsReplayed)) == 0) [[likely]]
    return true;
  if ((task.flags & kIsReplayed) != 0) return arrive(slot);
  if ((task.flags & kIsEmbedded) != 0) return host_->admit(slot & (region_.header->window - 1));
  return take_tokens(slot);
}

/// One more of what a replayed task waits for. True: it was the last.
inline bool Engine::arrive(uint32_t slot) {
  std::atomic<uint32_t>& left = region_.slots[slot].children;
  // Nobody else can come when one is left: then to look is enough.
  if (left.load(std::memory_order_acquire) != 1 && left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  if (has_failures()) [[unlikely]]
    inherit_replayed(slot);
  return true;
}

inline void Engine::drop_producer(Slot& task, uint32_t seat_index) {
  if (task.more_producers == 0) {
    --task.num_producers;
    return;
  }
  Chunk& chunk = region_.chunks[task.more_producers - 1];
  if (--chunk.count > 0) return;
  SeatPool pool{*this, seat(seat_index)};
  const uint32_t empty = task.more_producers;
  task.more_producers = chunk.next;
  pool.give(empty);
}

/// After work was published: whoever sleeps, and could run it, must see it.
inline void Engine::wake_worker(bool all) {
  const Header& header = *region_.header;
  light_barrier(fences_);
  const uint32_t num_asleep =
      header.num_parked.load(std::memory_order_relaxed) | header.num_waiting.load(std::memory_order_relaxed);
  if (num_asleep != 0) [[unlikely]]
    wake_sleeper(all);
}

[[gnu::always_inline]] inline void Engine::make_ready(uint32_t slot, uint32_t seat_index) {
  region_.slots[slot].state.store(SlotState::kReady, std::memory_order_relaxed);
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    ready_ticks_of(slot) = ticks();
  const bool has_target = (region_.slots[slot].flags & kHasTarget) != 0;
  push_ready(slot, seat_index);
  wake_worker(has_target);
}

[[gnu::always_inline]] inline void Engine::push_ready(uint32_t slot, uint32_t seat_index) {
  const Slot& task = region_.slots[slot];
  if ((task.flags & kHasTarget) == 0 && task.priority == 0) [[likely]] {
    if (push(region_.rings[seat_index * region_.header->num_classes + task.type_class], slot)) [[likely]]
      return;
  }
  push_special(slot);
}

constexpr uint32_t kPrefetchAhead = 4;
constexpr uint64_t kCursorsPerLook = 255;  // a mask: to look at others' counters costs a cache line from each

inline void Engine::count_submitted(uint32_t seat_index, uint64_t count) {
  std::atomic<uint64_t>& submitted = seat(seat_index).num_submitted;
  submitted.store(submitted.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
}

/// The next slot in turn, when nobody lives in it.
[[gnu::always_inline]] inline uint32_t Engine::take_slot(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  const uint32_t mask = region_.header->window - 1;
  const uint32_t base = seat_index * region_.header->window;
  const auto at = static_cast<uint32_t>(me.cursor) & mask;
  Slot& task = region_.slots[base + at];
  const WakeWord word = task.wake.load(std::memory_order_acquire);
  if (is_live(word) || (me.cursor & kCursorsPerLook) == 0) [[unlikely]]
    return take_slot_carefully(seat_index);
  ++me.cursor;
  const Slot& soon = region_.slots[base + ((at + kPrefetchAhead) & mask)];
  protocols::prefetch_for_write(&soon);
  protocols::prefetch_for_write(&soon.producers);
  task.state.store(SlotState::kFilling, std::memory_order_relaxed);
  task.wake.store((generation_in(word) + 1) << 24, std::memory_order_relaxed);
  return base + at;
}

[[gnu::always_inline]] inline void Engine::start_submitted(uint32_t slot, uint32_t seat_index) {
  const Slot& task = region_.slots[slot];
  const bool is_ready =
      (task.num_producers | task.more_producers) == 0 && (task.flags & (kUsesTokens | kIsEmbedded | kIsReplayed)) == 0;
  if (is_ready) return make_ready(slot, seat_index);
  const Busy busy(seat(seat_index));  // between two looks the slot may say that it waits, and not wait
  if (task.num_producers > 0 && task.more_producers == 0) [[likely]] {
    const uint64_t last = task.producers[task.num_producers - 1];
    if ((last & kIsEvent) == 0 && stand_behind(slot, last)) [[likely]]
      return;
  }
  start_waiting(slot, seat_index);
}

}  // namespace tilewise::tasks
