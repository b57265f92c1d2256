// Buffers: registering, allocating, freezing, and waiting until one may be read or written.
//
// Who may call: any thread. Blocks: where it says so; unregister and freeze until the buffer is unused.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

pto_handle register_buffer(Engine& engine, void* address, uint64_t bytes);
void unregister(Engine& engine, pto_handle name, double timeout_s, bool helps);
/// A frozen buffer is only read, and orders no task. Waits until it is no longer written.
void freeze(Engine& engine, pto_handle name, bool frozen);
/// Memory of the open scope.
pto_handle allocate(Engine& engine, uint64_t bytes);
void* address_of(Engine& engine, pto_handle name);
/// Waits as a task with an access of this mode would; a failure of the data's writers is thrown if the mode reads.
/// box: nullptr: the whole buffer. Returns the address of its first byte.
void* wait_for_buffer(Engine& engine, pto_handle name, const pto_region* box, int mode, double timeout_s, bool helps);
void* wait_to_write(Engine& engine, pto_handle name, const pto_region* box, double timeout_s, bool helps);
void begin_scope(Engine& engine);
void end_scope(Engine& engine);
/// Open scopes of this thread.
uint32_t depth(Engine& engine);

}  // namespace tilewise::tasks
