// Fetches a task's tiles from remote devices before it starts.
//
// Purpose: comm/peers.h does this for signals, this file for tiles. Tiles are stored in a block of memory that is
// released at the task's end. If a task only copies them, they are stored directly at its destination, and its kernel
// does not run. Who may call: the thread that admits the task. Blocks: never. Memory order: when fetched() is called,
// the tiles are as they were when their signals arrived.
#pragma once
#include <functional>

#include "programs/remote/remote_memory.h"
#include "programs/run/task.h"

namespace tilewise::programs {

/// After this call the task must not be accessed until some thread calls fetched().
void start_fetch(RemoteMemory& memory, Task& task, std::function<void()> fetched);

}  // namespace tilewise::programs
