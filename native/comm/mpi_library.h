// The MPI of a process: loaded from a file, started once.
//
// Purpose: one build serves every MPI. The library itself is loaded first, with its names for all to see, then the file
// of functions that are built on it (mpi/tilewise_mpi.h). Who may call: one thread. Blocks: for all other processes.
// Refuses: files that cannot be loaded, are of another version, or whose MPI does not start (ArgumentError). An MPI
// that ends the process instead of saying why it does not start cannot be kept from it.
#pragma once
#include <memory>
#include <string>

#include "comm/world.h"

namespace tilewise::comm {

/// The processes that mpiexec has started together. library: to load first; empty: the table's file names it itself.
/// ending: a line that goes to standard error where MPI ends the process instead.
std::shared_ptr<World> join_world(const std::string& table, const std::string& library, const std::string& ending);

}  // namespace tilewise::comm
