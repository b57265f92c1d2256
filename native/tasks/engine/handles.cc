// See handles.h.
#include "tasks/engine/handles.h"

#include <mutex>

#include "tasks/engine/waking.h"
#include "tasks/order/boxes.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/heap.h"
#include "tasks/store/status.h"

namespace tilewise::tasks {

namespace {

constexpr uint32_t kHandleStock = 32;

void refill_handles(Engine& engine, uint32_t thread) {
  ThreadSlot& me = engine.thread_slot(thread);
  Header& header = *engine.store.header;
  std::lock_guard guard(header.pools.lock);
  // Near the end only one at a time, so that no stock has handles that another thread waits for.
  const uint32_t fresh = header.pools.fresh_handles.load(std::memory_order_relaxed);
  const uint32_t num_taken = header.max_handles - fresh >= 8 * kHandleStock ? kHandleStock : 1;
  for (uint32_t n = 0; n < num_taken; ++n) {
    uint32_t index = header.pools.free_handles;
    if (index != 0) {
      header.pools.free_handles = engine.store.handles[index - 1].next;
      --header.pools.num_free_handles;
    } else if (header.pools.fresh_handles.load(std::memory_order_relaxed) < header.max_handles) {
      index = header.pools.fresh_handles.fetch_add(1, std::memory_order_relaxed) + 1;
    } else {
      return;
    }
    engine.store.handles[index - 1].next = me.free_handles;
    me.free_handles = index;
    ++me.num_free_handles;
  }
}

}  // namespace

void raise_stale(pto_handle handle, const char* where) {
  throw_error(PTO_BAD_ARGUMENT, "[runtime.", where,
              "] a handle must be alive; got one that was unregistered, or whose scope ", "has ended (handle ",
              handle & 0xFFFFFFFF, ", generation ", handle >> 32,
              "); keep the scope open, or copy the result out of it");
}

// Usually takes a handle from the thread's own stock.
uint32_t try_take_handle(Engine& engine, uint32_t thread) {
  ThreadSlot& me = engine.thread_slot(thread);
  if (me.free_handles == 0) refill_handles(engine, thread);
  if (me.free_handles == 0) return kNone;
  const uint32_t index = me.free_handles - 1;
  Handle& handle = engine.store.handles[index];
  me.free_handles = handle.next;
  --me.num_free_handles;
  handle.state = {};
  handle.tree = {};
  handle.owner = running.engine == &engine ? running.parent : 0;
  handle.flags = handle.owner != 0 ? kUsed | kHasOwner : kUsed;
  handle.next = 0;
  return index;
}

void forget_accesses(Engine& engine, Handle& handle, uint32_t thread) {
  ChunkPool pool{engine, engine.thread_slot(thread)};
  if ((handle.flags & kHasRegions) != 0) {
    std::lock_guard guard(engine.store.header->boxes_lock);
    sweep_boxes(engine.boxes, engine.store.index_of(handle), handle, pool, true);
  }
  if (handle.state.more_now != 0) give_chunks(pool, handle.state.more_now);
  if (handle.state.more_before != 0) give_chunks(pool, handle.state.more_before);
  handle.state = {};
}

void reclaim_chunks(Engine& engine, uint32_t thread, bool holds_boxes_lock) {
  Header& header = *engine.store.header;
  ChunkPool pool{engine, engine.thread_slot(thread)};
  const uint32_t parent = running.engine == &engine ? running.parent : 0;
  std::unique_lock boxes_guard(header.boxes_lock, std::defer_lock);
  if (!holds_boxes_lock) boxes_guard.lock();
  header.wants_chunks.store(0, std::memory_order_relaxed);
  for (uint32_t h = 0; h < header.pools.fresh_handles.load(std::memory_order_relaxed); ++h) {
    Handle& handle = engine.store.handles[h];
    const uint32_t flags = handle.flags;
    if ((flags & kUsed) == 0 || handle.owner != parent) continue;
    if ((flags & kHasRegions) != 0) {
      engine.boxes.for_each(handle.tree, [&](uint32_t node) { prune(engine.boxes[node].state, pool); });
    } else {
      prune(handle.state, pool);
    }
  }
  pool.shrink();
  // If most are in use by live tasks, the next attempt is due when half of the rest is taken.
  std::lock_guard guard(header.pools.lock);
  header.pools.reclaim_below = std::min(header.max_chunks / 2, header.pools.num_spare_chunks(header.max_chunks) / 2);
}

namespace {

/// Whether the submission lock is needed: other threads read the states of buffers outside tasks, and replays those
/// that they use. A buffer of a task's children belongs to that task alone.
bool is_shared(const Handle& handle) {
  return (handle.flags & kHasOwner) == 0 || (handle.flags & (kReplayed | kFrozen)) != 0;
}

void forget_buffer(Engine& engine, Handle& handle, uint32_t thread) {
  if ((handle.flags & (kReplayed | kFrozen)) != 0) ++engine.num_freezes;
  settle_buffer(engine, handle, thread);
  forget_accesses(engine, handle, thread);
}

// The generation advances at once, so that a thread that still uses the handle gets an error.
void give_index(Engine& engine, uint32_t index, uint32_t thread) {
  Handle& handle = engine.store.handles[index];
  Header& header = *engine.store.header;
  ThreadSlot& me = engine.thread_slot(thread);
  handle.generation.store(handle.generation.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  handle.flags = 0;
  handle.next = me.free_handles;
  me.free_handles = index + 1;
  ++me.num_free_handles;
  const bool is_short =
      header.pools.fresh_handles.load(std::memory_order_relaxed) + 8 * kHandleStock > header.max_handles;
  if (me.num_free_handles <= (is_short ? 0 : 2 * kHandleStock)) return;
  {
    std::lock_guard guard(header.pools.lock);
    const uint32_t keep = is_short ? 0 : kHandleStock;
    while (me.num_free_handles > keep) {
      const uint32_t returned = me.free_handles;
      me.free_handles = engine.store.handles[returned - 1].next;
      --me.num_free_handles;
      engine.store.handles[returned - 1].next = header.pools.free_handles;
      header.pools.free_handles = returned;
      ++header.pools.num_free_handles;
    }
  }
  if (is_short) wake_waiters(engine);
}

}  // namespace

void give_handle(Engine& engine, uint32_t index, uint32_t thread) {
  Handle& handle = engine.store.handles[index];
  {
    const SubmitGuard guard(*engine.store.header, thread, engine.fences, !is_shared(handle));
    forget_buffer(engine, handle, thread);
  }
  give_index(engine, index, thread);
}

void close_scope(Engine& engine, uint32_t thread) {
  ThreadSlot& me = engine.thread_slot(thread);
  Scope& scope = me.scopes[me.depth];
  bool needs_lock = false;
  for (uint32_t h = scope.first_handle; h != 0; h = engine.store.handles[h - 1].next) {
    needs_lock |= is_shared(engine.store.handles[h - 1]);
  }
  if (scope.first_handle != 0) {
    const SubmitGuard guard(*engine.store.header, thread, engine.fences, !needs_lock);
    for (uint32_t h = scope.first_handle; h != 0; h = engine.store.handles[h - 1].next) {
      forget_buffer(engine, engine.store.handles[h - 1], thread);
    }
  }
  for (uint32_t h = scope.first_handle; h != 0;) {
    const uint32_t next = engine.store.handles[h - 1].next;
    give_index(engine, h - 1, thread);
    h = next;
  }
  if (release_runs(engine.store, scope)) wake_waiters(engine);
  scope = {};
  if (me.depth > 0) --me.depth;
  me.num_open_scopes.store(me.depth, std::memory_order_release);
}

}  // namespace tilewise::tasks
