// The heap of buffers that the runtime allocates: runs of segments, which belong to scopes and count the tasks that use
// them.
//
// Purpose: most allocations are one addition; memory is reused after its scope and every task that uses it have ended.
// Who may call: allocating and use_heap: the thread that owns the slot; releasing: the thread that ends the task or the
// scope. Blocks: for the heap's lock, when a run begins or ends. Memory: the store. wait/room.h waits for room.
#pragma once
#include "tasks/store/layout.h"

namespace tilewise::tasks {

/// Distance of as many bytes of the open scope's current run; 0: it has not so many left.
inline uint64_t heap_in_scope(const Store& store, Scope& scope, uint64_t bytes) {
  if (scope.current == 0) return 0;
  const uint64_t end = uint64_t{store.segments[scope.current - 1].run} * kSegmentBytes;
  if (scope.offset + bytes > end) return 0;
  const uint64_t address = store.header->heap + uint64_t{scope.current - 1} * kSegmentBytes + scope.offset;
  scope.offset += bytes;
  return address;
}

/// The same of a free run, which becomes the scope's; 0: none is free.
uint64_t heap_in_new_run(const Store& store, Scope& scope, uint32_t thread, uint64_t bytes);

/// Whether a run of so many bytes is free now.
bool has_run(const Store& store, uint64_t bytes);

/// A task that is being submitted by this thread uses this memory.
void use_heap(const Store& store, uint64_t address, uint32_t thread);
/// That task has ended. True: memory has come free.
bool release_heap(const Store& store, const Slot& slot, const SlotArgs& args);
/// The scope has ended. True: memory has come free.
bool release_runs(const Store& store, const Scope& scope);

}  // namespace tilewise::tasks
