// Outputs allocated by the runtime: packing, alignment, large runs, lifetimes of scopes, wrapping, and a full heap.
#include <set>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

constexpr uint64_t kSegment = 256 << 10;

pto_config small_heap(uint64_t segments, uint32_t workers = 1, uint32_t window = 64) {
  pto_config config = Runtime::config(workers, window);
  config.heap_bytes = segments * kSegment;
  return config;
}

}  // namespace

CASE("outputs of one task are packed and each is aligned to 64 bytes") {
  Runtime runtime(small_heap(4));
  std::vector<pto_param> params{fresh(1), fresh(65), fresh(64), fresh(3)};
  EXPECT(runtime.submit(PTO_NO_KERNEL, params) != 0);
  const auto address = [&](int p) { return reinterpret_cast<uint64_t>(pto_address(runtime, params[p].handle)); };
  EXPECT_EQ(address(0) % 64, uint64_t{0});
  EXPECT_EQ(address(1), address(0) + 64);
  EXPECT_EQ(address(2), address(1) + 128);
  EXPECT_EQ(address(3), address(2) + 64);
  EXPECT_EQ(pto_bytes(runtime, params[1].handle), uint64_t{65});
}

CASE("a buffer allocated after one of more than 4 GiB in the same scope follows it") {
  Runtime runtime(small_heap(5ull << 12));  // 5 GiB, untouched
  const uint64_t large = (4ull << 30) + 64;
  const pto_handle first = pto_alloc(runtime, large), second = pto_alloc(runtime, 64);
  EXPECT(first != 0 && second != 0);
  const auto address = [&](pto_handle handle) { return reinterpret_cast<uint64_t>(pto_address(runtime, handle)); };
  EXPECT(address(second) >= address(first) + large || address(second) + 64 <= address(first));
}

CASE("an output larger than a segment takes a run, the whole heap at most, and no more") {
  Runtime runtime(small_heap(8));
  for (int round = 0; round < 50; ++round) {
    pto_scope_begin(runtime);
    const pto_handle all = pto_alloc(runtime, 8 * kSegment);
    EXPECT(all != 0);
    auto* bytes = static_cast<char*>(pto_address(runtime, all));
    bytes[0] = bytes[8 * kSegment - 1] = 1;
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
  EXPECT_EQ(pto_alloc(runtime, 8 * kSegment + 1), pto_handle{0});
  EXPECT_EQ(pto_last_status(), PTO_NO_MEMORY);
  EXPECT(has(pto_last_error(), "heap_bytes"));
  EXPECT_EQ(pto_alloc(runtime, 0), pto_handle{0});
  EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
}

CASE("an inner scope's memory returns while an outer scope lives") {
  Runtime runtime(small_heap(4));
  pto_scope_begin(runtime);
  int64_t* outer = static_cast<int64_t*>(pto_address(runtime, pto_alloc(runtime, 1000)));
  *outer = 77;
  const pto_kernel set = runtime.kernel("set", set_kernel);
  for (uint64_t round = 0; round < 3000; ++round) {
    pto_scope_begin(runtime);
    EXPECT(runtime.make(set, kSegment, {}, {.scalars = {round}}) != 0);
    EXPECT(runtime.make(set, kSegment / 2, {}, {.scalars = {round}}) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
  EXPECT_EQ(*outer, 77);
  EXPECT_EQ(pto_scope_end(runtime), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("a long-lived task does not block the memory after its own") {
  Runtime runtime(small_heap(4, 2));
  Gate gate;
  pto_scope_begin(runtime);
  const pto_handle gated = runtime.make(runtime.kernel("gate", Gate::kernel), 100, {}, {.scalars = {scalar(&gate)}});
  EXPECT_EQ(pto_scope_end(runtime), 0);
  EXPECT(pto_address(runtime, gated) == nullptr);
  gate.await_inside(1);
  const pto_kernel set = runtime.kernel("set", set_kernel);
  for (uint64_t round = 0; round < 1000; ++round) {
    pto_scope_begin(runtime);
    EXPECT(runtime.make(set, kSegment, {}, {.scalars = {round}}) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
  gate.open();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("memory of a closed scope stays until its last task: values survive thousands of wraps") {
  Runtime runtime(small_heap(4, 2, 16));
  const pto_kernel set = runtime.kernel("set", set_kernel);
  const pto_kernel add = runtime.kernel("add", add_kernel);
  int64_t total = 0;
  int64_t expected = 0;
  const pto_handle h = runtime.add(total);
  const uint64_t count = 20'000 / kSlowdown;
  for (uint64_t round = 0; round < count; ++round) {
    pto_scope_begin(runtime);
    const pto_handle value = runtime.make(set, round % 7 == 0 ? 2 * kSegment : 3000, {}, {.scalars = {round}});
    EXPECT(runtime.submit(add, {inout(h), in(value)}) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
    expected += static_cast<int64_t>(round);
  }
  EXPECT(pto_read(runtime, h, nullptr, PTO_FOREVER) != nullptr);
  EXPECT_EQ(total, expected);
  const uint64_t high = runtime.stats().heap_high_bytes;
  EXPECT(high >= 2 * kSegment && high <= 4 * kSegment);
}

CASE("two submitters share the heap and free memory for each other") {
  Runtime runtime(small_heap(6, 1));
  const pto_kernel set = runtime.kernel("set", set_kernel);
  const auto submitter = [&] {
    for (uint64_t round = 0; round < 2000u / kSlowdown; ++round) {
      pto_scope_begin(runtime);
      EXPECT(runtime.make(set, 2 * kSegment, {}, {.scalars = {round}}) != 0);
      EXPECT_EQ(pto_scope_end(runtime), 0);
    }
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  };
  std::thread other(submitter);
  submitter();
  other.join();
}

CASE("a task without outputs and an output that no task reads leak nothing") {
  Runtime runtime(small_heap(2, 0));
  pto_scope_begin(runtime);
  for (int t = 0; t < 5000; ++t) EXPECT(runtime.submit(PTO_NO_KERNEL, {}) != 0);
  EXPECT_EQ(pto_scope_end(runtime), 0);
  for (int t = 0; t < 5000; ++t) {
    pto_scope_begin(runtime);
    EXPECT(runtime.make(PTO_NO_KERNEL, 64) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT(runtime.stats().handles_high < 8192);
}

CASE("the end of a thread ends its scopes") {
  Runtime runtime(small_heap(2));
  for (int t = 0; t < 40; ++t) {
    std::thread([&] {
      pto_scope_begin(runtime);
      EXPECT(pto_alloc(runtime, 2 * kSegment) != 0);
    }).join();
  }
}

TILEWISE_TEST_MAIN
