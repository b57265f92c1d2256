// See buffers.h.
#include "tasks/submit/buffers.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "tasks/engine/thread_slots.h"
#include "tasks/order/boxes.h"
#include "tasks/order/dependencies.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/submit/checks.h"
#include "tasks/submit/submit.h"
#include "tasks/wait/room.h"

namespace tilewise::tasks {

namespace {

/// An empty region: a task may wait for a buffer that it declared by a box.
constexpr pto_region kNoBytes = {0, 1, {0}, {1}};

}  // namespace

pto_handle register_buffer(Engine& engine, void* address, uint64_t bytes) {
  if (address == nullptr || bytes == 0 || bytes > UINTPTR_MAX - reinterpret_cast<uintptr_t>(address)) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.register] a buffer must have an address and bytes; got ", address, " and ",
                bytes, "; pass the memory itself");
  }
  const uint64_t distance = engine.store.distance(address);
  if (distance < engine.store.header->total_bytes) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.register] a buffer must be the caller's own memory; got memory of the runtime's heap; ",
                "use the handle of its allocation");
  }
  if (engine.store.header->is_shared != 0) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.register] with two processes every buffer must lie in the shared file; got one outside; ",
                "use pto_alloc");
  }
  const uint32_t index = take_handle(engine, current_thread(engine));
  Handle& handle = engine.store.handles[index];
  handle.address = distance;
  handle.bytes = bytes;
  return handle_name(handle, index);
}

void unregister(Engine& engine, pto_handle name, double timeout_s, bool helps) {
  Handle& handle = resolve(engine, name, "unregister");
  if ((handle.flags & kOwnedByHeap) != 0) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.unregister] the runtime frees its own buffers; got one of them; end its scope");
  }
  wait_for_buffer(engine, name, nullptr, PTO_OUTPUT, timeout_s, helps);
  give_handle(engine, static_cast<uint32_t>(name & 0xFFFFFFFF) - 1, current_thread(engine));
}

void freeze(Engine& engine, pto_handle name, bool frozen) {
  Handle& handle = resolve(engine, name, "freeze");
  // Afterwards no writer is left, so readers need not be tracked.
  if (frozen) wait_for_buffer(engine, name, nullptr, PTO_OUTPUT, PTO_FOREVER, true);
  const uint32_t thread = current_thread(engine);
  const SubmitGuard guard(*engine.store.header, thread, engine.fences);
  settle_buffer(engine, handle, thread);
  ++engine.num_freezes;
  handle.flags = frozen ? handle.flags | kFrozen : handle.flags & ~kFrozen;
}

pto_handle allocate(Engine& engine, uint64_t bytes) {
  if (bytes == 0) throw_error(PTO_BAD_ARGUMENT, "[runtime.alloc] a buffer must have bytes; got 0; pass its size");
  const uint32_t thread = current_thread(engine);
  const uint64_t address = allocate_heap(engine, thread, aligned(bytes));
  const uint32_t index = take_handle(engine, thread);
  Handle& handle = engine.store.handles[index];
  handle.address = address;
  handle.bytes = bytes;
  handle.flags |= kOwnedByHeap;
  Scope& scope = engine.thread_slot(thread).scopes[engine.thread_slot(thread).depth];
  handle.next = scope.first_handle;
  scope.first_handle = index + 1;
  return handle_name(handle, index);
}

void* address_of(Engine& engine, pto_handle name) { return engine.store.at(resolve(engine, name, "address").address); }

void* wait_for_buffer(Engine& engine, pto_handle name, const pto_region* box, int mode, double timeout_s, bool helps) {
  const uint32_t thread = current_thread(engine);
  ChunkPool pool{engine, engine.thread_slot(thread)};
  std::vector<TaskRef> producers;
  Handle* handle = &resolve(engine, name, "read");
  if (box != nullptr) check_region(*handle, *box, "read", -1);
  {
    // Only a task itself tracks its children; and a replay may keep the lock until the task has ended.
    const SubmitGuard guard(*engine.store.header, thread, engine.fences, running.engine == &engine);
    if (handle->owner != 0 || running.engine == &engine) {
      handle = &tracked(engine, *handle, PTO_INPUT, box != nullptr ? box : &kNoBytes, thread);
    } else {
      settle_buffer(engine, *handle, thread);
    }
    const auto note = [&](TaskRef ref) { producers.push_back(ref); };
    if ((handle->flags & kHasRegions) != 0) {
      std::lock_guard boxes_guard(engine.store.header->boxes_lock);
      collect_boxes(engine.boxes, engine.store.index_of(*handle), *handle, box, mode, pool, note);
    } else {
      collect(handle->state, pool, mode, note);
    }
  }
  const int64_t begin = timeout_s > 0 ? now_ns() : 0;
  for (const TaskRef producer : producers) {
    const double spent = timeout_s > 0 ? static_cast<double>(now_ns() - begin) * 1e-9 : 0;
    const double left = timeout_s > 0 ? std::max(0.0, timeout_s - spent) : timeout_s;
    const int status = wait(engine, without_flags(producer), left, helps);
    if (status == PTO_TIMEOUT) {
      throw_error(PTO_TIMEOUT,
                  "[runtime.read] the buffer's tasks must end within the timeout; got a task that still runs ",
                  "after ", timeout_s, " s; wait longer, or cancel it");
    }
    if ((producer & kCarriesPoison) == 0 || status == PTO_OK) continue;
    std::string text;
    task_error(engine, without_flags(producer), &text);
    throw_error(status, text);
  }
  return engine.store.at(handle->address + (box != nullptr ? box->offset : 0));
}

// Submits an empty task that overwrites the bytes on behalf of the caller: it waits for all earlier tasks and clears
// their poison.
void* wait_to_write(Engine& engine, pto_handle name, const pto_region* box, double timeout_s, bool helps) {
  if (box != nullptr) check_region(resolve(engine, name, "write"), *box, "write", -1);
  pto_param param{};
  param.mode = PTO_OUTPUT;
  param.handle = name;
  param.region = box;
  pto_task_spec spec{};
  spec.kernel = PTO_NO_KERNEL;
  spec.params = &param;
  spec.num_params = 1;
  for (uint32_t type = 0; (engine.store.header->served_classes >> engine.store.header->class_of_type[type] & 1) == 0;
       ++type) {
    spec.worker_type = static_cast<pto_worker_type>(type + 1);
  }
  if (wait(engine, submit(engine, spec), timeout_s, helps) == PTO_TIMEOUT) {
    throw_error(PTO_TIMEOUT,
                "[runtime.write] the buffer's tasks must end within the timeout; got one that still runs after ",
                timeout_s, " s; wait longer, or cancel it");
  }
  return static_cast<std::byte*>(address_of(engine, name)) + (box != nullptr ? box->offset : 0);
}

void begin_scope(Engine& engine) {
  ThreadSlot& me = engine.thread_slot(current_thread(engine));
  if (me.depth == PTO_MAX_SCOPES) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.scope_begin] scopes must not nest deeper than ", PTO_MAX_SCOPES,
                "; got one more; end some first");
  }
  me.scopes[++me.depth] = {};
  me.num_open_scopes.store(me.depth, std::memory_order_release);
}

void end_scope(Engine& engine) {
  const uint32_t thread = current_thread(engine);
  ThreadSlot& me = engine.thread_slot(thread);
  if (me.depth <= me.base_depth) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.scope_end] a scope must be open; got none in this ",
                me.base_depth > 0 ? "task" : "thread", "; pair every scope_begin with one scope_end");
  }
  close_scope(engine, thread);
}

uint32_t depth(Engine& engine) { return engine.thread_slot(current_thread(engine)).depth; }

}  // namespace tilewise::tasks
