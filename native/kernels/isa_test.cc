// The lookup of kernels in a build with only the weakest level of this processor family.
#include "kernels/isa.h"

#include <string>

#include "base/check.h"
#include "base/testing.h"
#include "kernels/machine_levels.h"

namespace {

namespace kernels = tilewise::kernels;

CASE("a build with one level uses it and lists the better ones it lacks") {
  const std::vector<kernels::MachineLevel> machine = kernels::machine_levels();
  EXPECT_EQ(kernels::available_levels().size(), size_t{1});
  EXPECT(kernels::level_in_use() == machine.front().name);
  EXPECT(kernels::find_kernel("add_f32") != nullptr);
  size_t better = 0;
  for (size_t i = 1; i < machine.size(); ++i) better += machine[i].can_run ? 1 : 0;
  EXPECT_EQ(kernels::missing_levels().size(), better);
}

CASE("a missing level is an error that names the option to build it") {
  for (const kernels::MachineLevel& level : kernels::machine_levels()) {
    if (level.name == kernels::level_in_use()) continue;
    std::string message;
    try {
      kernels::find_kernel_at(level.name, "add_f32");
    } catch (const tilewise::ArgumentError& error) {
      message = error.what();
    }
    EXPECT(message.find(level.can_run ? "this build has" : "this machine has") != std::string::npos);
    EXPECT((message.find("TILEWISE_LEVELS=all") != std::string::npos) == level.can_run);
  }
}

}  // namespace

TILEWISE_TEST_MAIN
