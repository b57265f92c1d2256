// Room for the next task: a slot of the window, a handle, memory of the heap, boxes. Waiting for it, and the proof that
// waiting cannot succeed.
//
// Who may call: the thread that owns the slot, while it submits. Blocks: until there is room: it helps, then sleeps.
// Raises PTO_DEADLOCK if no task that could free any is left.
#pragma once
#include "tasks/engine/handles.h"
#include "tasks/sched/sleep.h"
#include "tasks/store/heap.h"
#include "tasks/wait/wait.h"

namespace tilewise::tasks {

enum class Resource { kWindow = 0, kHeap = 1, kHandles = 2, kRegions = 3 };

/// One step of waiting for a resource: helps, or sleeps until something completes, or proves that nothing ever will.
/// True, for boxes only: no task can free any; the caller looks once more, because only it can tell.
bool wait_for_room(Engine& engine, uint32_t thread, Resource resource, uint64_t size);
void raise_deadlock(Engine& engine, uint32_t thread, Resource resource, uint64_t size);
/// Past slots of tasks that run for long.
uint32_t take_slot_carefully(Engine& engine, uint32_t thread);
/// Any slot of the submitting thread in which no task lives; kNone: there is none.
uint32_t find_free_slot(Engine& engine, uint32_t thread);
/// The same of allocate_heap, when the scope's run has no room.
uint64_t allocate_heap_slowly(Engine& engine, uint32_t thread, uint64_t bytes);

/// Distance of as many bytes of the heap, for the open scope.
inline uint64_t allocate_heap(Engine& engine, uint32_t thread, uint64_t bytes) {
  const ThreadSlot& me = engine.thread_slot(thread);
  const uint64_t found = heap_in_scope(engine.store, engine.thread_slot(thread).scopes[me.depth], bytes);
  return found != 0 ? found : allocate_heap_slowly(engine, thread, bytes);
}

/// The index of a handle for a new buffer.
uint32_t take_handle(Engine& engine, uint32_t thread);

constexpr uint32_t kPrefetchAhead = 4;
constexpr uint64_t kCursorsPerLook = 255;  // a mask: to look at others' counters costs a cache line from each

inline void count_submitted(Engine& engine, uint32_t thread, uint64_t count) {
  std::atomic<uint64_t>& submitted = engine.thread_slot(thread).num_submitted;
  submitted.store(submitted.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
}

/// The next slot in turn, when no task lives in it.
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
