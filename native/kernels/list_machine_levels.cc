// Prints the levels that this machine can run, weakest first, as a CMake list. CMakeLists.txt runs it at configuration.
#include <cstdio>

#include "kernels/machine_levels.h"

int main() {
  const char* separator = "";
  for (const auto& level : tilewise::kernels::machine_levels()) {
    if (!level.can_run) continue;
    std::printf("%s%s", separator, level.name.data());
    separator = ";";
  }
}
