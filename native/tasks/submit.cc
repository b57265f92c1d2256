// From a specification to a task that is ready or waits: checks, slot, buffers, order. See engine.h.
#include <algorithm>
#include <cstring>

#include "tasks/boxes.h"
#include "tasks/dependencies.h"
#include "tasks/engine.h"
#include "tasks/graph_log.h"
#include "tasks/pool.h"
#include "tasks/recording.h"
#include "tasks/thread_state.h"

namespace tilewise::tasks {

namespace {

constexpr uint32_t kPrefetchAhead = 4;

/// The locks that a submission needs. A task's children are submitted by one thread and share nothing with others, so
/// they need no submission lock; the boxes' index is everybody's.
class SubmitGuard {
 public:
  SubmitGuard(Header& header, bool is_child, bool has_boxes)
      : submit_(is_child ? nullptr : &header.submit_lock), boxes_(has_boxes ? &header.boxes_lock : nullptr) {
    lock();
  }
  ~SubmitGuard() { unlock(); }
  void lock() {
    if (submit_ != nullptr) submit_->lock();
    if (boxes_ != nullptr) boxes_->lock();
  }
  void unlock() {
    if (boxes_ != nullptr) boxes_->unlock();
    if (submit_ != nullptr) submit_->unlock();
  }
  SubmitGuard(const SubmitGuard&) = delete;
  SubmitGuard& operator=(const SubmitGuard&) = delete;

 private:
  rings::SpinLock* submit_;
  rings::SpinLock* boxes_;
};

uint32_t index_in(pto_handle handle) { return static_cast<uint32_t>(handle & 0xFFFFFFFF) - 1; }

}  // namespace

pto_task Engine::submit(const pto_task_spec& spec) {
  const uint32_t seat_index = seat_here();
  check_spec(spec);
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (spec.params[p].mode == PTO_REDUCE) return submit_reduction(spec);
  }
  const uint32_t slot = take_slot(seat_index);
  const TaskRef task = make_ref(generation_in(region_.slots[slot].wake.load(std::memory_order_relaxed)), slot);
  try {
    fill(slot, spec, seat_index);
    bind_params(slot, spec, seat_index);
    link(slot, spec, seat_index);
  } catch (...) {
    abandon(slot);
    throw;
  }
  Seat& me = seat(seat_index);
  me.num_submitted.store(me.num_submitted.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  start_submitted(slot, seat_index);
  return task;
}

// Everything that can be wrong is found here, before anything is taken.
void Engine::check_spec(const pto_task_spec& spec) {
  const char* where = "[runtime.submit] ";
  if (spec.num_params > PTO_MAX_PARAMS || spec.num_scalars > PTO_MAX_SCALARS) {
    raise(PTO_BAD_ARGUMENT, where, "a task must have at most ", PTO_MAX_PARAMS, " parameters and ", PTO_MAX_SCALARS,
          " scalars; got ", spec.num_params, " and ", spec.num_scalars, "; pass one buffer that holds more");
  }
  const Header& header = *region_.header;
  const auto known = [&](int32_t kernel) {
    return kernel >= 0 && kernel < static_cast<int32_t>(header.num_kernels.load(std::memory_order_acquire));
  };
  if (spec.kernel != PTO_NO_KERNEL && !known(spec.kernel)) {
    raise(PTO_BAD_ARGUMENT, where, "a kernel must have been added to this runtime; got id ", spec.kernel,
          "; call pto_kernel_add or pto_kernel_find");
  }
  if (static_cast<uint32_t>(spec.worker_type) >= kNumTypes) {
    raise(PTO_BAD_ARGUMENT, where, "worker_type must be one of four; got ", static_cast<int>(spec.worker_type),
          "; choose PTO_CUBE, PTO_VECTOR, PTO_AI_CPU or PTO_ACCELERATOR");
  }
  const uint32_t kind = header.class_of_type[spec.worker_type];
  uint32_t served = 0;
  for (uint32_t w = 0; w < header.num_workers; ++w) served |= region_.seats[w].classes;
  if (header.num_workers > 0 && (served >> kind & 1) == 0) {
    raise(PTO_BAD_ARGUMENT, where, "some worker must serve the task's type; got type ",
          static_cast<int>(spec.worker_type), ", which none serves; correct worker_types of the configuration");
  }
  if (spec.target_worker < 0 || spec.target_worker > static_cast<int32_t>(header.num_workers) ||
      (spec.target_worker > 0 && (region_.seats[spec.target_worker - 1].classes >> kind & 1) == 0)) {
    raise(PTO_BAD_ARGUMENT, where, "target_worker must be 0 or 1 + a worker that serves the task's type; got ",
          spec.target_worker, " with ", header.num_workers, " workers; drop the hint or correct it");
  }
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const pto_param& param = spec.params[p];
    if (static_cast<uint32_t>(param.mode) > PTO_NO_DEP) {
      raise(PTO_BAD_ARGUMENT, where, "a parameter's mode must be a pto_mode; got ", static_cast<int>(param.mode),
            " in parameter ", p, "; correct it");
    }
    if (param.handle == 0) {
      if (param.mode == PTO_OUTPUT && param.bytes > 0 && param.region == nullptr) continue;
      if (param.mode == PTO_NO_DEP && param.region == nullptr && header.is_shared == 0) continue;
      raise(PTO_BAD_ARGUMENT, where, "parameter ", p, " must name a buffer; got handle 0",
            param.mode == PTO_OUTPUT ? " and 0 bytes" : "", "; register it, or pass an output with its bytes");
    }
    const Handle& handle = resolve(param.handle, "submit");
    if (param.mode == PTO_REDUCE && (!known(param.combine) || param.region != nullptr)) {
      raise(PTO_BAD_ARGUMENT, where, "a reduction must name a combine kernel and a whole buffer; got kernel ",
            param.combine, param.region != nullptr ? " and a region" : "", " in parameter ", p,
            "; use \"sum_f32\" or a kernel of your own");
    }
    if ((handle.flags & kFrozen) != 0 && param.mode != PTO_INPUT && param.mode != PTO_NO_DEP) {
      raise(PTO_BAD_ARGUMENT, where, "a frozen buffer must only be read; got mode ", static_cast<int>(param.mode),
            " in parameter ", p, "; call pto_freeze(handle, 0) first");
    }
    if (param.region == nullptr) continue;
    const pto_region& box = *param.region;
    bool is_good = box.ndim >= 1 && box.ndim <= PTO_MAX_DIMS && box.stride[box.ndim - 1] == 1;
    uint64_t end = box.offset;
    for (uint32_t d = 0; is_good && d < box.ndim; ++d) {
      if (box.size[d] == 0) continue;
      uint64_t span = 0;
      is_good = !__builtin_mul_overflow(box.size[d] - 1, box.stride[d], &span) && !__builtin_add_overflow(end, span, &end);
    }
    if (!is_good || end >= handle.bytes) {
      raise(PTO_BAD_ARGUMENT, where, "a region must have 1 to ", PTO_MAX_DIMS,
            " dimensions, the last with stride 1, and lie inside its buffer of ", handle.bytes, " bytes; got ", box.ndim,
            " dimensions from byte ", box.offset, " to ", end, " in parameter ", p, "; correct it");
    }
  }
  if (spec.predicate != 0 && resolve(spec.predicate, "submit").bytes < sizeof(uint32_t)) {
    raise(PTO_BAD_ARGUMENT, where, "a predicate must have at least 4 bytes; got fewer; register a uint32_t");
  }
  for (uint32_t w = 0; w < spec.num_waits; ++w) event_value(spec.waits[w].event);
}

void Engine::abandon(uint32_t slot) {
  Slot& task = region_.slots[slot];
  const uint64_t generation = generation_in(task.wake.load(std::memory_order_relaxed));
  if ((task.flags & kUsesHeap) != 0) release_heap(task, region_.args[slot]);
  const WakeWord word = task.wake.exchange((generation + 1) << 24, std::memory_order_acq_rel);
  if ((word & kWatched) != 0) wake_waiters();
}

uint32_t Engine::take_slot(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  const uint32_t base = seat_index * region_.header->window;
  const uint32_t mask = region_.header->window - 1;
  for (uint32_t tries = 0; tries < 8; ++tries) {
    const uint32_t at = me.cursor;
    me.cursor = (at + 1) & mask;
    Slot& task = region_.slots[base + at];
    const WakeWord word = task.wake.load(std::memory_order_acquire);
    if (is_live(word)) continue;
    __builtin_prefetch(&region_.slots[base + ((at + kPrefetchAhead) & mask)], 1);
    task.state.store(SlotState::kFilling, std::memory_order_relaxed);
    task.wake.store((generation_in(word) + 1) << 24, std::memory_order_relaxed);
    return base + at;
  }
  return take_slot_slowly(seat_index);
}

void Engine::fill(uint32_t slot, const pto_task_spec& spec, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  const Header& header = *region_.header;
  task.next_waiter = 0;
  task.kernel = spec.kernel;
  task.priority = spec.priority;
  task.parent = running.engine == this ? running.parent : 0;
  task.poison = 0;
  task.more_producers = 0;
  task.type_class = static_cast<uint8_t>(header.class_of_type[spec.worker_type]);
  task.num_producers = 0;
  task.num_params = 0;
  task.num_scalars = static_cast<uint8_t>(spec.num_scalars);
  task.flags = static_cast<uint8_t>(((spec.flags & PTO_KEEP) != 0 ? kKeepsError : 0) |
                                    (spec.target_worker != 0 ? kHasTarget : 0));
  if (spec.kernel >= 0 && (region_.kernels[spec.kernel].flags & PTO_SUBMITS) != 0) task.flags |= kIsParent;
  task.num_tokens_held = 0;
  for (uint32_t s = 0; s < spec.num_scalars; ++s) args.scalars[s] = spec.scalars[s];
  args.has_predicate = 0;
  args.num_tokens = 0;
  args.target_worker = static_cast<uint32_t>(spec.target_worker);
  args.lane = static_cast<int32_t>(seat_index);
  if (active_trace_.load(std::memory_order_relaxed) != nullptr) {
    args.scope_depth = static_cast<int32_t>(seat(seat_index).depth);
    args.submit_ns = now_ns();
    args.ready_ns = 0;
  }
}

// Addresses of all buffers; runtime-owned outputs are packed into one piece of the heap.
void Engine::bind_params(uint32_t slot, const pto_task_spec& spec, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  uint64_t packed = 0;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (spec.params[p].handle == 0 && spec.params[p].mode == PTO_OUTPUT) packed += (spec.params[p].bytes + 63) & ~63ull;
  }
  uint64_t next = packed != 0 ? allocate_heap(seat_index, packed) : 0;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    pto_param& param = spec.params[p];
    Param& bound = args.params[p];
    bound.mode = static_cast<uint8_t>(param.mode);
    bound.is_region = param.region != nullptr;
    bound.shadow = 0;
    bound.handle = kNone;
    if (param.handle == 0 && param.mode == PTO_NO_DEP) {
      bound.address = region_.distance(param.address);
    } else if (param.handle == 0) {
      const uint32_t index = take_handle(seat_index);
      Handle& handle = region_.handles[index];
      handle.address = next;
      handle.bytes = param.bytes;
      handle.flags |= kOwnedByHeap;
      Scope& scope = seat(seat_index).scopes[seat(seat_index).depth];
      handle.next = scope.first_handle;
      scope.first_handle = index + 1;
      param.handle = uint64_t{handle.generation.load(std::memory_order_relaxed)} << 32 | (index + 1);
      next += (param.bytes + 63) & ~63ull;
      bound.handle = index;
      bound.address = handle.address;
    } else {
      bound.handle = index_in(param.handle);
      bound.address = region_.handles[bound.handle].address + (bound.is_region ? param.region->offset : 0);
    }
    task.num_params = static_cast<uint8_t>(p + 1);
    if (lies_in_heap(bound.address)) {
      use_heap(bound.address, seat_index);
      task.flags |= kUsesHeap;
    } else if (region_.header->is_shared != 0) {
      raise(PTO_BAD_ARGUMENT, "[runtime.submit] with two processes every buffer must lie in the region; got parameter ",
            p, " outside it; use pto_alloc or runtime-owned outputs");
    }
  }
  if (spec.predicate != 0) {
    args.predicate = resolve(spec.predicate, "submit").address;
    args.has_predicate = 1;
  }
}

// One critical section for all parameters, so that two lanes see each other's tasks in one order.
void Engine::link(uint32_t slot, const pto_task_spec& spec, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  SlotArgs& args = region_.args[slot];
  Header& header = *region_.header;
  const bool is_child = task.parent != 0;
  bool has_boxes = graph_ != nullptr;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    has_boxes |= args.params[p].handle != kNone &&
                 (args.params[p].is_region || (region_.handles[args.params[p].handle].flags & kHasRegions) != 0);
  }
  const TaskRef self = make_ref(generation_in(task.wake.load(std::memory_order_relaxed)), slot);
  for (uint32_t w = 0; w < spec.num_waits; ++w) {
    add_producer(slot, spec.waits[w].value, seat_index);
    add_producer(slot, (spec.waits[w].event & 0xFFFFFFFF) << 32 | kIsEvent, seat_index);
  }
  SubmitGuard guard(header, is_child, has_boxes);
  while (has_boxes && !prepare_boxes(args, spec, seat_index)) {
    guard.unlock();
    wait_for_room(seat_index, Resource::kRegions, spec.num_params);
    guard.lock();
  }
  const uint64_t sequence = header.sequence.load(std::memory_order_relaxed) + (is_child ? 0 : 1);
  task.sequence.store(sequence, std::memory_order_relaxed);
  if (!is_child) {
    header.sequence.store(sequence, std::memory_order_release);
    const uint32_t sweep_at = std::max(header.sweep_at, 64u);
    if (header.num_failed.load(std::memory_order_relaxed) >= sweep_at) [[unlikely]] sweep_failures();
  }
  for (uint32_t a = 0; a < spec.num_after; ++a) {
    if (spec.after[a] != 0) add_producer(slot, spec.after[a] | kCarriesPoison, seat_index);
  }
  Handle* handles[PTO_MAX_PARAMS];
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    handles[p] = nullptr;
    const Param& param = args.params[p];
    if (param.mode == PTO_NO_DEP || param.handle == kNone) continue;
    Handle& handle = region_.handles[param.handle];
    if ((handle.flags & kFrozen) != 0) continue;
    handles[p] = is_child || handle.owner != 0 ? &tracked(handle, param.mode, seat_index) : &handle;
    collect_param(slot, seat_index, *handles[p], spec.params[p].region, param.mode);
  }
  Handle* predicate = nullptr;
  if (spec.predicate != 0) {
    predicate = &tracked(region_.handles[index_in(spec.predicate)], PTO_INPUT, seat_index);
    collect_param(slot, seat_index, *predicate, nullptr, PTO_INPUT);
  }
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (handles[p] != nullptr) record_param(self, seat_index, *handles[p], spec.params[p].region, args.params[p].mode);
    if (args.params[p].mode == PTO_COMMUTE) args.tokens[args.num_tokens++] = args.params[p].handle;
  }
  if (predicate != nullptr) record_param(self, seat_index, *predicate, nullptr, PTO_INPUT);
  if (args.num_tokens > 0) {
    std::sort(args.tokens, args.tokens + args.num_tokens);
    args.num_tokens = static_cast<uint32_t>(std::unique(args.tokens, args.tokens + args.num_tokens) - args.tokens);
    task.flags |= kUsesTokens;
  }
  if (is_child) region_.slots[task.parent - 1].children.fetch_add(1, std::memory_order_relaxed);
  if (graph_ != nullptr) graph_->add(*this, slot, spec);
  if (open_recordings_[seat_index] != nullptr) open_recordings_[seat_index]->add(*this, slot, spec);
}

void Engine::add_producer(uint32_t slot, uint64_t word, uint32_t seat_index) {
  Slot& task = region_.slots[slot];
  if (task.num_producers < kInlineProducers) {
    task.producers[task.num_producers++] = word;
    return;
  }
  SeatPool pool{*this, seat(seat_index)};
  push_ref(pool, task.more_producers, word);
}

void Engine::collect_param(uint32_t slot, uint32_t seat_index, Handle& handle, const pto_region* region, int mode) {
  SeatPool pool{*this, seat(seat_index)};
  const auto sink = [&](TaskRef producer) {
    if (graph_ != nullptr) graph_->note(producer);
    const WakeWord word = region_.slots[slot_of(producer)].wake.load(std::memory_order_acquire);
    if (generation_in(word) == generation_of(producer) || has_failures()) add_producer(slot, producer, seat_index);
  };
  if (region == nullptr && (handle.flags & kHasRegions) == 0) {
    collect(handle.state, pool, mode, sink);
    return;
  }
  collect_boxes(boxes_, index_of(handle), handle, region, mode, pool, sink);
}

void Engine::record_param(TaskRef task, uint32_t seat_index, Handle& handle, const pto_region* region, int mode) {
  SeatPool pool{*this, seat(seat_index)};
  if (region == nullptr && (handle.flags & kHasRegions) == 0) {
    record(handle.state, pool, mode, task);
  } else {
    record_box(boxes_, index_of(handle), handle, region, mode, pool, task);
  }
}

// Inside a task: its own buffers, and what it declared itself, under a handle of its children's own.
Handle& Engine::tracked(Handle& handle, int mode, uint32_t seat_index) {
  const uint32_t parent = running.engine == this ? running.parent : 0;
  if (handle.owner == parent) return handle;
  const uint32_t index = index_of(handle);
  if (parent != 0) {
    SlotArgs& args = region_.args[parent - 1];
    for (uint32_t p = 0; p < region_.slots[parent - 1].num_params; ++p) {
      Param& declared = args.params[p];
      if (declared.handle != index) continue;
      if (mode != PTO_INPUT && declared.mode == PTO_INPUT) break;
      if (declared.shadow == 0) {
        declared.shadow = take_handle(seat_index) + 1;
        Handle& shadow = region_.handles[declared.shadow - 1];
        shadow.address = handle.address;
        shadow.bytes = handle.bytes;
      }
      return region_.handles[declared.shadow - 1];
    }
  }
  raise(PTO_BAD_ARGUMENT, "[runtime.submit] a child may touch only what its parent declared (and write only what it ",
        "declared to write) and buffers made inside it; got handle ", index + 1, " with mode ", mode,
        "; add it to the parent's parameters");
}

void Engine::start_submitted(uint32_t slot, uint32_t seat_index) {
  region_.slots[slot].state.store(SlotState::kPending, std::memory_order_relaxed);
  if (advance(slot, seat_index)) make_ready(slot, seat_index);
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
