// The submission lock with threads that start and end; protocols/tests/biased_lock_checked_test.cc has every execution.
#include "tasks/sched/submit_lock.h"

#include <thread>
#include <vector>

#include "base/testing.h"
#include "tasks/tests/testing_runtime.h"

CASE("submitters that start while the first one submits lose no task") {
  using namespace tilewise::tasks::testing;
  constexpr int kRounds = 40 / kSlowdown + 2;
  for (int round = 0; round < kRounds; ++round) {
    PTORuntime* runtime = nullptr;
    pto_config config;
    pto_config_init(&config);
    config.num_workers = 1;
    config.window = 64;
    EXPECT_EQ(pto_runtime_open(&config, &runtime), PTO_OK);
    const pto_kernel count = pto_kernel_add(
        runtime, "count",
        [](void* const* buffers, const uint64_t*) {
          ++*static_cast<uint64_t*>(buffers[0]);  // unordered tasks would lose counts and race
          return static_cast<int>(PTO_OK);
        },
        0);
    uint64_t cell = 0;
    const pto_handle handle = pto_register(runtime, &cell, sizeof(cell));
    const auto submit = [&] {
      for (int i = 0; i < 300; ++i) {
        pto_param param = {PTO_INOUT, 0, handle, 0, nullptr, nullptr};
        EXPECT(pto_submit_task(runtime, count, PTO_VECTOR, &param, 1) != 0);
      }
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_OK);
    };
    pto_scope_begin(runtime);  // this thread is the first submitter
    std::vector<std::thread> others;
    for (int t = 0; t < 3; ++t) others.emplace_back(submit);
    submit();
    for (std::thread& other : others) other.join();
    EXPECT_EQ(pto_scope_end(runtime), PTO_OK);
    EXPECT_EQ(cell, uint64_t{1200});
    EXPECT_EQ(pto_runtime_close(runtime), PTO_OK);
  }
}

TILEWISE_TEST_MAIN
