// The MPI library of a process: loaded from a file, started once.
//
// Purpose: one build works with every MPI. The library is loaded first, with global symbols, then the file of functions
// built on it (mpi/tilewise_mpi.h). Who may call: one thread. Blocks: for all other processes. Rejects files that
// cannot be loaded, are of another version, or whose MPI does not start (ArgumentError). If an MPI ends the process
// instead of returning an error, this cannot be prevented.
#pragma once
#include <memory>
#include <string>

#include "comm/world.h"

namespace tilewise::comm {

/// Joins the processes that mpiexec has started together. library: loaded first; empty: the table's file links it.
/// exit_message: printed on standard error if MPI ends the process instead of returning an error.
std::shared_ptr<World> join_world(const std::string& table, const std::string& library,
                                  const std::string& exit_message);

}  // namespace tilewise::comm
