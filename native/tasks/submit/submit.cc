// See submit.h.
#include "tasks/submit/submit.h"

#include <algorithm>
#include <cstring>

#include "tasks/engine/thread_slots.h"
#include "tasks/run/link.h"
#include "tasks/run/run.h"
#include "tasks/sched/float_modes.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/submit/checks.h"
#include "tasks/submit/notes.h"
#include "tasks/wait/room.h"

namespace tilewise::tasks {

namespace {

// Some buffers' states already name the task instead of earlier ones. So it runs as an empty task, which keeps their
// order.
void start_empty(Engine& engine, uint32_t slot, uint32_t thread) {
  Slot& task = engine.store.slots[slot];
  task.kernel = PTO_NO_KERNEL;
  count_submitted(engine, thread, 1);
  start_submitted(engine, slot, thread);
}

inline void fill(Engine& engine, Slot& task, SlotArgs& args, const pto_task_spec& spec, uint32_t thread) {
  uint16_t flags = 0;
  if (spec.kernel >= 0 && (engine.store.kernels[spec.kernel].flags & PTO_SUBMITS) != 0) flags = kIsParent;
  if ((spec.flags & PTO_KEEP) != 0) flags |= kKeepsError;
  if (spec.target_worker != 0) {
    flags |= kHasTarget;
    args.target_worker = static_cast<uint32_t>(spec.target_worker);
  }
  task.begin(spec.kernel, spec.priority, static_cast<uint8_t>(engine.store.header->class_of_type[spec.worker_type]),
             flags);
  task.parent = running.engine == &engine ? running.parent : 0;
  task.num_scalars = static_cast<uint8_t>(spec.num_scalars);
  uint64_t* const scalars = args.scalars(spec.num_params);
  for (uint32_t s = 0; s < spec.num_scalars; ++s) scalars[s] = spec.scalars[s];
  if (spec.name != nullptr || spec.deadline_s != 0)
    note_extras(engine, static_cast<uint32_t>(&task - engine.store.slots), spec);
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
    note_submission(engine, args, thread);
}

void allocate_outputs(Engine& engine, const pto_task_spec& spec, uint32_t thread, Resolved& buffers) {
  uint64_t packed = 0;
  buffers.fresh = 0;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (spec.params[p].handle == 0 && spec.params[p].mode == PTO_OUTPUT) packed += aligned(spec.params[p].bytes);
  }
  uint64_t next = allocate_heap(engine, thread, packed);
  ThreadSlot& me = engine.thread_slot(thread);
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    pto_param& param = spec.params[p];
    if (param.handle != 0 || param.mode != PTO_OUTPUT) continue;
    const uint32_t index = take_handle(engine, thread);
    Handle& handle = engine.store.handles[index];
    handle.address = next;
    handle.bytes = param.bytes;
    handle.flags |= kOwnedByHeap;
    Scope& scope = me.scopes[me.depth];
    handle.next = scope.first_handle;
    scope.first_handle = index + 1;
    param.handle = handle_name(handle, index);
    next += aligned(param.bytes);
    buffers.handles[p] = &handle;
    buffers.fresh |= 1u << p;
  }
}

// Stores the addresses of all buffers; packs runtime-owned outputs into one piece of the heap.
inline void bind_params(Engine& engine, uint32_t slot, const pto_task_spec& spec, uint32_t thread, Resolved& buffers,
                        uint32_t traits) {
  Slot& task = engine.store.slots[slot];
  SlotArgs& args = engine.store.args[slot];
  if ((traits & kHasOutputs) != 0) allocate_outputs(engine, spec, thread, buffers);
  if ((traits & kSeesViews) != 0) task.flags |= kHasViews;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const pto_param& param = spec.params[p];
    Param& bound = args.params[p];
    bound.mode = static_cast<uint8_t>(param.mode) & 0x7F;
    bound.is_region = param.region != nullptr;
    bound.shadow = 0;
    if (param.region != nullptr && (task.flags & kIsParent) != 0) {
      engine.store.declared[uint64_t{slot} * PTO_MAX_PARAMS + p] = *param.region;
    }
    const Handle* handle = buffers.handles[p];
    if (handle != nullptr) [[likely]] {
      bound.handle = engine.store.index_of(*handle);
      bound.address = handle->address + (param.region != nullptr ? param.region->offset : 0);
    } else {
      bound.handle = kNone;
      bound.address = engine.store.distance(param.address);
    }
    if ((traits & kSeesViews) != 0) note_view(engine, slot, p, param, handle != nullptr ? handle->bytes : 0);
    task.num_params = static_cast<uint8_t>(p + 1);
    if (engine.store.lies_in_heap(bound.address)) {
      use_heap(engine.store, bound.address, thread);
      task.flags |= kUsesHeap;
    } else if (engine.store.header->is_shared != 0) [[unlikely]] {
      throw_error(PTO_BAD_ARGUMENT,
                  "[runtime.submit] with two processes every buffer must lie in the shared file; got parameter ", p,
                  " outside it; use pto_alloc or runtime-owned outputs");
    }
  }
  if (spec.predicate != 0) {
    args.predicate = resolve(engine, spec.predicate, "submit").address;
    task.flags |= kHasPredicate;
  }
}

// Makes a node for every box of the task before anything is linked; removes stale nodes for room.
bool prepare_boxes(Engine& engine, const SlotArgs& args, const pto_task_spec& spec, uint32_t thread) {
  ChunkPool pool{engine, engine.thread_slot(thread)};
  const auto prepare_handle = [&](Handle& named, int mode, const pto_region* region, bool is_first_pass) {
    if ((named.flags & kFrozen) != 0) return true;
    Handle& handle = tracked(engine, named, mode, region, thread);
    if (region == nullptr && (handle.flags & kHasRegions) == 0) return true;
    if (is_first_pass) return begin_boxes(engine.boxes, engine.store.index_of(handle), handle);
    return ensure_box(engine.boxes, engine.store.index_of(handle), handle, box_of(handle, region));
  };
  // First mark every buffer with boxes, because the task may name one both as a whole and by a box.
  const auto prepare = [&] {
    for (const bool is_first_pass : {true, false}) {
      for (uint32_t p = 0; p < spec.num_params; ++p) {
        const Param& param = args.params[p];
        if (param.mode == PTO_NO_DEP || param.handle == kNone) continue;
        if (!prepare_handle(engine.store.handles[param.handle], param.mode, spec.params[p].region, is_first_pass)) {
          return false;
        }
      }
      if (spec.predicate == 0) continue;
      if (!prepare_handle(resolve(engine, spec.predicate, "submit"), PTO_INPUT, nullptr, is_first_pass)) return false;
    }
    return true;
  };
  if (prepare()) return true;
  uint32_t freed = 0;
  for (uint32_t h = 0; h < engine.store.header->pools.fresh_handles.load(std::memory_order_relaxed); ++h) {
    Handle& handle = engine.store.handles[h];
    if ((handle.flags & kHasRegions) != 0)
      freed += sweep_boxes(engine.boxes, engine.store.index_of(handle), handle, pool, false);
  }
  return freed > 0 && prepare();
}

// One critical section for all parameters, so that two submitters see each other's tasks in one order.
inline void link(Engine& engine, uint32_t slot, TaskRef self, const pto_task_spec& spec, uint32_t thread,
                 Resolved& buffers, uint32_t traits, bool& is_recorded) {
  Slot& task = engine.store.slots[slot];
  SlotArgs& args = engine.store.args[slot];
  Header& header = *engine.store.header;
  const bool is_child = task.parent != 0;
  const bool is_observed = engine.num_observers.load(std::memory_order_relaxed) != 0;
  bool has_boxes = (traits & kHasBoxes) != 0 || engine.graph != nullptr;
  SubmitGuard guard(header, thread, engine.fences, is_child, has_boxes);
  reclaim_chunks_if_few(engine, thread, has_boxes);
  if ((traits & kHasMore) != 0) {
    for (uint32_t w = 0; w < spec.num_waits; ++w) {
      add_producer(engine, task, spec.waits[w].value, thread);
      add_producer(engine, task, (spec.waits[w].event & 0xFFFFFFFF) << 32 | kIsEvent, thread);
    }
  }
  const auto settle = [&] {
    for (uint32_t p = 0; p < spec.num_params; ++p) {
      if (buffers.handles[p] != nullptr && !is_child) settle_buffer(engine, *buffers.handles[p], thread);
    }
    if (spec.predicate != 0 && !is_child) settle_buffer(engine, resolve(engine, spec.predicate, "submit"), thread);
  };
  settle();
  // Since the check, another submitter may have begun to use boxes of the same buffer; and children have their own
  // handles.
  bool uses_boxes = false;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    Handle* handle = buffers.handles[p];
    if (handle == nullptr) continue;
    const auto mode = static_cast<pto_mode>(args.params[p].mode);
    if (mode == PTO_NO_DEP || (handle->flags & kFrozen) != 0) {
      buffers.handles[p] = nullptr;
      continue;
    }
    if (is_child || handle->owner != 0) {
      buffers.handles[p] = handle = &tracked(engine, *handle, mode, spec.params[p].region, thread);
    }
    uses_boxes |= (handle->flags & kHasRegions) != 0;
  }
  Handle* predicate = nullptr;
  if (spec.predicate != 0) {
    predicate = &tracked(engine, resolve(engine, spec.predicate, "submit"), PTO_INPUT, nullptr, thread);
    uses_boxes |= (predicate->flags & kHasRegions) != 0;
  }
  if (uses_boxes && !has_boxes) {
    has_boxes = true;
    guard.lock_boxes();
  }
  for (bool is_stuck = false; has_boxes && !prepare_boxes(engine, args, spec, thread);) {
    if (is_stuck) raise_deadlock(engine, thread, Resource::kRegions, spec.num_params);
    guard.unlock();
    is_stuck = wait_for_room(engine, thread, Resource::kRegions, spec.num_params);
    guard.lock();
    settle();
  }
  const uint64_t sequence = header.sequence.load(std::memory_order_relaxed) + (is_child ? 0 : 1);
  task.sequence.store(sequence, std::memory_order_relaxed);
  if (!is_child) {
    header.sequence.store(sequence, std::memory_order_release);
    if (engine.has_failures()) [[unlikely]]
      sweep_failures_if_many(engine, has_boxes);
  }
  for (uint32_t a = 0; a < spec.num_after; ++a) {
    if (spec.after[a] != 0) order_after(engine, task, spec.after[a] | kCarriesPoison, thread);
  }
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (buffers.handles[p] == nullptr) continue;
    collect_param(engine, slot, thread, *buffers.handles[p], spec.params[p].region, args.params[p].mode);
  }
  if (predicate != nullptr) collect_param(engine, slot, thread, *predicate, nullptr, PTO_INPUT);
  if (is_child) Countdown::join(engine.store.slots[task.parent - 1].children);
  is_recorded = true;
  uint32_t num_mutexes = 0;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (buffers.handles[p] == nullptr) continue;
    record_param(engine, self, thread, *buffers.handles[p], spec.params[p].region, args.params[p].mode);
    if (args.params[p].mode == PTO_COMMUTE) args.mutexes[num_mutexes++] = engine.store.index_of(*buffers.handles[p]);
  }
  if (predicate != nullptr) record_param(engine, self, thread, *predicate, nullptr, PTO_INPUT);
  if (num_mutexes > 0) use_mutexes(task, args, num_mutexes);
  if (is_observed) [[unlikely]] {
    if (engine.graph != nullptr) engine.graph->add(engine.store, slot, spec);
    engine.replays->add(slot, spec, thread, (traits & kHasOutputs) != 0 ? buffers.fresh : 0);
  }
}

// A reduction writes its own partial value; a second task adds it to the target. These second tasks form a chain in the
// order of submission, so the bits of the sum do not depend on timing.
pto_task submit_reduction(Engine& engine, const pto_task_spec& spec) {
  pto_param params[PTO_MAX_PARAMS];
  std::copy(spec.params, spec.params + spec.num_params, params);
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (params[p].mode != PTO_REDUCE) continue;
    params[p].bytes = resolve(engine, params[p].handle, "submit").bytes;
    params[p].mode = PTO_OUTPUT;
    params[p].handle = 0;
  }
  pto_task_spec partial = spec;
  partial.params = params;
  const pto_task task = submit(engine, partial);
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
    submit(engine, combine);
  }
  return task;
}

}  // namespace

bool run_here(Engine& engine, uint32_t slot, uint32_t thread) {
  const Slot& task = engine.store.slots[slot];
  const bool is_ready = (task.num_producers | task.more_producers) == 0;
  const bool may_run = (task.flags & (kUsesMutexes | kHasTarget)) == 0 && engine.store.header->is_shared == 0 &&
                       can_help(engine, slot) && (engine.thread_slot(thread).classes >> task.type_class & 1) != 0;
  if (!is_ready || !may_run) return false;
  Blocking let_others_run;
  const DefaultFloatModes modes;  // as on a worker
  run_alone(engine, slot, thread);
  return true;
}

// Frees a slot whose task is not visible yet.
void abandon(Engine& engine, uint32_t slot) {
  Slot& task = engine.store.slots[slot];
  const uint64_t generation = TaskWord::generation(task.word);
  if ((task.flags & kUsesHeap) != 0) {
    if (release_heap(engine.store, task, engine.store.args[slot])) wake_waiters(engine);
  }
  ChunkPool pool{engine, engine.thread_slot(engine.store.submitter_of(slot))};
  give_chunks(pool, task.more_producers);
  const TaskWordBits word = TaskWord::complete(task.word, generation + 1);
  if ((word & TaskWord::kWatched) != 0) wake_waiters(engine);
}

void take_back(Engine& engine, uint32_t slot, uint32_t thread, bool is_recorded) {
  if (is_recorded) return start_empty(engine, slot, thread);
  abandon(engine, slot);
}

void note_submission(Engine& engine, SlotArgs& args, uint32_t thread) {
  args.scope_depth = static_cast<int32_t>(engine.thread_slot(thread).depth);
  args.submit_ticks = ticks();
  args.ready_ticks = 0;
}

// Inside a task: its own buffers, and the parameters that it declared, tracked by a separate handle for its children.
Handle& tracked(Engine& engine, Handle& handle, int mode, const pto_region* box, uint32_t thread) {
  const uint32_t parent = running.engine == &engine ? running.parent : 0;
  if (handle.owner == parent) return handle;
  const uint32_t index = engine.store.index_of(handle);
  Param* first = nullptr;  // the first of the parent's parameters with this buffer; it has the children's handle
  bool is_allowed = false;
  for (uint32_t p = 0; parent != 0 && p < engine.store.slots[parent - 1].num_params; ++p) {
    Param& declared = engine.store.args[parent - 1].params[p];
    if (declared.handle != index) continue;
    if (first == nullptr) first = &declared;
    const pto_region& limit = engine.store.declared[uint64_t{parent - 1} * PTO_MAX_PARAMS + p];
    is_allowed |= (mode == PTO_INPUT || declared.mode != PTO_INPUT) &&
                  (declared.is_region == 0 || lies_in(box_of(handle, box), box_of(handle, &limit)));
  }
  if (!is_allowed) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.submit] a child may access only what its parent declared (and write only what it ",
                "declared to write) and buffers made inside it; got handle ", index + 1, " with mode ", mode,
                box != nullptr ? " and a box" : "", "; add it to the parent's parameters");
  }
  if (first->shadow == 0) {
    first->shadow = take_handle(engine, thread) + 1;
    Handle& shadow = engine.store.handles[first->shadow - 1];
    shadow.address = handle.address;
    shadow.bytes = handle.bytes;
  }
  return engine.store.handles[first->shadow - 1];
}

pto_task submit_any(Engine& engine, const pto_task_spec& spec, uint32_t thread) {
  Resolved buffers;
  const uint32_t traits = check_spec(engine, spec, buffers);
  if ((traits & kHasReductions) != 0) [[unlikely]]
    return submit_reduction(engine, spec);
  const uint32_t slot = take_slot(engine, thread);
  Slot& task = engine.store.slots[slot];
  const TaskRef self = engine.store.name_at(slot);
  bool is_recorded = false;
  try {
    fill(engine, task, engine.store.args[slot], spec, thread);
    bind_params(engine, slot, spec, thread, buffers, traits);
    link(engine, slot, self, spec, thread, buffers, traits, is_recorded);
  } catch (...) {
    take_back(engine, slot, thread, is_recorded);
    throw;
  }
  count_submitted(engine, thread, 1);
  if ((spec.flags & PTO_RUN_HERE) != 0 && run_here(engine, slot, thread)) return self;
  start_submitted(engine, slot, thread);
  return self;
}

}  // namespace tilewise::tasks
