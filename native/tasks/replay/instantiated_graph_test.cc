// A replay of an instantiated graph has the effect of submitting again, for any other tasks.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <random>
#include <thread>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

uint64_t fold(uint64_t target, uint64_t first, uint64_t second, uint64_t salt) {
  return (target + first) * 0x9E3779B97F4A7C15u + second * 3 + salt;
}

/// target = fold(target, first, second, scalar): only the right order gives the same value.
int fold_kernel(void* const* buffers, const uint64_t* scalars) {
  auto& target = *static_cast<uint64_t*>(buffers[2]);
  target = fold(target, *static_cast<uint64_t*>(buffers[0]), *static_cast<uint64_t*>(buffers[1]), scalars[0]);
  return PTO_OK;
}

struct Fold {
  size_t first, second, target;
  uint64_t salt;
};

/// Cells, their expected values, and operations on both.
struct Cells {
  Cells(Runtime& its_runtime, size_t count) : runtime(its_runtime), values(count), oracle(count) {
    kernel = runtime.kernel("fold", fold_kernel);
    for (size_t c = 0; c < count; ++c) {
      values[c] = oracle[c] = c * 77 + 1;
      handles.push_back(runtime.add(values[c]));
    }
  }
  void submit(const Fold& task) {
    runtime.submit(kernel, {in(handles[task.first]), in(handles[task.second]), inout(handles[task.target])},
                   {.scalars = {task.salt}});
  }
  void expect(const Fold& task, size_t shift = 0) {
    uint64_t& target = oracle[task.target + shift];
    target = fold(target, oracle[task.first + shift], oracle[task.second + shift], task.salt);
  }

  Runtime& runtime;
  pto_kernel kernel;
  std::vector<uint64_t> values, oracle;
  std::vector<pto_handle> handles;
};

Fold draw(std::mt19937_64& random, size_t cells) {
  const size_t target = random() % cells;
  return {(target + 1 + random() % (cells - 1)) % cells, (target + 1 + random() % (cells - 1)) % cells, target,
          random()};
}

void spin_for(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

/// Two tasks, one on each thread: the submitter's takes long, the worker's ends slightly later.
struct Pair {
  static int kernel(void* const*, const uint64_t* scalars) {
    auto& pair = *pointer<Pair>(scalars[0]);
    if (std::this_thread::get_id() == pair.submitter) {
      ++pair.on_submitter;
      spin_for(std::chrono::milliseconds(1));
      pair.go = true;
      return PTO_OK;
    }
    ++pair.on_worker;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
    while (!pair.go && std::chrono::steady_clock::now() < end) {
    }
    spin_for(std::chrono::microseconds(60));
    return PTO_OK;
  }

  std::thread::id submitter = std::this_thread::get_id();
  std::atomic<int> on_submitter = 0, on_worker = 0;
  std::atomic<bool> go = false;
};

}  // namespace

CASE("replays back to back, rebound, between tasks, reads and waits give sequential values") {
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    std::mt19937_64 random(seed);
    const auto workers = static_cast<uint32_t>(seed % 4);
    Runtime runtime(workers, seed % 2 == 0 ? 0 : 16);
    const size_t half = 2 + random() % 12;
    Cells cells(runtime, 2 * half);
    std::vector<Fold> tasks;
    EXPECT_EQ(pto_record_begin(runtime), 0);
    for (size_t t = 0; t < 1 + random() % 60; ++t) {
      tasks.push_back(draw(random, half));
      cells.submit(tasks.back());
      cells.expect(tasks.back());
    }
    const pto_recording recording = pto_record_end(runtime);
    const std::vector<pto_handle> second(cells.handles.begin() + static_cast<int64_t>(half), cells.handles.end());
    for (int step = 0; step < 600 / kSlowdown; ++step) {
      const uint64_t dice = random() % 16;
      if (dice < 9) {
        EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
        for (const Fold& task : tasks) cells.expect(task);
      } else if (dice < 11) {
        std::vector<pto_handle> from, to;
        for (size_t c = 0; c < half; ++c) {
          const bool is_used = std::any_of(tasks.begin(), tasks.end(), [&](const Fold& task) {
            return task.first == c || task.second == c || task.target == c;
          });
          if (!is_used) continue;
          from.push_back(cells.handles[c]);
          to.push_back(second[c]);
        }
        EXPECT_EQ(pto_replay(runtime, recording, from.data(), to.data(), static_cast<uint32_t>(from.size())), 0);
        for (const Fold& task : tasks) cells.expect(task, half);
      } else if (dice < 13) {
        const Fold task = draw(random, 2 * half);
        cells.submit(task);
        cells.expect(task);
      } else if (dice == 13) {
        const size_t c = random() % (2 * half);
        const auto* seen = static_cast<const uint64_t*>(pto_read(runtime, cells.handles[c], nullptr, PTO_FOREVER));
        EXPECT(seen != nullptr && *seen == cells.oracle[c]);
      } else {
        EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
        EXPECT(cells.values == cells.oracle);
      }
    }
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT(cells.values == cells.oracle);
    EXPECT_EQ(pto_recording_free(runtime, recording), 0);
  }
}

CASE("a replay is ordered task by task: after earlier tasks, before later ones, and before the next replay") {
  Runtime runtime(3);
  const pto_kernel set = runtime.kernel("set", set_kernel), copy = runtime.kernel("copy", copy_kernel);
  const pto_kernel gated = runtime.kernel("gated", Gate::kernel), add = runtime.kernel("add", add_kernel);
  int64_t x = 0, y = 1, seen_x = 0, seen_y = 0, one = 1;
  const pto_handle hx = runtime.add(x), hy = runtime.add(y), hsx = runtime.add(seen_x), hsy = runtime.add(seen_y);
  const pto_handle h1 = runtime.add(one);
  Gate before, inside;
  inside.open();
  pto_record_begin(runtime);
  runtime.submit(add, {inout(hx), in(h1)});
  runtime.submit(gated, {inout(hy)}, {.scalars = {scalar(&inside)}});
  runtime.submit(add, {inout(hy), in(h1)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  // The first task waits for one outside; the others run.
  runtime.submit(gated, {inout(hx)}, {.scalars = {scalar(&before)}});
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  const pto_task behind = runtime.submit(copy, {out(hsy), in(hy)});
  EXPECT_EQ(pto_wait(runtime, behind, 10), 0);
  EXPECT_EQ(seen_y, 3);
  before.open();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(x, 2);
  // The second task of a replay is delayed: readers of the first one's result run, and so does the next replay's first.
  inside.is_open = 0;
  inside.num_inside = 0;
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  inside.await_inside(1);  // a worker must run it: this thread would block in it
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  const pto_task second = runtime.submit(copy, {out(hsx), in(hx)});
  EXPECT_EQ(pto_wait(runtime, second, 10), 0);
  EXPECT_EQ(seen_x, 4);
  EXPECT_EQ(pto_wait_all(runtime, 0.02), PTO_TIMEOUT);
  EXPECT_EQ(y, 3);
  inside.open();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(y, 5);
  runtime.submit(set, {out(hx)}, {.scalars = {9}});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(x, 9);
}

CASE("a failure poisons exactly its successors in and after the replay, until it is overwritten") {
  for (const uint32_t workers : {0u, 2u}) {
    Runtime runtime(workers);
    static std::atomic<bool> fails;
    fails = false;
    const pto_kernel maybe = runtime.kernel("maybe", [](void* const* buffers, const uint64_t*) -> int {
      ++value_of(buffers[0]);
      return fails ? PTO_TASK_FAILED : PTO_OK;
    });
    const pto_kernel add = runtime.kernel("add", add_kernel), set = runtime.kernel("set", set_kernel);
    int64_t x = 0, y = 0, z = 0, one = 1;
    const pto_handle hx = runtime.add(x), hy = runtime.add(y), hz = runtime.add(z), h1 = runtime.add(one);
    pto_record_begin(runtime);
    runtime.submit(maybe, {inout(hx)});
    runtime.submit(add, {inout(hy), in(hx)});
    runtime.submit(add, {inout(hz), in(h1)});
    const pto_recording recording = pto_record_end(runtime);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    fails = true;
    pto_replay(runtime, recording, nullptr, nullptr, 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
    EXPECT(x == 2 && y == 1 && z == 2);
    fails = false;
    for (int replay = 0; replay < 3; ++replay) {  // the poison persists over replays
      pto_replay(runtime, recording, nullptr, nullptr, 0);
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
    }
    EXPECT(x == 2 && y == 1 && z == 5);
    const pto_task reader = runtime.submit(add, {inout(hz), in(hy)});
    EXPECT_EQ(pto_wait(runtime, reader, PTO_FOREVER), PTO_TASK_FAILED);
    runtime.submit(set, {out(hx)}, {.scalars = {10}});
    runtime.submit(set, {out(hy)}, {.scalars = {20}});
    runtime.submit(set, {out(hz)}, {.scalars = {30}});
    pto_wait_all(runtime, PTO_FOREVER);
    for (int replay = 0; replay < 3; ++replay) EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT(x == 13 && y == 20 + 11 + 12 + 13 && z == 33);
  }
}

CASE("cancelling everything ends a replay early; the next one runs") {
  Runtime runtime(1);
  const pto_kernel gated = runtime.kernel("gated", Gate::kernel), add = runtime.kernel("add", add_kernel);
  int64_t x = 0, one = 1;
  const pto_handle hx = runtime.add(x), h1 = runtime.add(one);
  Gate gate;
  gate.open();
  pto_record_begin(runtime);
  runtime.submit(gated, {inout(hx)}, {.scalars = {scalar(&gate)}});
  for (int t = 0; t < 20; ++t) runtime.submit(add, {inout(hx), in(h1)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  gate.is_open = 0;
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  gate.await_inside(2);
  EXPECT_EQ(pto_cancel_all(runtime), 0);
  gate.open();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_CANCELLED);
  EXPECT_EQ(x, 20);
  EXPECT(pto_write(runtime, hx, nullptr, PTO_FOREVER) != nullptr);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(x, 40);
}

CASE("a thread that waits for a long replay sleeps and is woken; closing waits for replays") {
  int64_t x = 0;
  {
    Runtime runtime(1);
    const pto_kernel busy = runtime.kernel("busy", [](void* const* buffers, const uint64_t* scalars) -> int {
      ++value_of(buffers[0]);
      return busy_kernel(buffers, scalars);
    });
    const pto_handle h = runtime.add(x);
    pto_record_begin(runtime);
    for (int t = 0; t < 4; ++t) runtime.submit(busy, {inout(h)}, {.scalars = {3000}});
    const pto_recording recording = pto_record_end(runtime);
    for (int replay = 0; replay < 5; ++replay) {
      EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
      EXPECT_EQ(pto_wait_all(runtime, 10), 0);  // with a timeout this thread does not help
      EXPECT_EQ(x, 4 * (replay + 2));
    }
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  }
  EXPECT_EQ(x, 28);
}

CASE("a buffer of a replay can be unregistered only after the replay, and not replayed afterwards") {
  Runtime runtime(1);
  const pto_kernel gated = runtime.kernel("gated", Gate::kernel), add = runtime.kernel("add", add_kernel);
  int64_t x = 0, y = 0;
  const pto_handle hx = runtime.add(x), hy = runtime.add(y);
  Gate gate;
  gate.open();
  pto_record_begin(runtime);
  runtime.submit(gated, {inout(hx)}, {.scalars = {scalar(&gate)}});
  runtime.submit(add, {inout(hy), in(hx)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  gate.is_open = 0;
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  EXPECT_EQ(pto_unregister(runtime, hy, 0.01), PTO_TIMEOUT);
  EXPECT_EQ(pto_freeze(runtime, hx, 0), 0);
  gate.open();
  EXPECT_EQ(pto_unregister(runtime, hy, PTO_FOREVER), 0);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("recordings are made and freed while their replays run, and reuse each other's slots") {
  Runtime runtime(2);
  Cells cells(runtime, 8);
  std::mt19937_64 random(5);
  for (int replay = 0; replay < 300 / kSlowdown; ++replay) {
    std::vector<Fold> tasks;
    pto_record_begin(runtime);
    for (size_t t = 0; t < 1 + random() % 40; ++t) {
      tasks.push_back(draw(random, 8));
      cells.submit(tasks.back());
    }
    const pto_recording recording = pto_record_end(runtime);
    const size_t replays = random() % 4;
    for (size_t r = 0; r < replays; ++r) EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
    EXPECT_EQ(pto_recording_free(runtime, recording), 0);
    for (size_t r = 0; r <= replays; ++r) {
      for (const Fold& task : tasks) cells.expect(task);
    }
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT(cells.values == cells.oracle);
}

CASE("a recording without room is submitted task by task") {
  Runtime runtime(1);
  const pto_kernel count = runtime.kernel("count", count_kernel);
  std::atomic<int> ran{0};
  pto_recording recordings[3];
  const int size = 120000;
  for (pto_recording& recording : recordings) {
    pto_record_begin(runtime);
    for (int t = 0; t < size; ++t) runtime.submit(count, {}, {.scalars = {scalar(&ran)}});
    recording = pto_record_end(runtime);
  }
  for (const pto_recording recording : recordings) EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(ran.load(), 6 * size);
}

CASE("frozen buffers, tasks without kernels and priorities keep their meaning in a replay") {
  Runtime runtime(0);
  static std::vector<uint64_t> order;
  order.clear();
  const pto_kernel note = runtime.kernel("note", [](void* const*, const uint64_t* scalars) -> int {
    order.push_back(scalars[0]);
    return PTO_OK;
  });
  const pto_kernel add = runtime.kernel("add", add_kernel);
  int64_t x = 0, weight = 3;
  const pto_handle hx = runtime.add(x), hw = runtime.add(weight);
  EXPECT_EQ(pto_freeze(runtime, hw, 1), 0);
  pto_record_begin(runtime);
  runtime.submit(add, {inout(hx), in(hw)});
  runtime.submit(PTO_NO_KERNEL, {inout(hx)});
  runtime.submit(add, {inout(hx), in(hw)});
  for (uint64_t t = 0; t < 4; ++t) runtime.submit(note, {}, {.scalars = {t}, .priority = static_cast<int32_t>(t)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  order.clear();
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT(order == (std::vector<uint64_t>{3, 2, 1, 0}));
  EXPECT_EQ(x, 12);
  EXPECT_EQ(pto_freeze(runtime, hw, 0), 0);  // its readers would have to be tracked from now on
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), PTO_BAD_ARGUMENT);
  EXPECT(has(pto_last_error(), "no longer frozen"));
  EXPECT_EQ(pto_freeze(runtime, hw, 1), 0);
  EXPECT_EQ(pto_freeze(runtime, hx, 1), 0);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_freeze(runtime, hx, 0), 0);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(x, 18);
}

CASE("a trace shows every task of a replay with its times") {
  Runtime runtime(1);
  Cells cells(runtime, 4);
  EXPECT_EQ(pto_trace_enable(runtime, 1000), 0);
  pto_record_begin(runtime);
  for (uint64_t t = 0; t < 10; ++t) cells.submit({t % 4, (t + 1) % 4, (t + 2) % 4, t});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  for (int replay = 0; replay < 3; ++replay) EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  std::vector<pto_trace_task> records(100);
  EXPECT_EQ(pto_trace_tasks(runtime, records.data(), 100), uint64_t{40});
  for (size_t r = 0; r < 40; ++r) {
    const pto_trace_task& record = records[r];
    EXPECT(record.submit_ns > 0 && record.submit_ns <= record.ready_ns && record.ready_ns <= record.start_ns &&
           record.start_ns <= record.end_ns);
    for (size_t other = 0; other < r; ++other) EXPECT(records[other].task != record.task);
  }
}

CASE("a replay that helps an earlier one waits for its end, instead of submitting at the first idle moment") {
  constexpr uint32_t kWindow = 256, kLanes = 2, kTasks = 4000;  // gives more patience than Pair needs
  pto_config config = Runtime::config(1, kWindow);
  config.max_submitters = kLanes;
  Runtime runtime(config);
  const pto_kernel meet = runtime.kernel("meet", Pair::kernel);
  int64_t x = 0, y = 0;
  const pto_handle hx = runtime.add(x), hy = runtime.add(y);
  Pair pair;
  pto_record_begin(runtime);
  runtime.submit(meet, {inout(hx)}, {.scalars = {scalar(&pair)}});
  runtime.submit(meet, {inout(hy)}, {.scalars = {scalar(&pair)}});
  for (uint32_t t = 2; t < kTasks; ++t) runtime.submit(PTO_NO_KERNEL, {in(hx), in(hy)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  int num_rounds = 0;
  for (int attempt = 0; attempt < 100 && num_rounds < 5; ++attempt) {  // threads may be delayed, or not overlap
    pair.on_submitter = pair.on_worker = 0;
    pair.go = false;
    EXPECT_EQ(pto_trace_enable(runtime, 2 * kTasks), 0);
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
    const bool has_met = pair.on_submitter >= 1 && pair.on_worker >= 1;
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    std::vector<pto_trace_task> records(2 * kTasks);
    EXPECT_EQ(pto_trace_enable(runtime, 0), 0);
    EXPECT_EQ(pto_trace_tasks(runtime, records.data(), records.size()), uint64_t{2 * kTasks});
    // Replayed tasks have separate slots, after those of the submitters.
    const bool was_replay = std::all_of(records.begin(), records.end(), [](const pto_trace_task& record) {
      return (record.task >> 4 & 0xFFFFF) >= (1 + kLanes) * kWindow;
    });
    num_rounds += has_met && was_replay;
  }
  EXPECT_EQ(num_rounds, 5);
}

TILEWISE_TEST_MAIN
