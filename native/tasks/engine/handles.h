// Handles of buffers, and the scopes that they belong to.
//
// Who may call: the thread that owns the slot. Blocks: for the lock of the pools, and for the submission lock if other
// threads may access the buffer's state. Memory: the store; each thread has a stock of free handles.
#pragma once
#include "tasks/engine/engine.h"
#include "tasks/engine/pool.h"

namespace tilewise::tasks {

/// Throws the error for a handle that is no longer alive.
[[noreturn]] void raise_stale(pto_handle handle, const char* where);
inline Handle& resolve(const Engine& engine, pto_handle handle, const char* where) {
  const auto index = static_cast<uint32_t>(handle & 0xFFFFFFFF) - 1;
  if (index < engine.store.header->max_handles) [[likely]] {
    Handle& candidate = engine.store.handles[index];
    const bool is_same = candidate.generation.load(std::memory_order_relaxed) == static_cast<uint32_t>(handle >> 32);
    if (is_same && (candidate.flags & kUsed) != 0) [[likely]]
      return candidate;
  }
  raise_stale(handle, where);
}

inline pto_handle handle_name(const Handle& handle, uint32_t index) {
  return uint64_t{handle.generation.load(std::memory_order_relaxed)} << 32 | (index + 1);
}

/// If a replay has accessed the buffer last, records the replay's tasks in the buffer's state. Under the submission
/// lock.
inline void settle_buffer(const Engine& engine, Handle& handle, uint32_t thread) {
  if ((handle.flags & kReplayed) != 0) engine.replays->settle(handle, thread);
}

/// Takes a handle for a new buffer; kNone: none is free. take_handle (wait/room.h) waits.
uint32_t try_take_handle(Engine& engine, uint32_t thread);

/// Frees a handle. Its generation advances at once: a thread that still uses it gets an error.
void give_handle(Engine& engine, uint32_t index, uint32_t thread);
/// Reclaims chunks that name only ended tasks, from every buffer whose state this thread may access: inside a task the
/// buffers of its children, elsewhere all others. Called under the submission lock, except inside a task.
void reclaim_chunks(Engine& engine, uint32_t thread, bool holds_boxes_lock);
[[gnu::always_inline]] inline void reclaim_chunks_if_few(Engine& engine, uint32_t thread, bool holds_boxes_lock) {
  if (engine.store.header->wants_chunks.load(std::memory_order_relaxed) != 0) [[unlikely]]
    reclaim_chunks(engine, thread, holds_boxes_lock);
}
/// Resets the buffer's state, as if no task had used it.
void forget_accesses(Engine& engine, Handle& handle, uint32_t thread);
/// Ends the innermost scope of a thread. Its handles and memory are freed when no task uses them.
void close_scope(Engine& engine, uint32_t thread);

}  // namespace tilewise::tasks
