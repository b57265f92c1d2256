// The short functions on every task's path, inline in the sources that use them. See engine.h.
#pragma once
#include "tasks/boxes.h"
#include "tasks/dependencies.h"
#include "tasks/embedded.h"
#include "tasks/engine.h"
#include "tasks/graph_log.h"
#include "tasks/pool.h"
#include "tasks/queues.h"
#include "tasks/sleep.h"
#include "tasks/thread_state.h"

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

inline void Engine::add_producer(uint32_t slot, uint64_t word, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  if (task.num_producers < kInlineProducers) {
    task.producers[task.num_producers++] = word;
    return;
  }
  SeatPool pool{*this, seat(seat_index)};
  push_ref(pool, task.more_producers, word);
}

/// Waits for a live producer; of a completed one only the failure matters, and that is asked for at once.
inline void Engine::order_after(uint32_t slot, TaskRef producer, uint32_t seat_index) {
  const WakeWord word = region_.slots[slot_of(producer)].wake.load(std::memory_order_acquire);
  if (generation_in(word) == generation_of(producer)) {
    add_producer(slot, producer, seat_index);
  } else if (has_failures()) [[unlikely]] {
    inherit(region_.slots[slot], producer);
  }
}

inline void Engine::collect_param(uint32_t slot, uint32_t seat_index, Handle& handle, const pto_region* region,
                                  int mode) {
  SeatPool pool{*this, seat(seat_index)};
  const auto sink = [&](TaskRef producer) {
    if (graph_ != nullptr) graph_->note(producer);
    order_after(slot, producer, seat_index);
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
    Slot& producer = region_.slots[slot_of(word)];
    WakeWord wake = producer.wake.load(std::memory_order_acquire);
    while (generation_in(wake) == generation_of(word)) {
      task.state.store(SlotState::kPending, std::memory_order_relaxed);
      task.next_waiter = first_waiter(wake);
      const WakeWord with_me = (wake & ~(kWatched - 1)) | (slot + 1);
      if (producer.wake.compare_exchange_weak(wake, with_me, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return false;
      }
    }
    if (has_failures()) [[unlikely]] inherit(task, word);
    drop_producer(task, seat_index);
  }
  if ((task.flags & (kUsesTokens | kIsEmbedded | kIsReplayed)) == 0) [[likely]] return true;
  if ((task.flags & kIsReplayed) != 0) return arrive(slot);
  if ((task.flags & kIsEmbedded) != 0) return host_->admit(slot & (region_.header->window - 1));
  return take_tokens(slot);
}

/// One more of what a replayed task waits for. True: it was the last.
inline bool Engine::arrive(uint32_t slot) {
  std::atomic<uint32_t>& left = region_.slots[slot].children;
  // Nobody else can come when one is left: then to look is enough.
  if (left.load(std::memory_order_acquire) != 1 && left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  if (has_failures()) [[unlikely]] inherit_replayed(slot);
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

inline void Engine::make_ready(uint32_t slot, uint32_t seat_index) {
  region_.slots[slot].state.store(SlotState::kReady, std::memory_order_relaxed);
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) ready_ticks_of(slot) = ticks();
  const bool has_target = (region_.slots[slot].flags & kHasTarget) != 0;
  push_ready(slot, seat_index);
  wake_worker(has_target);
}

inline void Engine::push_ready(uint32_t slot, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  Header& header = *region_.header;
  if ((task.flags & kHasTarget) == 0 && task.priority == 0) [[likely]] {
    if (push(region_.rings[seat_index * header.num_classes + task.type_class], slot)) return;
    push(region_.queues[kOverflow * header.num_classes + task.type_class], region_.base, {0, sequence_of(slot), slot});
    header.num_overflow.fetch_add(1, std::memory_order_release);
    return;
  }
  const OrderedEntry entry{task.priority, sequence_of(slot), slot};
  if ((task.flags & kHasTarget) != 0) {
    const uint32_t worker = region_.args[slot].target_worker - 1;
    return push(region_.queues[kNumSharedQueues * header.num_classes + worker], region_.base, entry);
  }
  const SharedQueue which = task.priority > 0 ? kUrgent : kBackground;
  push(region_.queues[which * header.num_classes + task.type_class], region_.base, entry);
  (which == kUrgent ? header.num_urgent : header.num_background).fetch_add(1, std::memory_order_release);
}

[[gnu::flatten]] inline void Engine::start_submitted(uint32_t slot, uint32_t seat_index) {
  const Busy busy(seat(seat_index));  // between two looks of advance() the slot may say that it waits, and not wait
  if (advance(slot, seat_index)) make_ready(slot, seat_index);
}

}  // namespace tilewise::tasks
