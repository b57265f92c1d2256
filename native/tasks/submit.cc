// From a specification to a task that is ready or waits: checks, slot, buffers, order. See engine.h. Most tasks take
// the short way in submit_plain.cc.
#include <algorithm>
#include <cstring>

#include "tasks/engine.h"
#include "tasks/hot.h"
#include "tasks/observe/graph_log.h"
#include "tasks/order/boxes.h"
#include "tasks/order/dependencies.h"
#include "tasks/replay/recording.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/pool.h"

namespace tilewise::tasks {

pto_task Engine::submit_any(const pto_task_spec& spec, uint32_t seat_index) {
  Resolved buffers;
  const uint32_t traits = check_spec(spec, buffers);
  if ((traits & kHasReductions) != 0) [[unlikely]]
    return submit_reduction(spec);
  const uint32_t slot = take_slot(seat_index);
  Slot& task = region_.slots[slot];
  const TaskRef self = name_at(slot);
  bool is_recorded = false;
  try {
    fill(task, region_.args[slot], spec, seat_index);
    bind_params(slot, spec, seat_index, buffers, traits);
    link(slot, self, spec, seat_index, buffers, traits, is_recorded);
  } catch (...) {
    take_back(slot, seat_index, is_recorded);
    throw;
  }
  count_submitted(seat_index, 1);
  start_submitted(slot, seat_index);
  return self;
}

void Engine::add_many(Slot& task, uint64_t word, uint32_t seat_index) {
  SeatPool pool{*this, seat(seat_index)};
  push_ref(pool, task.more_producers, word);
}

void Engine::start_waiting(uint32_t slot, uint32_t seat_index) {
  if (advance(slot, seat_index)) make_ready(slot, seat_index);
}

void Engine::note_submission(SlotArgs& args, uint32_t seat_index) {
  args.scope_depth = static_cast<int32_t>(seat(seat_index).depth);
  args.submit_ticks = ticks();
  args.ready_ticks = 0;
}

/// A submission that failed, for want of references at the latest. is_recorded: buffers may know it.
void Engine::take_back(uint32_t slot, uint32_t seat_index, bool is_recorded) {
  if (is_recorded) return start_empty(slot, seat_index);
  abandon(slot);
}

// Some buffers know the task already, and no longer whom it replaced: it runs, but does nothing, and keeps their order.
void Engine::start_empty(uint32_t slot, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  task.kernel = PTO_NO_KERNEL;
  count_submitted(seat_index, 1);
  start_submitted(slot, seat_index);
}

// Nothing of it is visible yet.
void Engine::abandon(uint32_t slot) {
  Slot& task = region_.slots[slot];
  const uint64_t generation = generation_in(task.wake.load(std::memory_order_relaxed));
  if ((task.flags & kUsesHeap) != 0) release_heap(task, region_.args[slot]);
  SeatPool pool{*this, seat(region_.lane_of(slot))};
  give_chunks(pool, task.more_producers);
  const WakeWord word = task.wake.exchange((generation + 1) << 24, std::memory_order_acq_rel);
  if ((word & kWatched) != 0) wake_waiters();
}

// Past slots of tasks that run for long. And now and then, how many tasks live: the high-water mark of the window.
// Rounds of recordings have slots of their own.
uint32_t Engine::take_slot_carefully(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  if ((me.cursor & kCursorsPerLook) == 0 && !has_instances_.load(std::memory_order_relaxed)) {
    const uint64_t live = std::min<uint64_t>(num_submitted() - num_completed(), region_.header->window);
    if (live > me.window_high.load(std::memory_order_relaxed)) me.window_high.store(live, std::memory_order_relaxed);
  }
  const uint32_t base = seat_index * region_.header->window;
  const uint32_t mask = region_.header->window - 1;
  for (uint32_t tries = 0; tries < 8; ++tries) {
    const uint32_t slot = base + (static_cast<uint32_t>(me.cursor++) & mask);
    Slot& task = region_.slots[slot];
    const WakeWord word = task.wake.load(std::memory_order_acquire);
    if (is_live(word)) continue;
    task.state.store(SlotState::kFilling, std::memory_order_relaxed);
    task.wake.store((generation_in(word) + 1) << 24, std::memory_order_relaxed);
    return slot;
  }
  return take_slot_slowly(seat_index);
}

inline void Engine::fill(Slot& task, SlotArgs& args, const pto_task_spec& spec, uint32_t seat_index) {
  uint16_t flags = 0;
  if (spec.kernel >= 0 && (region_.kernels[spec.kernel].flags & PTO_SUBMITS) != 0) flags = kIsParent;
  if (spec.flags != 0) flags |= kKeepsError;
  if (spec.target_worker != 0) {
    flags |= kHasTarget;
    args.target_worker = static_cast<uint32_t>(spec.target_worker);
  }
  task.begin(spec.kernel, spec.priority, static_cast<uint8_t>(region_.header->class_of_type[spec.worker_type]), flags);
  task.parent = running.engine == this ? running.parent : 0;
  task.num_scalars = static_cast<uint8_t>(spec.num_scalars);
  uint64_t* const scalars = args.scalars(spec.num_params);
  for (uint32_t s = 0; s < spec.num_scalars; ++s) scalars[s] = spec.scalars[s];
  if (spec.name != nullptr || spec.deadline_s != 0) note_extras(static_cast<uint32_t>(&task - region_.slots), spec);
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    note_submission(args, seat_index);
}

// Addresses of all buffers; runtime-owned outputs are packed into one piece of the heap.
inline void Engine::bind_params(uint32_t slot, const pto_task_spec& spec, uint32_t seat_index, Resolved& buffers,
                                uint32_t traits) {
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  if ((traits & kHasOutputs) != 0) allocate_outputs(spec, seat_index, buffers);
  if ((traits & kSeesViews) != 0) task.flags |= kHasViews;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const pto_param& param = spec.params[p];
    Param& bound = args.params[p];
    bound.mode = static_cast<uint8_t>(param.mode) & 0x7F;
    bound.is_region = param.region != nullptr;
    bound.shadow = 0;
    if (param.region != nullptr && (task.flags & kIsParent) != 0) {
      region_.declared[uint64_t{slot} * PTO_MAX_PARAMS + p] = *param.region;
    }
    const Handle* handle = buffers.handles[p];
    if (handle != nullptr) [[likely]] {
      bound.handle = index_of(*handle);
      bound.address = handle->address + (param.region != nullptr ? param.region->offset : 0);
    } else {
      bound.handle = kNone;
      bound.address = region_.distance(param.address);
    }
    if ((traits & kSeesViews) != 0) note_view(slot, p, param, handle != nullptr ? handle->bytes : 0);
    task.num_params = static_cast<uint8_t>(p + 1);
    if (lies_in_heap(bound.address)) {
      use_heap(bound.address, seat_index);
      task.flags |= kUsesHeap;
    } else if (region_.header->is_shared != 0) [[unlikely]] {
      raise(PTO_BAD_ARGUMENT, "[runtime.submit] with two processes every buffer must lie in the region; got parameter ",
            p, " outside it; use pto_alloc or runtime-owned outputs");
    }
  }
  if (spec.predicate != 0) {
    args.predicate = resolve(spec.predicate, "submit").address;
    task.flags |= kHasPredicate;
  }
}

void Engine::allocate_outputs(const pto_task_spec& spec, uint32_t seat_index, Resolved& buffers) {
  uint64_t packed = 0;
  buffers.fresh = 0;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (spec.params[p].handle == 0 && spec.params[p].mode == PTO_OUTPUT) packed += aligned(spec.params[p].bytes);
  }
  uint64_t next = allocate_heap(seat_index, packed);
  Seat& me = seat(seat_index);
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    pto_param& param = spec.params[p];
    if (param.handle != 0 || param.mode != PTO_OUTPUT) continue;
    const uint32_t index = take_handle(seat_index);
    Handle& handle = region_.handles[index];
    handle.address = next;
    handle.bytes = param.bytes;
    handle.flags |= kOwnedByHeap;
    Scope& scope = me.scopes[me.depth];
    handle.next = scope.first_handle;
    scope.first_handle = index + 1;
    param.handle = uint64_t{handle.generation.load(std::memory_order_relaxed)} << 32 | (index + 1);
    next += aligned(param.bytes);
    buffers.handles[p] = &handle;
    buffers.fresh |= 1u << p;
  }
}

// One critical section for all parameters, so that two lanes see each other's tasks in one order.
inline void Engine::link(uint32_t slot, TaskRef self, const pto_task_spec& spec, uint32_t seat_index, Resolved& buffers,
                         uint32_t traits, bool& is_recorded) {
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  Header& header = *region_.header;
  const bool is_child = task.parent != 0;
  const bool is_observed = graph_ != nullptr || open_recordings_[seat_index] != nullptr;
  bool has_boxes = (traits & kHasBoxes) != 0 || graph_ != nullptr;
  if ((traits & kHasMore) != 0) {
    for (uint32_t w = 0; w < spec.num_waits; ++w) {
      add_producer(task, spec.waits[w].value, seat_index);
      add_producer(task, (spec.waits[w].event & 0xFFFFFFFF) << 32 | kIsEvent, seat_index);
    }
  }
  SubmitGuard guard(header, seat_index, fences_, is_child, has_boxes);
  const auto settle = [&] {
    for (uint32_t p = 0; p < spec.num_params; ++p) {
      if (buffers.handles[p] != nullptr && !is_child) settle_buffer(*buffers.handles[p], seat_index);
    }
    if (spec.predicate != 0 && !is_child) settle_buffer(resolve(spec.predicate, "submit"), seat_index);
  };
  settle();
  // Since the check another lane may have begun to use boxes of the same buffer; and children have handles of their
  // own.
  bool found_boxes = false;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    Handle* handle = buffers.handles[p];
    if (handle == nullptr) continue;
    const auto mode = static_cast<pto_mode>(args.params[p].mode);
    if (mode == PTO_NO_DEP || (handle->flags & kFrozen) != 0) {
      buffers.handles[p] = nullptr;
      continue;
    }
    if (is_child || handle->owner != 0) {
      buffers.handles[p] = handle = &tracked(*handle, mode, spec.params[p].region, seat_index);
    }
    found_boxes |= (handle->flags & kHasRegions) != 0;
  }
  Handle* predicate = nullptr;
  if (spec.predicate != 0) {
    predicate = &tracked(resolve(spec.predicate, "submit"), PTO_INPUT, nullptr, seat_index);
    found_boxes |= (predicate->flags & kHasRegions) != 0;
  }
  if (found_boxes && !has_boxes) {
    has_boxes = true;
    guard.lock_boxes();
  }
  for (bool is_stuck = false; has_boxes && !prepare_boxes(args, spec, seat_index);) {
    if (is_stuck) raise_deadlock(seat_index, Resource::kRegions, spec.num_params);
    guard.unlock();
    is_stuck = wait_for_room(seat_index, Resource::kRegions, spec.num_params);
    guard.lock();
    settle();
  }
  const uint64_t sequence = header.sequence.load(std::memory_order_relaxed) + (is_child ? 0 : 1);
  task.sequence.store(sequence, std::memory_order_relaxed);
  if (!is_child) {
    header.sequence.store(sequence, std::memory_order_release);
    if (has_failures()) [[unlikely]]
      sweep_failures_if_many(has_boxes);
  }
  for (uint32_t a = 0; a < spec.num_after; ++a) {
    if (spec.after[a] != 0) order_after(task, spec.after[a] | kCarriesPoison, seat_index);
  }
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (buffers.handles[p] == nullptr) continue;
    collect_param(slot, seat_index, *buffers.handles[p], spec.params[p].region, args.params[p].mode);
  }
  if (predicate != nullptr) collect_param(slot, seat_index, *predicate, nullptr, PTO_INPUT);
  if (is_child) region_.slots[task.parent - 1].children.fetch_add(1, std::memory_order_relaxed);
  is_recorded = true;
  uint32_t num_tokens = 0;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (buffers.handles[p] == nullptr) continue;
    record_param(self, seat_index, *buffers.handles[p], spec.params[p].region, args.params[p].mode);
    if (args.params[p].mode == PTO_COMMUTE) args.tokens[num_tokens++] = index_of(*buffers.handles[p]);
  }
  if (predicate != nullptr) record_param(self, seat_index, *predicate, nullptr, PTO_INPUT);
  if (num_tokens > 0) use_tokens(task, args, num_tokens);
  if (is_observed) [[unlikely]]
    observe(slot, spec, seat_index, (traits & kHasOutputs) != 0 ? buffers.fresh : 0);
}

/// For commuting accesses, whose handles stand in args.tokens.
void Engine::use_tokens(Slot& task, SlotArgs& args, uint32_t count) {
  std::sort(args.tokens, args.tokens + count);
  args.num_tokens = static_cast<uint32_t>(std::unique(args.tokens, args.tokens + count) - args.tokens);
  args.num_tokens_held = 0;
  task.flags |= kUsesTokens;
}

/// Tells a graph that is kept, and this thread's recording, of a task. fresh: mask of outputs made for it.
void Engine::observe(uint32_t slot, const pto_task_spec& spec, uint32_t seat_index, uint32_t fresh) {
  if (graph_ != nullptr) graph_->add(*this, slot, spec);
  if (open_recordings_[seat_index] == nullptr) return;
  try {
    open_recordings_[seat_index]->add(*this, slot, spec, fresh);
  } catch (...) {  // half of the task is no recording
    open_recordings_[seat_index] = nullptr;
    num_observers_.fetch_sub(1);
    throw;
  }
}

// Inside a task: its own buffers, and what it declared itself, under a handle of its children's own.
Handle& Engine::tracked(Handle& handle, int mode, const pto_region* box, uint32_t seat_index) {
  const uint32_t parent = running.engine == this ? running.parent : 0;
  if (handle.owner == parent) return handle;
  const uint32_t index = index_of(handle);
  Param* first = nullptr;  // of the parent's parameters that name this buffer: it keeps the children's handle
  bool is_allowed = false;
  for (uint32_t p = 0; parent != 0 && p < region_.slots[parent - 1].num_params; ++p) {
    Param& declared = region_.args[parent - 1].params[p];
    if (declared.handle != index) continue;
    if (first == nullptr) first = &declared;
    const pto_region& limit = region_.declared[uint64_t{parent - 1} * PTO_MAX_PARAMS + p];
    is_allowed |= (mode == PTO_INPUT || declared.mode != PTO_INPUT) &&
                  (declared.is_region == 0 || lies_in(box_of(handle, box), box_of(handle, &limit)));
  }
  if (!is_allowed) {
    raise(PTO_BAD_ARGUMENT, "[runtime.submit] a child may touch only what its parent declared (and write only what it ",
          "declared to write) and buffers made inside it; got handle ", index + 1, " with mode ", mode,
          box != nullptr ? " and a box" : "", "; add it to the parent's parameters");
  }
  if (first->shadow == 0) {
    first->shadow = take_handle(seat_index) + 1;
    Handle& shadow = region_.handles[first->shadow - 1];
    shadow.address = handle.address;
    shadow.bytes = handle.bytes;
  }
  return region_.handles[first->shadow - 1];
}

// A reduction writes a partial of its own; a second task adds it to the target. The chain of these second tasks stands
// in the order of submission, so the sum has the same bits however the partials are timed.
pto_task Engine::submit_reduction(const pto_task_spec& spec) {
  pto_param params[PTO_MAX_PARAMS];
  std::copy(spec.params, spec.params + spec.num_params, params);
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (params[p].mode != PTO_REDUCE) continue;
    params[p].bytes = resolve(params[p].handle, "submit").bytes;
    params[p].mode = PTO_OUTPUT;
    params[p].handle = 0;
  }
  pto_task_spec partial = spec;
  partial.params = params;
  const pto_task task = submit(partial);
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (spec.params[p].mode == PTO_OUTPUT) spec.params[p].handle = params[p].handle;
    if (spec.params[p].mode != PTO_REDUCE) continue;
    pto_param both[2] = {};
    both[0].mode = PTO_INOUT;
    both[0].handle = spec.params[p].handle;
    both[1].mode = PTO_INPUT;
    both[1].handle = params[p].handle;
    both[0].view = both[1].view = params[p].view;
    pto_task_spec combine{};
    combine.kernel = spec.params[p].combine;
    combine.worker_type = spec.worker_type;
    combine.params = both;
    combine.num_params = 2;
    combine.scalars = &params[p].bytes;
    combine.num_scalars = 1;
    combine.priority = spec.priority;
    submit(combine);
  }
  return task;
}

}  // namespace tilewise::tasks
