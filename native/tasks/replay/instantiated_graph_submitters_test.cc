// Replays of recordings with several submitters and full windows: no replay is lost, no two overlap, and no false
// deadlock is reported.
#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

CASE("several submitters replay one recording and submit on its buffers: no replay is lost or overlaps another") {
  Runtime runtime(2, 64);
  static std::atomic<int> num_inside;
  static std::atomic<int> num_crowded;
  num_inside = num_crowded = 0;
  const pto_kernel alone = runtime.kernel("alone", [](void* const* buffers, const uint64_t*) -> int {
    if (num_inside.fetch_add(1) != 0) num_crowded.fetch_add(1);
    ++value_of(buffers[0]);
    num_inside.fetch_sub(1);
    return PTO_OK;
  });
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  pto_record_begin(runtime);
  for (int t = 0; t < 5; ++t) runtime.submit(alone, {inout(h)});
  const pto_recording recording = pto_record_end(runtime);
  const int replays = 2000 / kSlowdown;
  std::vector<std::thread> threads;
  for (int submitter = 0; submitter < 3; ++submitter) {
    threads.emplace_back([&, submitter] {
      for (int replay = 0; replay < replays; ++replay) {
        EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
        if (replay % (submitter + 2) == 0) runtime.submit(alone, {inout(h)});
        if (replay % 100 == 0) EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
      }
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  int64_t expected = 5;
  for (int submitter = 0; submitter < 3; ++submitter)
    expected += 5 * replays + (replays + submitter + 1) / (submitter + 2);
  EXPECT_EQ(x, expected);
  EXPECT_EQ(num_crowded.load(), 0);
  EXPECT_EQ(runtime.stats().num_completed, static_cast<uint64_t>(expected));
}

CASE("a full window behind a replay that other tasks delay is no deadlock") {
  Runtime runtime(1, 4);
  const pto_kernel gated = runtime.kernel("gated", Gate::kernel), add = runtime.kernel("add", add_kernel);
  int64_t x = 0, one = 1;
  const pto_handle hx = runtime.add(x), h1 = runtime.add(one);
  Gate gate;
  gate.open();
  pto_record_begin(runtime);
  runtime.submit(gated, {inout(hx)}, {.scalars = {scalar(&gate)}});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  for (int replay = 0; replay < 10; ++replay) {
    gate.is_open = 0;
    gate.num_inside = 0;
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
    std::thread opener([&] {
      gate.await_inside(1);
      for (int n = 0; n < 200; ++n) std::this_thread::yield();
      gate.open();
    });
    for (int t = 0; t < 12; ++t) EXPECT(runtime.submit(add, {inout(hx), in(h1)}) != 0);
    opener.join();
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT_EQ(x, 12 * (replay + 1));
  }
}

CASE("no false alarm: submitters with full windows behind replays of other submitters") {
  Runtime runtime(1, 2);
  const pto_kernel add = runtime.kernel("add", add_kernel);
  int64_t x = 0, one = 1;
  const pto_handle hx = runtime.add(x), h1 = runtime.add(one);
  pto_record_begin(runtime);
  runtime.submit(add, {inout(hx), in(h1)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  std::atomic<int> num_refused{0};
  std::vector<std::thread> threads;
  const int replays = 100'000 / kSlowdown;
  for (int submitter = 0; submitter < 4; ++submitter) {
    threads.emplace_back([&, submitter] {
      for (int n = 0; n < replays; ++n) {
        if (submitter < 2) {
          num_refused += pto_replay(runtime, recording, nullptr, nullptr, 0) != 0;
        } else {
          for (int t = 0; t < 4; ++t) num_refused += runtime.submit(add, {inout(hx), in(h1)}) == 0;
        }
      }
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_refused.load(), 0);
  EXPECT_EQ(x, 1 + 10 * replays);
}

CASE("submitters replay one recording on their own buffers, task by task because a parameter orders nothing") {
  Runtime runtime(1, 64);
  const pto_kernel add = runtime.kernel("add", add_kernel);
  std::vector<int64_t> x(8 * 4);
  int64_t one = 1;
  std::vector<pto_handle> handles;
  for (auto& value : x) handles.push_back(runtime.add(value));
  const pto_handle h1 = runtime.add(one);
  pto_record_begin(runtime);
  for (size_t t = 0; t < 8; ++t) runtime.submit(add, {inout(handles[t]), in(h1), no_dep(h1)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  std::vector<std::thread> threads;
  for (int submitter = 1; submitter < 4; ++submitter) {
    threads.emplace_back([&, submitter] {
      for (int n = 0; n < 300 / kSlowdown; ++n) {
        EXPECT_EQ(pto_replay(runtime, recording, handles.data(), handles.data() + 8 * submitter, 8), 0);
      }
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t c = 8; c < 32; ++c) EXPECT_EQ(x[c], 300 / kSlowdown);
}

CASE("freeing a recording inside a task is an error") {
  Runtime runtime(1);
  static PTORuntime* inner = nullptr;
  static pto_recording recording = 0;
  inner = runtime;
  const pto_kernel frees = runtime.kernel(
      "frees",
      [](void* const*, const uint64_t*) -> int {
        return pto_recording_free(inner, recording) == PTO_BAD_ARGUMENT ? PTO_OK : PTO_TASK_FAILED;
      },
      PTO_SUBMITS);
  pto_record_begin(runtime);
  recording = pto_record_end(runtime);
  runtime.submit(frees, {});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(pto_recording_free(runtime, recording), 0);
}

CASE("tasks of a replay that are ended from outside: the replay waits for them, and a full window is no deadlock") {
  Runtime runtime(1, 4);
  static std::atomic<pto_task> to_end;
  to_end = 0;
  const pto_kernel later = runtime.kernel("later", [](void* const*, const uint64_t*) -> int {
    to_end = pto_this_task();
    return PTO_LATER;
  });
  const pto_kernel add = runtime.kernel("add", add_kernel);
  int64_t x = 0, one = 1;
  const pto_handle hx = runtime.add(x), h1 = runtime.add(one);
  EXPECT_EQ(pto_this_task(), pto_task{0});
  std::atomic<bool> is_over{false};
  std::thread ender([&] {
    while (!is_over) {
      const pto_task task = to_end.exchange(0);
      if (task == 0) {
        std::this_thread::yield();
        continue;
      }
      std::this_thread::sleep_for(
          std::chrono::milliseconds(2));  // long enough for the submitter to check for a deadlock
      EXPECT_EQ(pto_task_complete(runtime, task, PTO_OK), 0);
    }
  });
  pto_record_begin(runtime);
  runtime.submit(later, {inout(hx)});
  runtime.submit(add, {inout(hx), in(h1)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  for (int replay = 0; replay < 5; ++replay) {
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
    for (int t = 0; t < 12; ++t) EXPECT(runtime.submit(add, {inout(hx), in(h1)}) != 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT_EQ(x, 1 + 13 * (replay + 1));
  }
  is_over = true;
  ender.join();
}

TILEWISE_TEST_MAIN
