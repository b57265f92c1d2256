// Buffers: registering, allocating, freezing, and waiting until one may be read or written.
//
// Who may call: any thread. Blocks: the wait functions; unregister and freeze until the buffer is unused.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

pto_handle register_buffer(Engine& engine, void* address, uint64_t bytes);
void unregister(Engine& engine, pto_handle name, double timeout_s, bool helps);
/// Freezes a buffer: tasks only read it, and it orders no task. Waits for its writers.
void freeze(Engine& engine, pto_handle name, bool frozen);
/// Allocates memory of the open scope.
pto_handle allocate(Engine& engine, uint64_t bytes);
void* address_of(Engine& engine, pto_handle name);
/// Waits as a task with an access of this mode would; throws a failure of the data's writers if the mode reads. box:
/// nullptr for the whole buffer. Returns the address of its first byte.
void* wait_for_buffer(Engine& engine, pto_handle name, const pto_region* box, int mode, double timeout_s, bool helps);
void* wait_to_write(Engine& engine, pto_handle name, const pto_region* box, double timeout_s, bool helps);
void begin_scope(Engine& engine);
void end_scope(Engine& engine);
/// The number of open scopes of this thread.
uint32_t depth(Engine& engine);

}  // namespace tilewise::tasks
