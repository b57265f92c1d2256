// A task's tiles of remote devices: reads them before the task starts, and sends what it has written.
//
// Purpose: comm/peers.h does this for signals, this file for tiles. The kernel works on a block of this process's
// memory that is released at the task's end. If a task only copies tiles from remote devices, or only to them, they are
// transferred between their owners' memory and the task's other operands, and its kernel does not run. Who may call:
// bring_tiles: the thread that admits the task; send_tiles: the worker that has run its kernel. Blocks: never. Memory
// order: when done() is called, the tiles that were read are as they were when their signals arrived, and the tiles
// that were written are in their owners' memory.
#pragma once
#include <functional>
#include <optional>

#include "programs/remote/remote_memory.h"
#include "programs/run/task.h"

namespace tilewise::programs {

/// The post of a task that can travel with its rows, and its number among the task's posts.
struct TravellingPost {
  int64_t number;
  comm::Post post;
};
using FindPost = std::function<std::optional<TravellingPost>(const RemoteRows& rows)>;

/// After this call, and after send_tiles, the task must not be accessed until some thread calls done(). find: returns
/// the post that goes to the owner of rows, if the task has one; task.num_sent_post becomes its number.
void bring_tiles(RemoteMemory& memory, Task& task, const FindPost& find, std::function<void()> done);
void send_tiles(RemoteMemory& memory, Task& task, const FindPost& find, const std::function<void()>& done);

}  // namespace tilewise::programs
