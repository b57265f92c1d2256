// See mpi_library.h.
#include "comm/mpi_library.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "base/check.h"

namespace tilewise::comm {

namespace {

void* load(const std::string& file, int flags) {
  void* const loaded = dlopen(file.c_str(), flags);
  const char* const error = loaded == nullptr ? dlerror() : "";
  check<ArgumentError>(loaded != nullptr, "[comm.join_world] MPI must be a library of this machine; got '", error,
                       "'; install it again (pip install mpich), or run `tilewise build-mpi`");
  return loaded;
}

// Libraries are never unloaded, because MPI does not support it.
const TilewiseMpi& load_table(const std::string& table, const std::string& library) {
  if (!library.empty()) load(library, RTLD_NOW | RTLD_GLOBAL);
  const auto function = reinterpret_cast<TilewiseMpiFunction>(dlsym(load(table, RTLD_NOW), "tilewise_mpi"));
  const TilewiseMpi* const functions = function != nullptr ? function() : nullptr;
  check<ArgumentError>(functions != nullptr && functions->version == TILEWISE_MPI_VERSION,
                       "[comm.join_world] the file of MPI functions must have version ", TILEWISE_MPI_VERSION, "; got ",
                       functions == nullptr ? "another file" : std::to_string(functions->version),
                       "; run `tilewise build-mpi` again");
  return *functions;
}

std::string text_of(const char* text) { return {text}; }

std::string& exit_message() {
  static auto& text = *new std::string;
  return text;
}

void print_exit_message() { std::fputs(exit_message().c_str(), stderr); }

/// Prints a message on standard error if the process exits while this object exists.
class ExitMessage {
 public:
  explicit ExitMessage(const std::string& text) {
    static const bool is_registered = std::atexit(print_exit_message) == 0;
    if (is_registered) exit_message() = text;
  }
  ~ExitMessage() { exit_message().clear(); }
  ExitMessage(const ExitMessage&) = delete;
  ExitMessage& operator=(const ExitMessage&) = delete;
};

}  // namespace

std::shared_ptr<World> join_world(const std::string& table, const std::string& library, const std::string& message) {
  const TilewiseMpi& mpi = load_table(table, library);
  const ExitMessage exit_message(message);
  const int32_t error = mpi.start(mpi.self);
  char text[512] = {};
  if (error != 0) mpi.describe(mpi.self, error, text, sizeof(text));
  check<ArgumentError>(error == 0, "[comm.join_world] MPI must start; got '", text_of(text),
                       "'; mpiexec and the library must belong to one MPI (check with `tilewise doctor`)");
  return std::make_shared<World>(mpi);
}

}  // namespace tilewise::comm
