// The fast path of submission, for nearly every task: whole registered buffers, read or written, outside of tasks,
// without other options.
//
// It has the steps of the general path (submit.cc) without its checks for other cases.
#include <bit>

#include "tasks/engine/builtin_kernels.h"
#include "tasks/engine/thread_slots.h"
#include "tasks/run/link.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/submit/checks.h"
#include "tasks/submit/submit.h"
#include "tasks/wait/room.h"

namespace tilewise::tasks {

namespace {

/// Checks the arguments of a built-in kernel. Returns whether the fast path may take the task; its buffers are still to
/// be checked.
[[gnu::noinline, gnu::cold]] bool has_plain_flags(Engine& engine, const pto_task_spec& spec) {
  if (engine.store.kernels[spec.kernel].flags != kIsBuiltin || spec.params == nullptr || spec.scalars == nullptr ||
      spec.num_params > PTO_MAX_PARAMS) {
    return false;
  }
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    if (spec.params[p].handle == 0 || spec.params[p].region != nullptr) return false;  // the general path checks it
  }
  check_builtin(engine, spec);
  return true;
}

/// Whether the specification permits the fast path; its buffers are checked later, one by one.
[[gnu::always_inline]] inline bool is_plain(Engine& engine, const pto_task_spec& spec) {
  const Header& header = *engine.store.header;
  const bool asks_for_more =
      (spec.num_after | spec.num_waits | static_cast<uint32_t>(spec.target_worker) |
       (spec.flags & ~uint32_t{PTO_KEEP | PTO_RUN_HERE}) | std::bit_cast<uint32_t>(spec.deadline_s)) != 0 ||
      (spec.predicate | reinterpret_cast<uintptr_t>(spec.name)) != 0;
  return !asks_for_more && static_cast<uint32_t>(spec.kernel) < header.num_kernels.load(std::memory_order_acquire) &&
         (engine.store.kernels[spec.kernel].flags == 0 || has_plain_flags(engine, spec)) &&
         static_cast<uint32_t>(spec.worker_type) < kNumTypes &&
         (header.served_classes >> header.class_of_type[spec.worker_type] & 1) != 0 &&
         spec.num_params <= PTO_MAX_PARAMS && (spec.num_params == 0 || spec.params != nullptr) &&
         spec.num_scalars <= PTO_MAX_SCALARS && (spec.num_scalars == 0 || spec.scalars != nullptr) &&
         engine.num_observers.load(std::memory_order_relaxed) == 0;
}

/// The mode of a plain parameter: read, write or both.
int plain_mode(const pto_param& param) {
  if (static_cast<uint32_t>(param.mode) > PTO_INOUT) __builtin_unreachable();
  return param.mode;
}

/// Writes the addresses; returns the place for the scalars.
[[gnu::always_inline]] inline uint64_t* place_arguments(Engine& engine, Slot& task, SlotArgs& args,
                                                        const pto_task_spec& spec, Handle* const* handles) {
  const uint32_t num_params = spec.num_params;
  const uint32_t num_arguments = num_params + spec.num_scalars;
  if (num_arguments <= kMaxInlineArguments && engine.store.header->is_shared == 0) [[likely]] {
    task.room = static_cast<uint8_t>(kInlineProducers - num_arguments);
    void** const addresses = task.addresses();
    std::byte* const base = engine.store.base;
    for (uint32_t p = 0; p < num_params; ++p) addresses[p] = base + handles[p]->address;
    return reinterpret_cast<uint64_t*>(addresses + num_params);
  }
  protocols::prefetch_for_write(&args + kPrefetchAhead);
  for (uint32_t p = 0; p < num_params; ++p) {
    args.params[p] = {handles[p]->address, engine.store.index_of(*handles[p]),
                      static_cast<uint8_t>(spec.params[p].mode), 0, 0};
  }
  return args.scalars(num_params);
}

/// A task that overwrites what its own producers have read finds each of them twice. The two are merged into one
/// reference, so that the task needs no additional memory for references.
[[gnu::noinline, gnu::cold]] void merge_or_order_after(Engine& engine, Slot& task, TaskRef producer, uint32_t thread) {
  for (uint32_t p = 0; p < task.num_producers; ++p) {
    if (without_flags(task.producers[p]) != without_flags(producer)) continue;
    task.producers[p] |= producer;
    return;
  }
  order_after(engine, task, producer, thread);
}

// For buffers with many readers.
[[gnu::noinline, gnu::cold]] void collect_many(Engine& engine, Slot& task, uint32_t thread, Handle& handle, int mode) {
  ChunkPool pool{engine, engine.thread_slot(thread)};
  collect_rest(handle.state, pool, mode, [&](TaskRef producer) { order_after(engine, task, producer, thread); });
}

[[gnu::noinline, gnu::cold]] void record_many(Engine& engine, TaskRef task, uint32_t thread, Handle& handle, int mode) {
  ChunkPool pool{engine, engine.thread_slot(thread)};
  record(handle.state, pool, mode, task);
}

/// Orders the task after those that use its buffers. Returns false if another submitter has just begun to use boxes of
/// one of them; the task is then not visible yet. is_recorded: set before the first buffer's state names the task, so
/// it is right even if this throws.
[[gnu::always_inline]] inline bool link_plain(Engine& engine, Slot& task, TaskRef self, const pto_task_spec& spec,
                                              Handle* const* handles, uint32_t thread, bool& is_recorded) {
  Header& header = *engine.store.header;
  const uint32_t num_params = spec.num_params;
  const pto_param* const params = spec.params;
  const SubmitGuard guard(header, thread, engine.fences);
  reclaim_chunks_if_few(engine, thread, false);
  const uint64_t sequence = header.sequence.load(std::memory_order_relaxed) + 1;
  task.sequence.store(sequence, std::memory_order_relaxed);
  header.sequence.store(sequence, std::memory_order_release);
  if (engine.has_failures()) [[unlikely]]
    sweep_failures_if_many(engine, false);
  TaskRef producers[kMaxFew * PTO_MAX_PARAMS];
  uint32_t num_found = 0;
  const auto find = [&](TaskRef producer) __attribute__((always_inline)) { producers[num_found++] = producer; };
  for (uint32_t p = 0; p < num_params; ++p) {
    Handle& handle = *handles[p];
    if (handle.flags != kUsed) [[unlikely]]
      return false;
    collect_few(handle.state, plain_mode(params[p]), find);
    if (handle.state.has_chunks()) [[unlikely]]
      collect_many(engine, task, thread, handle, params[p].mode);
  }
  for (uint32_t f = 0; f < num_found; ++f) {
    if (task.num_producers < task.room) [[likely]] {
      order_after(engine, task, producers[f], thread);
    } else {
      merge_or_order_after(engine, task, producers[f], thread);
    }
  }
  // Ended readers are dropped from a buffer's list. Ended writers stay, because their failure must reach later tasks.
  const auto has_ended = [&](TaskRef reader) __attribute__((always_inline)) {
    return TaskWord::has_ended(engine.store.slots[slot_of(reader)].word, generation_of(reader));
  };
  is_recorded = true;
  for (uint32_t p = 0; p < num_params; ++p) {
    if (record_few(handles[p]->state, plain_mode(params[p]), self, has_ended)) [[likely]]
      continue;
    record_many(engine, self, thread, *handles[p], params[p].mode);
  }
  return true;
}

}  // namespace

pto_task submit(Engine& engine, const pto_task_spec& spec) {
  const bool is_usual = last_context.engine == engine.id_open && running.engine != &engine;
  if (!is_usual || !is_plain(engine, spec)) [[unlikely]]
    return submit_any(engine, spec, current_thread(engine));
  const uint32_t thread = last_context.thread;
  const Header& header = *engine.store.header;
  const uint32_t num_params = spec.num_params;
  Handle* handles[PTO_MAX_PARAMS];
  for (uint32_t p = 0; p < num_params; ++p) {
    const pto_param& param = spec.params[p];
    const auto index = static_cast<uint32_t>(param.handle) - 1;
    if (index >= header.max_handles) [[unlikely]]
      return submit_any(engine, spec, thread);
    Handle& handle = engine.store.handles[index];
    handles[p] = &handle;
    protocols::prefetch_for_write(&handle +
                                  kPrefetchAhead);  // buffers are often named in the order they were registered
    const bool is_same = handle.generation.load(std::memory_order_relaxed) == static_cast<uint32_t>(param.handle >> 32);
    if (!is_same || handle.flags != kUsed || param.region != nullptr || static_cast<uint32_t>(param.mode) > PTO_INOUT)
        [[unlikely]] {
      return submit_any(engine, spec, thread);
    }
  }
  const uint32_t slot = take_slot(engine, thread);
  Slot& task = engine.store.slots[slot];
  const TaskRef self = engine.store.name_at(slot);
  task.begin(spec.kernel, spec.priority, static_cast<uint8_t>(header.class_of_type[spec.worker_type]),
             (spec.flags & PTO_KEEP) != 0 ? uint16_t{kKeepsError} : uint16_t{0});
  task.num_params = static_cast<uint8_t>(num_params);
  task.num_scalars = static_cast<uint8_t>(spec.num_scalars);
  uint64_t* const scalars = place_arguments(engine, task, engine.store.args[slot], spec, handles);
  for (uint32_t s = 0, count = spec.num_scalars; s < count; ++s) scalars[s] = spec.scalars[s];
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr) [[unlikely]] {
    note_submission(engine, engine.store.args[slot], thread);
  }
  bool is_linked = false;
  bool is_recorded = false;
  try {
    is_linked = link_plain(engine, task, self, spec, handles, thread, is_recorded);
  } catch (...) {
    take_back(engine, slot, thread, is_recorded);
    throw;
  }
  if (!is_linked) [[unlikely]] {
    abandon(engine, slot);
    return submit_any(engine, spec, thread);
  }
  count_submitted(engine, thread, 1);
  if ((spec.flags & PTO_RUN_HERE) != 0 && run_here(engine, slot, thread)) return self;
  start_submitted(engine, slot, thread);
  return self;
}

}  // namespace tilewise::tasks
