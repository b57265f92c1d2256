// A long run in constant memory: soak_test [case [tasks]], by default a million tasks of every kind.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

uint64_t num_tasks = 1'000'000 / (kSlowdown > 1 ? 2 * kSlowdown : 1);

/// Resident memory of this process.
int64_t resident_bytes() {
  long pages = 0;
  long resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
  if (file != nullptr) std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace

CASE("very many tasks: chains, readers, boxes, outputs, failures, events, in constant memory") {
  pto_config config = Runtime::config(2, 64);
  config.heap_bytes = 4 << 20;
  Runtime runtime(config);
  std::vector<int64_t> x(64, 0), y(64, 0);
  const pto_handle hx = runtime.add(x), hy = runtime.add(y);
  const pto_kernel set = runtime.kernel("set", set_kernel);
  const pto_kernel add = runtime.kernel("add", add_kernel);
  const pto_kernel fail = runtime.kernel("fail", fail_kernel);
  const pto_event event = pto_event_open(runtime);
  int64_t warm = 0;
  uint64_t submitted = 0;
  for (uint64_t round = 1; submitted < num_tasks; ++round) {
    const pto_region box{.offset = round % 64 * 8, .ndim = 1, .size = {8}, .stride = {1}};
    pto_scope_begin(runtime);
    const pto_handle made = runtime.make(set, 64 + round % 5000, {}, {.scalars = {round}});
    runtime.submit(add, {inout(hx, &box), in(made)}, {.priority = static_cast<int32_t>(round % 3)});
    runtime.submit(add, {commute(hy), in(made)}, {.waits = {{event, round}}});
    runtime.submit(PTO_NO_KERNEL, {in(hx), in(hy)});
    pto_event_post(runtime, event, 1);
    if (round % 10 == 0) runtime.submit(fail, {out(made)});
    if (round % 100 == 0) {
      int64_t host = 0;
      const pto_handle passing = runtime.add(host);
      runtime.submit(set, {out(passing)}, {.scalars = {round}});
      EXPECT_EQ(pto_unregister(runtime, passing, PTO_FOREVER), 0);
      EXPECT_EQ(host, static_cast<int64_t>(round));
    }
    EXPECT_EQ(pto_scope_end(runtime), 0);
    submitted += 4;
    if (warm == 0 && submitted > num_tasks / 4) warm = resident_bytes();
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT(resident_bytes() - warm < (kSlowdown > 1 ? 64 : 2) << 20);
  EXPECT_EQ(runtime.stats().num_submitted, runtime.stats().num_completed);
}

int main(int argc, char** argv) {
  if (argc > 2) num_tasks = std::strtoull(argv[2], nullptr, 10);
  return tilewise::testing::run(argc, argv);
}
