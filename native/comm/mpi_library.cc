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

// Libraries stay: MPI does not survive being unloaded.
const TilewiseMpi& load_table(const std::string& table, const std::string& library) {
  if (!library.empty()) load(library, RTLD_NOW | RTLD_GLOBAL);
  const auto function = reinterpret_cast<TilewiseMpiFunction>(dlsym(load(table, RTLD_NOW), "tilewise_mpi"));
  const TilewiseMpi* const found = function != nullptr ? function() : nullptr;
  check<ArgumentError>(found != nullptr && found->version == TILEWISE_MPI_VERSION,
                       "[comm.join_world] a file of MPI's functions must be of version ", TILEWISE_MPI_VERSION,
                       "; got ", found == nullptr ? "another file" : std::to_string(found->version),
                       "; run `tilewise build-mpi` again");
  return *found;
}

std::string text_of(const char* text) { return {text}; }

std::string& last_words() {
  static auto& text = *new std::string;
  return text;
}

void say_last_words() { std::fputs(last_words().c_str(), stderr); }

/// What is said where the process ends while this is there.
class LastWords {
 public:
  explicit LastWords(const std::string& text) {
    static const bool is_said = std::atexit(say_last_words) == 0;
    if (is_said) last_words() = text;
  }
  ~LastWords() { last_words().clear(); }
  LastWords(const LastWords&) = delete;
  LastWords& operator=(const LastWords&) = delete;
};

}  // namespace

std::shared_ptr<World> join_world(const std::string& table, const std::string& library, const std::string& ending) {
  const TilewiseMpi& mpi = load_table(table, library);
  const LastWords words(ending);
  const int32_t error = mpi.start(mpi.self);
  char text[512] = {};
  if (error != 0) mpi.describe(mpi.self, error, text, sizeof(text));
  check<ArgumentError>(error == 0, "[comm.join_world] MPI must start; got '", text_of(text),
                       "'; see that mpiexec and the library are of one MPI (tilewise doctor)");
  return std::make_shared<World>(mpi);
}

}  // namespace tilewise::comm
