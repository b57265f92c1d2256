// A task's tiles of remote devices, brought here before it starts.
//
// Purpose: what comm/peers.h is for signals, this is for tiles. Tiles land in a block of memory that the task's end
// gives back; those of a task that only copies them land where it would put them, and nothing is left for it to do. Who
// may call: who admits the task. Blocks: never. Memory order: what the tiles were when their signals came is there when
// fetched() is called.
#pragma once
#include <functional>

#include "programs/remote/remote_memory.h"
#include "programs/run/task.h"

namespace tilewise::programs {

/// Nothing of the task may be touched from here on until fetched() is called, by whichever thread.
void start_fetch(RemoteMemory& memory, Task& task, std::function<void()> fetched);

}  // namespace tilewise::programs
