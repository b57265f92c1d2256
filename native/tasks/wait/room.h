// Room for the next task: a slot of the window, a handle, memory of the heap, boxes. Waits for it, and detects when
// waiting cannot succeed.
//
// Who may call: the thread that owns the slot, while it submits. Blocks: until there is room: it helps, then sleeps.
// Throws PTO_DEADLOCK if no task can free any.
#pragma once
#include "tasks/engine/handles.h"
#include "tasks/sched/sleep.h"
#include "tasks/store/heap.h"
#include "tasks/wait/wait.h"

namespace tilewise::tasks {

enum class Resource { kWindow = 0, kHeap = 1, kHandles = 2, kRegions = 3 };

/// One step of waiting for a resource: helps, sleeps until something completes, or detects a deadlock. Returns true,
/// for boxes only, if no task can free any; then the caller must try once more, because only it can tell.
bool wait_for_room(Engine& engine, uint32_t thread, Resource resource, uint64_t size);
void raise_deadlock(Engine& engine, uint32_t thread, Resource resource, uint64_t size);
/// take_slot when the next slot in turn has a task: skips slots of long-running tasks.
uint32_t take_slot_carefully(Engine& engine, uint32_t thread);
/// Any slot of the submitting thread without a task; kNone: all have tasks.
uint32_t find_free_slot(Engine& engine, uint32_t thread);
/// allocate_heap when the scope's run has no room.
uint64_t allocate_heap_slowly(Engine& engine, uint32_t thread, uint64_t bytes);

/// Allocates from the heap for the open scope; returns the distance from the store's base.
inline uint64_t allocate_heap(Engine& engine, uint32_t thread, uint64_t bytes) {
  const ThreadSlot& me = engine.thread_slot(thread);
  const uint64_t address = heap_in_scope(engine.store, engine.thread_slot(thread).scopes[me.depth], bytes);
  return address != 0 ? address : allocate_heap_slowly(engine, thread, bytes);
}

/// Takes a handle for a new buffer; returns its index.
uint32_t take_handle(Engine& engine, uint32_t thread);

constexpr uint32_t kPrefetchAhead = 4;
constexpr uint64_t kCursorsPerLook = 255;  // a mask: reading others' counters costs a cache line each

inline void count_submitted(Engine& engine, uint32_t thread, uint64_t count) {
  std::atomic<uint64_t>& submitted = engine.thread_slot(thread).num_submitted;
  submitted.store(submitted.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
}

/// Takes a slot: the next one in turn if it has no task.
[[gnu::always_inline]] inline uint32_t take_slot(Engine& engine, uint32_t thread) {
  ThreadSlot& me = engine.thread_slot(thread);
  const uint32_t mask = engine.store.header->window - 1;
  const uint32_t base = thread * engine.store.header->window;
  const auto at = static_cast<uint32_t>(me.cursor) & mask;
  Slot& task = engine.store.slots[base + at];
  const TaskWordBits word = TaskWord::look(task.word);
  if (TaskWord::is_live(word) || (me.cursor & kCursorsPerLook) == 0) [[unlikely]]
    return take_slot_carefully(engine, thread);
  ++me.cursor;
  const Slot& soon = engine.store.slots[base + ((at + kPrefetchAhead) & mask)];
  protocols::prefetch_for_write(&soon);
  protocols::prefetch_for_write(&soon.producers);
  task.state.store(SlotState::kFilling, std::memory_order_relaxed);
  TaskWord::begin(task.word, word);
  return base + at;
}

}  // namespace tilewise::tasks
