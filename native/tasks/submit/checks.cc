// See checks.h.
#include "tasks/submit/checks.h"

#include <algorithm>

#include "tasks/engine/builtin_kernels.h"
#include "tasks/engine/thread_slots.h"
#include "tasks/run/events.h"
#include "tasks/submit/notes.h"

namespace tilewise::tasks {

namespace {

/// The number of contiguous bytes from the start of a box.
uint64_t run_of(const pto_region& box) {
  uint64_t run = box.size[box.ndim - 1];
  for (uint32_t d = box.ndim - 1; d-- > 0;) {
    if (box.size[d] == 1) continue;
    if (box.stride[d] != run) break;
    run *= box.size[d];
  }
  return std::any_of(box.size, box.size + box.ndim, [](uint64_t size) { return size == 0; }) ? 0 : run;
}

constexpr uint32_t bit(pto_mode mode) { return 1u << mode; }

/// The modes allowed for a built-in kernel's target (parameter 0) and source. A buffer that the mode overwrites has no
/// value to read; one that the mode reads must not change.
uint32_t modes_of(const BuiltinKernel& kernel, uint32_t p) {
  const uint32_t both = bit(PTO_INOUT) | bit(PTO_COMMUTE) | bit(PTO_NO_DEP);
  if (p == 1) return both | bit(PTO_INPUT);
  return kernel.reads_target ? both : both | bit(PTO_OUTPUT) | bit(PTO_REDUCE);
}

/// Checks the kernel that adds the partial values of a reduction, if it is a built-in.
void check_combine(const Engine& engine, const pto_param& param, uint32_t number, uint64_t num_bytes) {
  if ((engine.store.kernels[param.combine].flags & kIsBuiltin) == 0) return;
  const BuiltinKernel& kernel = builtin_kernels()[static_cast<size_t>(param.combine)];
  if (kernel.num_params == 2 && num_bytes % kernel.item_bytes == 0) return;
  throw_error(PTO_BAD_ARGUMENT,
              "[runtime.submit] a reduction must name a kernel (target, partial) for the elements of its ",
              "buffer; got '", kernel.name, "' for ", num_bytes, " bytes in parameter ", number,
              "; choose the one for its type");
}

// Checks a parameter that is not just a whole buffer, read or written.
uint32_t check_param(Engine& engine, const pto_task_spec& spec, uint32_t p, Resolved& buffers) {
  const char* where = "[runtime.submit] ";
  const pto_param& param = spec.params[p];
  buffers.handles[p] = nullptr;
  if (static_cast<uint32_t>(param.mode) > PTO_NO_DEP) {
    throw_error(PTO_BAD_ARGUMENT, where, "a parameter's mode must be a pto_mode; got ", static_cast<int>(param.mode),
                " in parameter ", p, "; correct it");
  }
  if (param.handle == 0) {
    if (param.mode == PTO_OUTPUT && param.bytes > 0 && param.region == nullptr) return kHasOutputs;
    if (param.mode == PTO_NO_DEP && param.region == nullptr && engine.store.header->is_shared == 0) return kHasMore;
    throw_error(PTO_BAD_ARGUMENT, where, "parameter ", p, " must name a buffer; got handle 0",
                param.mode == PTO_OUTPUT ? " and 0 bytes" : "", "; register it, or pass an output with its bytes");
  }
  Handle& handle = resolve(engine, param.handle, "submit");
  buffers.handles[p] = &handle;
  const bool is_known =
      param.combine >= 0 && param.combine < static_cast<int32_t>(engine.store.header->num_kernels.load());
  if (param.mode == PTO_REDUCE && (!is_known || param.region != nullptr)) {
    throw_error(PTO_BAD_ARGUMENT, where, "a reduction must name a combine kernel and a whole buffer; got kernel ",
                param.combine, param.region != nullptr ? " and a region" : "", " in parameter ", p,
                "; use \"sum_f32\" or a kernel of your own");
  }
  if ((handle.flags & kFrozen) != 0 && param.mode != PTO_INPUT && param.mode != PTO_NO_DEP) {
    throw_error(PTO_BAD_ARGUMENT, where, "a frozen buffer must only be read; got mode ", static_cast<int>(param.mode),
                " in parameter ", p, "; call pto_freeze(handle, 0) first");
  }
  if (param.mode == PTO_REDUCE) check_combine(engine, param, p, handle.bytes);
  const uint32_t traits = param.mode == PTO_REDUCE ? kHasReductions : kHasMore;
  if (param.region == nullptr) return (handle.flags & kHasRegions) != 0 ? traits | kHasBoxes : traits;
  check_region(handle, *param.region, "submit", static_cast<int>(p));
  return traits | kHasBoxes;
}

uint32_t check_more(Engine& engine, const pto_task_spec& spec) {
  uint32_t traits = 0;
  if (spec.predicate != 0) {
    const Handle& predicate = resolve(engine, spec.predicate, "submit");
    if (predicate.bytes < sizeof(uint32_t)) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.submit] a predicate must have at least 4 bytes; got ", predicate.bytes,
                  "; register a uint32_t");
    }
    if ((predicate.flags & kHasRegions) != 0) traits = kHasBoxes;
  }
  for (uint32_t a = 0; a < spec.num_after; ++a) {
    if (slot_of(spec.after[a]) < engine.store.header->num_slots) {
      const TaskWordBits word = TaskWord::look(engine.store.slots[slot_of(spec.after[a])].word);
      if (generation_of(spec.after[a]) <= TaskWord::generation_in(word))
        continue;  // a later id would never complete, or would be this task
    }
    throw_error(PTO_BAD_ARGUMENT, "[runtime.submit] an explicit edge must come from a task of this runtime; got ",
                spec.after[a], "; check that its submit succeeded");
  }
  for (uint32_t w = 0; w < spec.num_waits; ++w) event_value(engine, spec.waits[w].event);
  return traits;
}

}  // namespace

void check_region(const Handle& handle, const pto_region& box, const char* where, int param) {
  bool is_good = box.ndim >= 1 && box.ndim <= PTO_MAX_DIMS && box.stride[box.ndim - 1] == 1;
  uint64_t end = box.offset;
  for (uint32_t d = 0; is_good && d < box.ndim; ++d) {
    if (box.size[d] == 0) continue;
    uint64_t span = 0;
    is_good =
        !__builtin_mul_overflow(box.size[d] - 1, box.stride[d], &span) && !__builtin_add_overflow(end, span, &end);
  }
  if (is_good && end < handle.bytes) return;
  throw_error(PTO_BAD_ARGUMENT, "[runtime.", where, "] a region must have 1 to ", PTO_MAX_DIMS,
              " dimensions, the last with stride 1, and lie inside its buffer of ", handle.bytes, " bytes; got ",
              box.ndim, " dimensions from byte ", box.offset, " to ", end,
              param >= 0 ? " in parameter " + std::to_string(param) : "", "; correct it");
}

void check_builtin(Engine& engine, const pto_task_spec& spec) {
  const BuiltinKernel& kernel = builtin_kernels()[static_cast<size_t>(spec.kernel)];
  const char* where = "[runtime.submit] ";
  if (spec.num_params != kernel.num_params || spec.num_scalars != kernel.num_scalars) {
    throw_error(PTO_BAD_ARGUMENT, where, "the kernel '", kernel.name, "' takes ",
                kernel.num_params == 1 ? "a target" : "a target and a source", ", and as scalars the number of bytes",
                kernel.num_scalars == 2 ? " and the value of each" : "", "; got ", spec.num_params, " parameters and ",
                spec.num_scalars, " scalars; pass ", kernel.num_params, " and ", kernel.num_scalars);
  }
  const uint64_t num_bytes = spec.scalars[0];
  if (num_bytes % kernel.item_bytes != 0) {
    throw_error(PTO_BAD_ARGUMENT, where, "the kernel '", kernel.name, "' works on elements of ", kernel.item_bytes,
                " bytes; got ", num_bytes, " bytes, which is no multiple; pass the number of bytes, not of elements");
  }
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const pto_param& param = spec.params[p];
    if (static_cast<uint32_t>(param.mode) > PTO_NO_DEP || (modes_of(kernel, p) >> param.mode & 1) == 0) [[unlikely]] {
      constexpr const char* kUses[] = {"reads", "overwrites", "reads and writes"};
      throw_error(PTO_BAD_ARGUMENT, where, "the kernel '", kernel.name, "' ",
                  kUses[p == 1                ? 0
                        : kernel.reads_target ? 2
                                              : 1],
                  p == 0 ? " its target" : " its source", ", and the parameter must say so; got mode ",
                  static_cast<int>(param.mode), " in parameter ", p, "; pass ",
                  p == 1                ? "an input"
                  : kernel.reads_target ? "PTO_INOUT or PTO_COMMUTE"
                                        : "PTO_OUTPUT, PTO_INOUT, PTO_COMMUTE or PTO_REDUCE");
    }
    if (param.handle == 0 && param.mode == PTO_NO_DEP) continue;  // an address: the caller is responsible
    const uint64_t available = param.handle == 0         ? param.bytes
                               : param.region != nullptr ? run_of(*param.region)
                                                         : resolve(engine, param.handle, "submit").bytes;
    if (num_bytes <= available) continue;
    const bool has_gaps = param.handle != 0 && param.region != nullptr && param.region->ndim > 1;
    throw_error(PTO_BAD_ARGUMENT, where, "the kernel '", kernel.name,
                "' needs as many contiguous bytes as it works on; got ", num_bytes, " for parameter ", p,
                ", which has ", available,
                has_gaps ? " before its first gap; submit a task per row, or a kernel that knows strides"
                         : "; pass fewer, or a larger buffer");
  }
}

// Checks everything before anything is allocated.
uint32_t check_spec(Engine& engine, const pto_task_spec& spec, Resolved& buffers) {
  const char* where = "[runtime.submit] ";
  if (spec.num_params > PTO_MAX_PARAMS || spec.num_scalars > PTO_MAX_SCALARS) {
    throw_error(PTO_BAD_ARGUMENT, where, "a task must have at most ", PTO_MAX_PARAMS, " parameters and ",
                PTO_MAX_SCALARS, " scalars; got ", spec.num_params, " and ", spec.num_scalars,
                "; pack several into one buffer");
  }
  const bool has_arrays =
      (spec.num_params == 0 || spec.params != nullptr) && (spec.num_scalars == 0 || spec.scalars != nullptr) &&
      (spec.num_after == 0 || spec.after != nullptr) && (spec.num_waits == 0 || spec.waits != nullptr);
  if (!has_arrays || (spec.flags & ~uint32_t{PTO_KEEP | PTO_RUN_HERE}) != 0) {
    throw_error(PTO_BAD_ARGUMENT, where, "every count needs its array, and undefined flags must be 0; got ",
                has_arrays ? "undefined flags" : "a NULL array with a count", "; begin with pto_task_spec spec = {0}");
  }
  const Header& header = *engine.store.header;
  const auto is_known = [&](int32_t kernel) {
    return kernel >= 0 && kernel < static_cast<int32_t>(header.num_kernels.load(std::memory_order_acquire));
  };
  if (!is_known(spec.kernel) && spec.kernel != PTO_NO_KERNEL) {
    throw_error(PTO_BAD_ARGUMENT, where, "a kernel must have been added to this runtime; got id ", spec.kernel,
                "; call pto_kernel_add or pto_kernel_find");
  }
  if (static_cast<uint32_t>(spec.worker_type) >= kNumTypes) {
    throw_error(PTO_BAD_ARGUMENT, where, "worker_type must be one of four; got ", static_cast<int>(spec.worker_type),
                "; choose PTO_CUBE, PTO_VECTOR, PTO_AI_CPU or PTO_ACCELERATOR");
  }
  const uint32_t kind = header.class_of_type[spec.worker_type];
  if ((header.served_classes >> kind & 1) == 0) {
    throw_error(PTO_BAD_ARGUMENT, where, "some worker must serve the task's type; got type ",
                static_cast<int>(spec.worker_type), ", which none serves; correct worker_types of the configuration");
  }
  if (spec.target_worker != 0 &&
      (spec.target_worker < 0 || spec.target_worker > static_cast<int32_t>(header.num_workers) ||
       (engine.store.thread_slots[spec.target_worker - 1].classes >> kind & 1) == 0)) {
    throw_error(PTO_BAD_ARGUMENT, where, "target_worker must name a worker that serves the task's type; got worker ",
                spec.target_worker - 1, " of ", header.num_workers, " workers; drop the hint or correct it");
  }
  const bool asks_more = (spec.num_after | spec.num_waits) != 0 || spec.predicate != 0;
  uint32_t traits = asks_more || running.engine == &engine ? uint32_t{kHasMore} : 0u;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const pto_param& param = spec.params[p];
    if (param.handle != 0 && param.region == nullptr && static_cast<uint32_t>(param.mode) <= PTO_INOUT) [[likely]] {
      Handle& handle = resolve(engine, param.handle, "submit");
      buffers.handles[p] = &handle;
      if ((handle.flags & (kFrozen | kHasRegions | kHasOwner)) == 0) [[likely]]
        continue;
    }
    traits |= check_param(engine, spec, p, buffers);
  }
  if (traits != 0) traits |= check_more(engine, spec);
  if (spec.name != nullptr || spec.deadline_s != 0) check_extras(spec);
  const uint32_t flags = spec.kernel >= 0 ? engine.store.kernels[spec.kernel].flags : 0;
  if ((flags & kIsBuiltin) != 0) check_builtin(engine, spec);
  if ((flags & PTO_VIEWS) != 0) {
    check_views(spec, buffers.handles);
    traits |= kSeesViews;
  }
  return traits;
}

}  // namespace tilewise::tasks
