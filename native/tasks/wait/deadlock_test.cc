// A deadlock is detected at once and its cause is named: heap, handles, boxes, window. None is reported while another
// thread can still make progress.
#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

constexpr uint64_t kSegment = 256 << 10;

bool names(const char* resource, const char* knob) {
  const char* text = pto_last_error();
  const bool good = pto_last_status() == PTO_DEADLOCK && has(text, resource) && has(text, knob) && has(text, "oldest");
  if (!good) std::fprintf(stderr, "status %d, %s\n", pto_last_status(), text);
  return good;
}

}  // namespace

CASE("heap: an open scope that uses all of it is reported at once, and ending it helps") {
  pto_config config = Runtime::config(1);
  config.heap_bytes = 2 * kSegment;
  Runtime runtime(config);
  const auto begin = std::chrono::steady_clock::now();
  pto_scope_begin(runtime);
  EXPECT(runtime.make(PTO_NO_KERNEL, 2 * kSegment) != 0);
  EXPECT_EQ(runtime.make(PTO_NO_KERNEL, 64), pto_handle{0});
  EXPECT(pto_last_status() == PTO_DEADLOCK && has(pto_last_error(), "heap") && has(pto_last_error(), "heap_bytes"));
  EXPECT(seconds_since(begin) < 1.0);
  EXPECT_EQ(pto_scope_end(runtime), 0);
  pto_scope_begin(runtime);
  EXPECT(runtime.make(PTO_NO_KERNEL, 64) != 0);
  EXPECT_EQ(pto_scope_end(runtime), 0);
}

CASE("handles: no more than max_handles at once, and unregistering helps") {
  pto_config config = Runtime::config(1);
  config.max_handles = 50;
  Runtime runtime(config);
  std::vector<int64_t> values(51, 0);
  std::vector<pto_handle> handles;
  for (int h = 0; h < 50; ++h) handles.push_back(runtime.add(values[static_cast<size_t>(h)]));
  EXPECT(handles.back() != 0);
  EXPECT_EQ(runtime.add(values[50]), pto_handle{0});
  EXPECT(pto_last_status() == PTO_DEADLOCK && has(pto_last_error(), "max_handles"));
  EXPECT_EQ(pto_unregister(runtime, handles[7], PTO_FOREVER), 0);
  EXPECT(runtime.add(values[50]) != 0);
}

CASE("boxes: completed ones are reused; a task with more boxes than the table is an error") {
  pto_config config = Runtime::config(1, 64);
  config.max_regions = 8;
  Runtime runtime(config);
  std::vector<char> bytes(4096);
  const pto_handle h = runtime.add(bytes);
  std::vector<pto_region> boxes(12);
  for (uint64_t b = 0; b < 12; ++b) boxes[b] = {.offset = b * 8, .ndim = 1, .size = {8}, .stride = {1}};
  const pto_kernel busy = runtime.kernel("busy", busy_kernel);
  for (uint64_t t = 0; t < 500; ++t) {
    pto_region box{.offset = t * 8, .ndim = 1, .size = {8}, .stride = {1}};
    EXPECT(runtime.submit(busy, {inout(h, &box)}, {.scalars = {5}}) != 0);
  }
  std::vector<pto_param> params;
  for (const pto_region& box : boxes) params.push_back(inout(h, &box));
  EXPECT_EQ(runtime.submit(busy, params, {.scalars = {1}}), pto_task{0});
  EXPECT(pto_last_status() == PTO_DEADLOCK && has(pto_last_error(), "max_regions"));
  EXPECT(runtime.submit(busy, {inout(h, &boxes[0]), in(h, &boxes[1])}, {.scalars = {1}}) != 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("window: a parent without workers whose children find no slot fails with the reason, and other tasks run") {
  Runtime runtime(0, 4);
  static PTORuntime* inner;
  static std::atomic<bool> is_named;
  inner = runtime;
  is_named = false;
  const pto_kernel parent = runtime.kernel(
      "parent",
      [](void* const*, const uint64_t*) -> int {
        if (pto_submit_task(inner, PTO_NO_KERNEL, PTO_VECTOR, nullptr, 0) != 0) return PTO_OK;
        is_named = names("window", "window");
        return PTO_TASK_FAILED;
      },
      PTO_SUBMITS);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  runtime.submit(parent, {inout(h)});
  for (int t = 0; t < 8; ++t) EXPECT(runtime.submit(PTO_NO_KERNEL, {out(h)}) != 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT(is_named.load());
}

CASE("a scope may have any number of tasks, for any window") {
  for (const uint32_t workers : {0u, 1u, 2u}) {
    Runtime runtime(workers, 2);
    int64_t x = 0;
    const pto_handle h = runtime.add(x);
    const pto_kernel step = runtime.kernel("step", step_kernel);
    pto_scope_begin(runtime);
    for (int t = 0; t < 5000; ++t) EXPECT(runtime.submit(step, {inout(h)}, {.scalars = {1}}) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  }
}

CASE("no false alarm while an event is pending: the submitter waits and continues") {
  Runtime runtime(1, 2);
  const pto_event event = pto_event_open(runtime);
  runtime.submit(PTO_NO_KERNEL, {}, {.waits = {{event, 1}}});
  runtime.submit(PTO_NO_KERNEL, {}, {.waits = {{event, 1}}});
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    pto_event_post(runtime, event, 1);
  });
  EXPECT(runtime.submit(PTO_NO_KERNEL, {}) != 0);
  later.join();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("no false alarm while a task is slow or ends from outside") {
  pto_config config = Runtime::config(1, 2);
  config.heap_bytes = kSegment;
  Runtime runtime(config);
  static std::atomic<pto_task> later_task;
  later_task = 0;
  const pto_kernel later = runtime.kernel("later", [](void* const*, const uint64_t*) -> int { return PTO_LATER; });
  pto_scope_begin(runtime);
  std::vector<pto_param> params{fresh(kSegment)};
  later_task = runtime.submit(later, params);
  EXPECT_EQ(pto_scope_end(runtime), 0);
  std::thread ender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    while (pto_task_complete(runtime, later_task, PTO_OK) != 0) std::this_thread::yield();
  });
  pto_scope_begin(runtime);
  EXPECT(runtime.make(runtime.kernel("busy", busy_kernel), 100, {}, {.scalars = {50'000}}) != 0);
  EXPECT_EQ(pto_scope_end(runtime), 0);
  pto_scope_begin(runtime);
  EXPECT(runtime.make(PTO_NO_KERNEL, kSegment) != 0);
  EXPECT_EQ(pto_scope_end(runtime), 0);
  ender.join();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("no false alarm while another submitter's open scope uses the heap") {
  pto_config config = Runtime::config(1);
  config.heap_bytes = 2 * kSegment;
  Runtime runtime(config);
  std::atomic<bool> has_it{false};
  std::thread other([&] {
    pto_scope_begin(runtime);
    EXPECT(pto_alloc(runtime, 2 * kSegment) != 0);
    has_it = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    EXPECT_EQ(pto_scope_end(runtime), 0);
  });
  while (!has_it) std::this_thread::yield();
  EXPECT(pto_alloc(runtime, 100) != 0);
  other.join();
}

CASE("two submitters that use half of the heap each and need more: at least one gets an error") {
  pto_config config = Runtime::config(1);
  config.heap_bytes = 2 * kSegment;
  Runtime runtime(config);
  std::atomic<int> num_holding{0};
  std::atomic<int> num_told{0};
  const auto submitter = [&] {
    pto_scope_begin(runtime);
    EXPECT(pto_alloc(runtime, kSegment) != 0);
    num_holding.fetch_add(1);
    while (num_holding.load() < 2) std::this_thread::yield();
    if (pto_alloc(runtime, kSegment) == 0 && pto_last_status() == PTO_DEADLOCK) num_told.fetch_add(1);
    EXPECT_EQ(pto_scope_end(runtime), 0);
  };
  std::thread a(submitter), b(submitter);
  a.join();
  b.join();
  EXPECT(num_told.load() >= 1);
}

CASE("no false alarm in thousands of full windows with more threads than cores") {
  Runtime runtime(4, 2);
  static PTORuntime* inner;
  inner = runtime;
  const pto_kernel parent = runtime.kernel(
      "parent",
      [](void* const*, const uint64_t*) -> int {
        for (int c = 0; c < 5; ++c) {
          if (pto_submit_task(inner, PTO_NO_KERNEL, PTO_VECTOR, nullptr, 0) == 0) return PTO_TASK_FAILED;
        }
        return PTO_OK;
      },
      PTO_SUBMITS);
  const auto submitter = [&] {
    int64_t x = 0;
    const pto_handle h = runtime.add(x);
    for (int t = 0; t < 3000 / kSlowdown; ++t) {
      EXPECT(runtime.submit(t % 2 == 0 ? parent : PTO_NO_KERNEL, {inout(h)}) != 0);
    }
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  };
  std::thread other(submitter);
  submitter();
  other.join();
}

TILEWISE_TEST_MAIN
