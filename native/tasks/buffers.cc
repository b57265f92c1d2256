// Handles, the heap and scopes. See engine.h.
#include <algorithm>
#include <mutex>

#include "tasks/engine.h"
#include "tasks/order/boxes.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/pool.h"

namespace tilewise::tasks {

namespace {

/// Asks for a buffer without naming any of its bytes: a task may wait for what it declared by a box.
constexpr pto_region kNoBytes = {0, 1, {0}, {1}};

constexpr uint32_t kHandleStock = 32;

}  // namespace

void Engine::raise_stale(pto_handle handle, const char* where) {
  raise(PTO_BAD_ARGUMENT, "[runtime.", where,
        "] a handle must be alive; got one that was unregistered, or whose scope ", "has ended (handle ",
        handle & 0xFFFFFFFF, ", generation ", handle >> 32, "); keep the scope open, or copy the result out of it");
}

// A handle costs one step from the thread's own stock.
uint32_t Engine::take_handle(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  if (me.free_handles == 0) refill_handles(seat_index);
  while (me.free_handles == 0) {
    wait_for_room(seat_index, Resource::kHandles, 1);
    refill_handles(seat_index);
  }
  const uint32_t index = me.free_handles - 1;
  Handle& handle = region_.handles[index];
  me.free_handles = handle.next;
  --me.num_free_handles;
  handle.state = {};
  handle.tree = {};
  handle.owner = running.engine == this ? running.parent : 0;
  handle.flags = handle.owner != 0 ? kUsed | kHasOwner : kUsed;
  handle.next = 0;
  return index;
}

void Engine::refill_handles(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  Header& header = *region_.header;
  std::lock_guard guard(header.pool_lock);
  // Near the end only one at a time, so that no stock keeps what another thread waits for.
  const uint32_t fresh = header.fresh_handles.load(std::memory_order_relaxed);
  const uint32_t wanted = header.max_handles - fresh >= 8 * kHandleStock ? kHandleStock : 1;
  for (uint32_t n = 0; n < wanted; ++n) {
    uint32_t index = header.free_handles;
    if (index != 0) {
      header.free_handles = region_.handles[index - 1].next;
      --header.num_free_handles;
    } else if (header.fresh_handles.load(std::memory_order_relaxed) < header.max_handles) {
      index = header.fresh_handles.fetch_add(1, std::memory_order_relaxed) + 1;
    } else {
      return;
    }
    region_.handles[index - 1].next = me.free_handles;
    me.free_handles = index;
    ++me.num_free_handles;
  }
}

// Its generation moves on at once: whoever still names it is told.
void Engine::give_handle(uint32_t index, uint32_t seat_index) {
  Handle& handle = region_.handles[index];
  Header& header = *region_.header;
  Seat& me = seat(seat_index);
  {
    // The states of buffers outside tasks are looked at by whoever sweeps the failures.
    const bool is_seen = has_failures() && (handle.flags & kHasOwner) == 0;
    const bool is_replayed = (handle.flags & (kReplayed | kFrozen)) != 0;
    const SubmitGuard guard(header, seat_index, fences_, !is_seen && !is_replayed);
    if (is_replayed) ++num_freezes_;
    settle_buffer(handle, seat_index);
    forget_accesses(handle, seat_index);
  }
  handle.generation.store(handle.generation.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  handle.flags = 0;
  handle.next = me.free_handles;
  me.free_handles = index + 1;
  ++me.num_free_handles;
  const bool is_short = header.fresh_handles.load(std::memory_order_relaxed) + 8 * kHandleStock > header.max_handles;
  if (me.num_free_handles <= (is_short ? 0 : 2 * kHandleStock)) return;
  {
    std::lock_guard guard(header.pool_lock);
    const uint32_t keep = is_short ? 0 : kHandleStock;
    while (me.num_free_handles > keep) {
      const uint32_t given = me.free_handles;
      me.free_handles = region_.handles[given - 1].next;
      --me.num_free_handles;
      region_.handles[given - 1].next = header.free_handles;
      header.free_handles = given;
      ++header.num_free_handles;
    }
  }
  if (is_short) wake_waiters();
}

void Engine::forget_accesses(Handle& handle, uint32_t seat_index) {
  SeatPool pool{*this, seat(seat_index)};
  if ((handle.flags & kHasRegions) != 0) {
    std::lock_guard guard(region_.header->boxes_lock);
    sweep_boxes(boxes_, index_of(handle), handle, pool, true);
  }
  if (handle.state.more_now != 0) give_chunks(pool, handle.state.more_now);
  if (handle.state.more_before != 0) give_chunks(pool, handle.state.more_before);
  handle.state = {};
}

// Every box of the task gets its node before anything is linked; stale nodes make room.
bool Engine::prepare_boxes(const SlotArgs& args, const pto_task_spec& spec, uint32_t seat_index) {
  SeatPool pool{*this, seat(seat_index)};
  const auto prepare_handle = [&](Handle& named, int mode, const pto_region* region, bool is_first_pass) {
    if ((named.flags & kFrozen) != 0) return true;
    Handle& handle = tracked(named, mode, region, seat_index);
    if (region == nullptr && (handle.flags & kHasRegions) == 0) return true;
    if (is_first_pass) return begin_boxes(boxes_, index_of(handle), handle);
    return ensure_box(boxes_, index_of(handle), handle, box_of(handle, region));
  };
  // First every buffer learns that it has boxes: the task may name one both as a whole and by a box.
  const auto prepare = [&] {
    for (const bool is_first_pass : {true, false}) {
      for (uint32_t p = 0; p < spec.num_params; ++p) {
        const Param& param = args.params[p];
        if (param.mode == PTO_NO_DEP || param.handle == kNone) continue;
        if (!prepare_handle(region_.handles[param.handle], param.mode, spec.params[p].region, is_first_pass)) {
          return false;
        }
      }
      if (spec.predicate == 0) continue;
      if (!prepare_handle(resolve(spec.predicate, "submit"), PTO_INPUT, nullptr, is_first_pass)) return false;
    }
    return true;
  };
  if (prepare()) return true;
  uint32_t freed = 0;
  for (uint32_t h = 0; h < region_.header->fresh_handles.load(std::memory_order_relaxed); ++h) {
    Handle& handle = region_.handles[h];
    if ((handle.flags & kHasRegions) != 0) freed += sweep_boxes(boxes_, index_of(handle), handle, pool, false);
  }
  return freed > 0 && prepare();
}

pto_handle Engine::register_buffer(void* address, uint64_t bytes) {
  if (address == nullptr || bytes == 0 || bytes > UINTPTR_MAX - reinterpret_cast<uintptr_t>(address)) {
    raise(PTO_BAD_ARGUMENT, "[runtime.register] a buffer must have an address and bytes; got ", address, " and ", bytes,
          "; pass the memory itself");
  }
  const uint64_t distance = region_.distance(address);
  if (distance < region_.header->total_bytes) {
    raise(PTO_BAD_ARGUMENT,
          "[runtime.register] a buffer must be the caller's own memory; got memory of the runtime's heap; ",
          "use the handle that its allocation gave");
  }
  if (region_.header->is_shared != 0) {
    raise(PTO_BAD_ARGUMENT,
          "[runtime.register] with two processes every buffer must lie in the region; got one outside; ",
          "use pto_alloc");
  }
  const uint32_t index = take_handle(seat_here());
  Handle& handle = region_.handles[index];
  handle.address = distance;
  handle.bytes = bytes;
  return uint64_t{handle.generation.load(std::memory_order_relaxed)} << 32 | (index + 1);
}

void Engine::unregister(pto_handle name, double timeout_s, bool helps) {
  Handle& handle = resolve(name, "unregister");
  if ((handle.flags & kOwnedByHeap) != 0) {
    raise(PTO_BAD_ARGUMENT, "[runtime.unregister] the runtime frees its own buffers; got one of them; end its scope");
  }
  wait_for_buffer(name, nullptr, PTO_OUTPUT, timeout_s, helps);
  give_handle(static_cast<uint32_t>(name & 0xFFFFFFFF) - 1, seat_here());
}

void Engine::freeze(pto_handle name, bool frozen) {
  Handle& handle = resolve(name, "freeze");
  // Then no writer is left, so readers need not be known.
  if (frozen) wait_for_buffer(name, nullptr, PTO_OUTPUT, PTO_FOREVER, true);
  const uint32_t seat_index = seat_here();
  const SubmitGuard guard(*region_.header, seat_index, fences_);
  settle_buffer(handle, seat_index);
  ++num_freezes_;
  handle.flags = frozen ? handle.flags | kFrozen : handle.flags & ~kFrozen;
}

pto_handle Engine::allocate(uint64_t bytes) {
  if (bytes == 0) raise(PTO_BAD_ARGUMENT, "[runtime.alloc] a buffer must have bytes; got 0; pass its size");
  const uint32_t seat_index = seat_here();
  const uint64_t address = allocate_heap(seat_index, aligned(bytes));
  const uint32_t index = take_handle(seat_index);
  Handle& handle = region_.handles[index];
  handle.address = address;
  handle.bytes = bytes;
  handle.flags |= kOwnedByHeap;
  Scope& scope = seat(seat_index).scopes[seat(seat_index).depth];
  handle.next = scope.first_handle;
  scope.first_handle = index + 1;
  return uint64_t{handle.generation.load(std::memory_order_relaxed)} << 32 | (index + 1);
}

void* Engine::address_of(pto_handle name) { return region_.at(resolve(name, "address").address); }

void* Engine::wait_for_buffer(pto_handle name, const pto_region* box, int mode, double timeout_s, bool helps) {
  const uint32_t seat_index = seat_here();
  SeatPool pool{*this, seat(seat_index)};
  std::vector<TaskRef> producers;
  Handle* found = &resolve(name, "read");
  if (box != nullptr) check_region(*found, *box, "read", -1);
  {
    // A task's children are tracked by that task alone; and a replay may hold the lock until the task has ended.
    const SubmitGuard guard(*region_.header, seat_index, fences_, running.engine == this);
    if (found->owner != 0 || running.engine == this) {
      found = &tracked(*found, PTO_INPUT, box != nullptr ? box : &kNoBytes, seat_index);
    } else {
      settle_buffer(*found, seat_index);
    }
    const auto note = [&](TaskRef ref) { producers.push_back(ref); };
    if ((found->flags & kHasRegions) != 0) {
      std::lock_guard boxes_guard(region_.header->boxes_lock);
      collect_boxes(boxes_, index_of(*found), *found, box, mode, pool, note);
    } else {
      collect(found->state, pool, mode, note);
    }
  }
  const int64_t begin = timeout_s > 0 ? now_ns() : 0;
  for (const TaskRef producer : producers) {
    const double spent = timeout_s > 0 ? static_cast<double>(now_ns() - begin) * 1e-9 : 0;
    const double left = timeout_s > 0 ? std::max(0.0, timeout_s - spent) : timeout_s;
    const int status = wait(without_flags(producer), left, helps);
    if (status == PTO_TIMEOUT) {
      raise(PTO_TIMEOUT,
            "[runtime.read] the buffer's tasks must end within the time given; got a task that still runs ", "after ",
            timeout_s, " s; wait longer, or cancel it");
    }
    if ((producer & kCarriesPoison) == 0 || status == PTO_OK) continue;
    std::string text;
    task_error(without_flags(producer), &text);
    raise(status, text);
  }
  return region_.at(found->address + (box != nullptr ? box->offset : 0));
}

// An empty task that overwrites the bytes stands for the caller: it waits for everybody, and it ends a poison.
void* Engine::wait_to_write(pto_handle name, const pto_region* box, double timeout_s, bool helps) {
  if (box != nullptr) check_region(resolve(name, "write"), *box, "write", -1);
  pto_param param{};
  param.mode = PTO_OUTPUT;
  param.handle = name;
  param.region = box;
  pto_task_spec spec{};
  spec.kernel = PTO_NO_KERNEL;
  spec.params = &param;
  spec.num_params = 1;
  for (uint32_t type = 0; (region_.header->served_classes >> region_.header->class_of_type[type] & 1) == 0; ++type) {
    spec.worker_type = static_cast<pto_worker_type>(type + 1);
  }
  if (wait(submit(spec), timeout_s, helps) == PTO_TIMEOUT) {
    raise(PTO_TIMEOUT,
          "[runtime.write] the buffer's tasks must end within the time given; got one that still runs after ",
          timeout_s, " s; wait longer, or cancel it");
  }
  return static_cast<std::byte*>(address_of(name)) + (box != nullptr ? box->offset : 0);
}

void Engine::begin_scope() {
  Seat& me = seat(seat_here());
  if (me.depth == PTO_MAX_SCOPES) {
    raise(PTO_BAD_ARGUMENT, "[runtime.scope_begin] scopes must not nest deeper than ", PTO_MAX_SCOPES,
          "; got one more; end some first");
  }
  me.scopes[++me.depth] = {};
  me.num_open_scopes.store(me.depth, std::memory_order_release);
}

void Engine::end_scope() {
  const uint32_t seat_index = seat_here();
  Seat& me = seat(seat_index);
  if (me.depth <= me.base_depth) {
    raise(PTO_BAD_ARGUMENT, "[runtime.scope_end] a scope must be open; got none in this ",
          me.base_depth > 0 ? "task" : "thread", "; pair every scope_begin with one scope_end");
  }
  close_scope(seat_index);
}

void Engine::close_scope(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  Scope& scope = me.scopes[me.depth];
  for (uint32_t h = scope.first_handle; h != 0;) {
    const uint32_t next = region_.handles[h - 1].next;
    give_handle(h - 1, seat_index);
    h = next;
  }
  for (uint32_t s = scope.first_segment; s != 0;) {
    Segment& run = region_.segments[s - 1];
    const uint32_t next = run.next;
    const int64_t change = run.uses.load(std::memory_order_relaxed) - kSegmentOpen;
    if (run.state.fetch_add(change, std::memory_order_acq_rel) + change == 0) give_run(s - 1);
    s = next;
  }
  scope = {};
  if (me.depth > 0) --me.depth;
  me.num_open_scopes.store(me.depth, std::memory_order_release);
}

// The common case is one addition: the scope's current run has room.
uint64_t Engine::allocate_heap(uint32_t seat_index, uint64_t bytes) {
  Seat& me = seat(seat_index);
  Header& header = *region_.header;
  Scope& scope = me.scopes[me.depth];
  if (scope.current != 0) {
    const uint64_t end = uint64_t{region_.segments[scope.current - 1].run} * kSegmentBytes;
    if (scope.offset + bytes <= end) {
      const uint64_t address = header.heap + uint64_t{scope.current - 1} * kSegmentBytes + scope.offset;
      scope.offset += bytes;
      return address;
    }
  }
  const auto count = static_cast<uint32_t>(std::min<uint64_t>((bytes + kSegmentBytes - 1) / kSegmentBytes, 1u << 31));
  if (count > header.num_segments) {
    raise(PTO_NO_MEMORY, "[runtime.submit] one task's outputs must fit the heap; got ", bytes, " bytes against ",
          uint64_t{header.num_segments} * kSegmentBytes, "; raise heap_bytes");
  }
  uint32_t first = take_run(count);
  while (first == kNone) {
    wait_for_room(seat_index, Resource::kHeap, bytes);
    first = take_run(count);
  }
  Segment& run = region_.segments[first];
  run.state.store(kSegmentOpen, std::memory_order_relaxed);
  run.uses.store(0, std::memory_order_relaxed);
  run.owner = seat_index;
  run.next = scope.first_segment;
  scope.first_segment = first + 1;
  const uint64_t left = uint64_t{count} * kSegmentBytes - bytes;
  const uint64_t old_left =
      scope.current == 0 ? 0 : uint64_t{region_.segments[scope.current - 1].run} * kSegmentBytes - scope.offset;
  if (left >= old_left) {
    scope.current = first + 1;
    scope.offset = bytes;
  }
  return header.heap + uint64_t{first} * kSegmentBytes;
}

// The first free run from the bottom: memory that was used a moment ago is still in the cache, and pages that are never
// reached cost nothing. segment_cursor: no free segment lies below it.
uint32_t Engine::find_run(uint32_t count) const {
  const Header& header = *region_.header;
  uint32_t length = 0;
  for (uint32_t at = header.segment_cursor; at < header.num_segments; ++at) {
    length = region_.segments[at].is_used != 0 ? 0 : length + 1;
    if (length == count) return at + 1 - count;
  }
  return kNone;
}

uint32_t Engine::take_run(uint32_t count) {
  Header& header = *region_.header;
  std::lock_guard guard(header.heap_lock);
  const uint32_t first = find_run(count);
  if (first == kNone) return kNone;
  for (uint32_t s = first; s < first + count; ++s) {
    region_.segments[s].is_used = 1;
    region_.segments[s].first = first;
  }
  region_.segments[first].run = count;
  if (first == header.segment_cursor) header.segment_cursor = first + count;
  const uint32_t used = header.segments_used.load(std::memory_order_relaxed) + count;
  header.segments_used.store(used, std::memory_order_relaxed);
  if (used > header.segments_high.load(std::memory_order_relaxed)) {
    header.segments_high.store(used, std::memory_order_relaxed);
  }
  return first;
}

void Engine::give_run(uint32_t first) {
  Header& header = *region_.header;
  {
    std::lock_guard guard(header.heap_lock);
    const uint32_t count = region_.segments[first].run;
    for (uint32_t s = first; s < first + count; ++s) region_.segments[s].is_used = 0;
    header.segment_cursor = std::min(header.segment_cursor, first);
    header.segments_used.store(header.segments_used.load(std::memory_order_relaxed) - count, std::memory_order_relaxed);
  }
  wake_waiters();
}

void Engine::use_heap(uint64_t address, uint32_t seat_index) {
  const uint64_t segment = (address - region_.header->heap) / kSegmentBytes;
  Segment& run = region_.segments[region_.segments[segment].first];
  if (run.owner == seat_index) {
    run.uses.store(run.uses.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  } else {
    run.state.fetch_add(1, std::memory_order_relaxed);
  }
}

void Engine::release_heap(const Slot& slot, const SlotArgs& args) {
  uint32_t last = kNone;
  int64_t count = 0;
  const auto release = [&] {
    if (last != kNone && region_.segments[last].state.fetch_sub(count, std::memory_order_acq_rel) == count) {
      give_run(last);
    }
  };
  for (uint32_t p = 0; p < slot.num_params; ++p) {
    if (!lies_in_heap(args.params[p].address)) continue;
    const uint32_t first = region_.segments[(args.params[p].address - region_.header->heap) / kSegmentBytes].first;
    if (first != last) {
      release();
      last = first;
      count = 0;
    }
    ++count;
  }
  release();
}

}  // namespace tilewise::tasks
