// The heap of buffers that the runtime allocates: runs of segments, which belong to scopes and count the tasks that use
// them.
//
// Purpose: most allocations are one addition; memory is reused after its scope and every task that uses it have ended.
// Who may call: allocating and use_heap: the thread that owns the slot; releasing: the thread that ends the task or the
// scope. Blocks: for the heap's lock, when a run begins or ends. Memory: the store. wait/room.h waits for room.
#pragma once
#include "tasks/store/layout.h"

namespace tilewise::tasks {

/// Allocates from the open scope's current run; returns the distance from the store's base, or 0 if it has too little
/// room.
inline uint64_t heap_in_scope(const Store& store, Scope& scope, uint64_t bytes) {
  if (scope.current == 0) return 0;
  const uint64_t end = uint64_t{store.segments[scope.current - 1].run} * kSegmentBytes;
  if (scope.offset + bytes > end) return 0;
  const uint64_t address = store.header->heap + uint64_t{scope.current - 1} * kSegmentBytes + scope.offset;
  scope.offset += bytes;
  return address;
}

/// Allocates from a free run, which becomes the scope's; 0: none is free.
uint64_t heap_in_new_run(const Store& store, Scope& scope, uint32_t thread, uint64_t bytes);

/// Whether a run of `bytes` bytes is free.
bool has_run(const Store& store, uint64_t bytes);

/// Counts a use of this memory by a task that this thread is submitting.
void use_heap(const Store& store, uint64_t address, uint32_t thread);
/// Ends the uses of a task. Returns whether memory became free.
bool release_heap(const Store& store, const Slot& slot, const SlotArgs& args);
/// Ends the loans of a scope's runs. Returns whether memory became free.
bool release_runs(const Store& store, const Scope& scope);

}  // namespace tilewise::tasks
