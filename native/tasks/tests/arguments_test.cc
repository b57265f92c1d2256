// Where a task's addresses and scalars are stored: after its producers if they are few, otherwise in its SlotArgs.
#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

constexpr uint32_t kCells = 8;
int64_t cells[kCells];
std::atomic<uint64_t> num_right{0};

/// scalars: number of parameters, number of scalars, then 1000, 1001, ... Parameter p is cells[p].
int check_kernel(void* const* buffers, const uint64_t* scalars) {
  bool is_right = true;
  for (uint64_t p = 0; p < scalars[0]; ++p) is_right = is_right && buffers[p] == &cells[p];
  for (uint64_t s = 2; s < scalars[1]; ++s) is_right = is_right && scalars[s] == 998 + s;
  if (is_right) num_right.fetch_add(1);
  return PTO_OK;
}

int check_two(void* const* buffers, const uint64_t*) {
  if (buffers[0] == &cells[0] && buffers[1] == &cells[1]) num_right.fetch_add(1);
  return PTO_OK;
}

}  // namespace

CASE("every number of parameters and scalars reaches the kernel, however many producers it waits for") {
  for (const uint32_t workers : {0u, 1u, 2u}) {
    Runtime runtime(workers, 64);
    const pto_kernel check = runtime.kernel("check", check_kernel);
    const pto_kernel two = runtime.kernel("two", check_two);
    std::vector<pto_handle> handles;
    for (int64_t& cell : cells) handles.push_back(runtime.add(cell));
    num_right.store(0);
    uint64_t num_submitted = 0;
    for (uint64_t num_scalars = 2; num_scalars <= 9; ++num_scalars) {
      for (uint64_t num_params = 0; num_params <= kCells; ++num_params) {
        for (uint32_t readers = 0; readers < 10; ++readers) {  // each writer below waits for all of them
          EXPECT(runtime.submit(two, {in(handles[0]), in(handles[1])}) != 0);
        }
        std::vector<pto_param> params;
        for (uint64_t p = 0; p < num_params; ++p) params.push_back(p % 3 == 2 ? in(handles[p]) : inout(handles[p]));
        Extra extra{.scalars = {num_params, num_scalars}};
        while (extra.scalars.size() < num_scalars) extra.scalars.push_back(998 + extra.scalars.size());
        EXPECT(runtime.submit(check, params, extra) != 0);
        num_submitted += 11;
      }
    }
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT_EQ(num_right.load(), num_submitted);
  }
}

CASE("readers of one buffer reuse the places of readers that have ended, and a writer waits for all live ones") {
  for (const bool is_ascending : {true, false}) {  // the order in which they end
    Runtime runtime(1, 64);
    int64_t x = 0;
    const pto_handle h = runtime.add(x);
    const pto_event gate = pto_event_open(runtime);
    const pto_kernel step = runtime.kernel("step", step_kernel);
    for (int n = 0; n < 20; ++n) EXPECT(runtime.submit(PTO_NO_KERNEL, {in(h)}) != 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    constexpr uint64_t kReaders = 5;
    std::vector<pto_task> readers;
    for (uint64_t n = 0; n < kReaders; ++n) {
      readers.push_back(
          runtime.submit(PTO_NO_KERNEL, {in(h)}, {.waits = {{gate, is_ascending ? n + 1 : kReaders - n}}}));
    }
    const pto_task writer = runtime.submit(step, {inout(h)}, {.scalars = {7}});
    for (uint64_t n = 0; n < kReaders; ++n) {
      EXPECT_EQ(pto_wait(runtime, writer, 0.005), PTO_TIMEOUT);
      EXPECT_EQ(pto_event_post(runtime, gate, 1), 0);
      EXPECT_EQ(pto_wait(runtime, readers[is_ascending ? n : kReaders - 1 - n], PTO_FOREVER), 0);
    }
    EXPECT_EQ(pto_wait(runtime, writer, PTO_FOREVER), 0);
    EXPECT_EQ(x, 7);
  }
}

CASE("buffers beyond the address space and null callbacks are rejected") {
  Runtime runtime(1);
  EXPECT_EQ(pto_register(runtime, cells, UINT64_MAX), 0u);
  EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
  const pto_task task = runtime.submit(PTO_NO_KERNEL, {});
  EXPECT_EQ(pto_notify(runtime, task, nullptr, nullptr), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

TILEWISE_TEST_MAIN
