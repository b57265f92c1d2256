// Shared by the tests of tilewise/pto.hpp: a runtime with kernels, and the status that a call throws.
//
// Who may call: tests only. Blocks: never. Memory: of the test.
#pragma once
#include <array>

#include "tasks/tests/testing_runtime.h"
#include "tilewise/pto.hpp"

namespace tilewise::pto::testing {

using tasks::testing::Gate;
using tasks::testing::has;
using tasks::testing::value_of;

inline constexpr double kShort = 0.01;

/// The status of the Error that a call throws; PTO_OK if it throws none. `text`: part of its message.
template <class Call>
int status_of(Call&& call, const char* text = "") {
  try {
    call();
  } catch (const Error& error) {
    if (!has(error.what(), text)) std::fprintf(stderr, "  message: %s\n", error.what());
    EXPECT(has(error.what(), text));
    EXPECT(has(error.what(), "["));
    return error.status();
  }
  return PTO_OK;
}

/// A runtime with kernels on int64_t buffers, and an event that delays tasks.
struct Bench {
  explicit Bench(uint32_t num_workers = 1) : rt({.num_workers = num_workers, .window = 64, .heap_bytes = 1 << 20}) {}
  Runtime rt;
  Kernel set = rt.kernel("set", tasks::testing::set_kernel);    // target = scalar
  Kernel add = rt.kernel("add", tasks::testing::add_kernel);    // target += source
  Kernel copy = rt.kernel("copy8", tasks::testing::copy_kernel);  // target = source
  Kernel step = rt.kernel("step", tasks::testing::step_kernel);  // target = target * 3 + scalar
  Kernel fail = rt.kernel("fail", tasks::testing::fail_kernel);
  Kernel gate = rt.kernel("gate", Gate::kernel);
  Event start = rt.event();
  TaskOptions behind_event() { return {.wait_for = event_reached}; }
  std::array<pto_wait_for, 1> event_reached = {start.at_least(1)};
};

}  // namespace tilewise::pto::testing
