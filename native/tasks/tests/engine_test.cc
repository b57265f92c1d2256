// Every call of pto_api.h, each in the simplest situation that tests it.
#include <cstring>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

std::atomic<PTORuntime*> inner_runtime{nullptr};

}  // namespace

CASE("open and close, with default and given sizes, and errors that name the field") {
  PTORuntime* runtime = nullptr;
  EXPECT_EQ(pto_runtime_open(nullptr, &runtime), 0);
  EXPECT_EQ(pto_runtime_close(runtime), 0);
  pto_config config = Runtime::config(1, 3);
  EXPECT_EQ(pto_runtime_open(&config, &runtime), PTO_BAD_ARGUMENT);
  EXPECT(has(pto_last_error(), "window"));
  EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_runtime_close(nullptr), PTO_BAD_ARGUMENT);
}

CASE("kernels: added, built in, by name, unknown") {
  Runtime runtime;
  EXPECT(pto_kernel_find(runtime, "sum_f32") >= 0);
  EXPECT_EQ(pto_kernel_find(runtime, "no such kernel"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_kernel_add(runtime, "", empty_kernel, 0), PTO_BAD_ARGUMENT);
  const pto_kernel mine = runtime.kernel("mine", empty_kernel);
  EXPECT_EQ(pto_kernel_find(runtime, "mine"), mine);
  EXPECT_EQ(std::string(pto_kernel_name(runtime, mine)), std::string("mine"));
  EXPECT_EQ(pto_library_load(runtime, "/no/such/library.so"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(runtime.submit(999, {}), pto_task{0});
  EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
}

CASE("a chain on one buffer runs in order, and reads see the last write") {
  for (const uint32_t workers : {0u, 1u, 2u, 4u}) {
    Runtime runtime(workers);
    int64_t x = 1;
    int64_t expected = 1;
    const pto_handle h = runtime.add(x);
    const pto_kernel step = runtime.kernel("step", step_kernel);
    for (uint64_t i = 0; i < 3000; ++i) {
      EXPECT(runtime.submit(step, {inout(h)}, {.scalars = {i}}) != 0);
      expected = static_cast<int64_t>(static_cast<uint64_t>(expected) * 3 + i);
    }
    const auto* seen = static_cast<const int64_t*>(pto_read(runtime, h, nullptr, PTO_FOREVER));
    EXPECT(seen == &x);
    EXPECT_EQ(x, expected);
    EXPECT_EQ(pto_unregister(runtime, h, PTO_FOREVER), 0);
    EXPECT(pto_address(runtime, h) == nullptr);
  }
}

CASE("every call rejects a stale handle, also after its index is reused") {
  Runtime runtime;
  int64_t x = 0;
  const pto_handle old = runtime.add(x);
  EXPECT_EQ(pto_unregister(runtime, old, PTO_FOREVER), 0);
  const pto_handle now = runtime.add(x);
  EXPECT(now != old);
  EXPECT_EQ(runtime.submit(PTO_NO_KERNEL, {in(old)}), pto_task{0});
  EXPECT(has(pto_last_error(), "handle"));
  EXPECT(pto_read(runtime, old, nullptr, 0) == nullptr);
  EXPECT(pto_write(runtime, old, nullptr, 0) == nullptr);
  EXPECT_EQ(pto_unregister(runtime, old, 0), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_bytes(runtime, old), uint64_t{0});
  EXPECT_EQ(pto_bytes(runtime, now), uint64_t{8});
  pto_scope_begin(runtime);
  const pto_handle inner = pto_alloc(runtime, 100);
  EXPECT(pto_address(runtime, inner) != nullptr);
  EXPECT_EQ(pto_scope_end(runtime), 0);
  EXPECT(pto_address(runtime, inner) == nullptr);
}

CASE("bad submissions are rejected and nothing is submitted") {
  Runtime runtime;
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  const pto_kernel step = runtime.kernel("step", step_kernel);
  const pto_region far{.offset = 4, .ndim = 1, .size = {8}, .stride = {1}};
  const pto_region wide{.offset = 0, .ndim = 1, .size = {4}, .stride = {2}};
  EXPECT_EQ(runtime.submit(step, {in(0)}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {fresh(0)}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {inout(h, &far)}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {inout(h, &wide)}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {{static_cast<pto_mode>(9), 0, h, {0}, nullptr, nullptr}}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {inout(h)}, {.target_worker = 5}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {inout(h)}, {.type = static_cast<pto_worker_type>(7)}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {inout(h)}, {.waits = {{12345, 1}}}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {inout(h)}, {.after = {~uint64_t{15}}}), pto_task{0});
  EXPECT_EQ(runtime.submit(step, {fresh(~uint64_t{0})}), pto_task{0});
  EXPECT_EQ(pto_alloc(runtime, ~uint64_t{0}), pto_handle{0});
  std::vector<pto_param> many(PTO_MAX_PARAMS + 1, in(h));
  EXPECT_EQ(runtime.submit(step, many), pto_task{0});
  EXPECT_EQ(runtime.stats().num_submitted, uint64_t{0});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("every parameter, every scalar and many edges reach the kernel") {
  Runtime runtime;
  std::vector<int64_t> values(PTO_MAX_PARAMS, 0);
  std::vector<pto_param> params;
  const pto_kernel set = runtime.kernel("set", set_kernel);
  for (auto& value : values) {
    params.push_back(inout(runtime.add(value)));
    runtime.submit(set, {params.back()}, {.scalars = {5}});
  }
  const pto_kernel all = runtime.kernel("all", [](void* const* buffers, const uint64_t* scalars) -> int {
    for (int p = 0; p < PTO_MAX_PARAMS; ++p) value_of(buffers[p]) += static_cast<int64_t>(scalars[p % PTO_MAX_SCALARS]);
    return PTO_OK;
  });
  Extra extra;
  for (uint64_t s = 0; s < PTO_MAX_SCALARS; ++s) extra.scalars.push_back(s);
  std::vector<pto_task> before;
  for (int t = 0; t < 100; ++t) before.push_back(runtime.submit(PTO_NO_KERNEL, {}));
  extra.after = before;
  EXPECT(runtime.submit(all, params, extra) != 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  for (int p = 0; p < PTO_MAX_PARAMS; ++p) EXPECT_EQ(values[p], 5 + p % PTO_MAX_SCALARS);
}

CASE("explicit edges order tasks without data, also after completed ones") {
  Runtime runtime(2);
  static std::atomic<int> counter;
  counter = 0;
  const pto_kernel expect_kernel = runtime.kernel("expect", [](void* const*, const uint64_t* scalars) -> int {
    return counter.fetch_add(1) == static_cast<int>(scalars[0]) ? PTO_OK : PTO_TASK_FAILED;
  });
  pto_task last = 0;
  for (uint64_t t = 0; t < 500; ++t) last = runtime.submit(expect_kernel, {}, {.scalars = {t}, .after = {last}});
  EXPECT_EQ(pto_wait(runtime, last, PTO_FOREVER), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(pto_is_complete(runtime, last), 1);
  EXPECT_EQ(pto_is_complete(runtime, 0), PTO_BAD_ARGUMENT);
}

CASE("priorities: with one worker the highest runs first, then the order of submission, then the background") {
  Runtime runtime(1);
  static std::vector<uint64_t> order;
  order.clear();
  const pto_kernel note = runtime.kernel("note", [](void* const*, const uint64_t* scalars) -> int {
    order.push_back(scalars[0]);
    return PTO_OK;
  });
  Gate gate;
  runtime.submit(runtime.kernel("gate", Gate::kernel), {}, {.scalars = {scalar(&gate)}});
  gate.await_inside(1);
  const int priorities[] = {0, -1, 5, 0, 9, -7, 5};
  std::vector<pto_task> tasks;
  for (uint64_t t = 0; t < 7; ++t) {
    tasks.push_back(runtime.submit(note, {}, {.scalars = {t}, .priority = priorities[t]}));
  }
  gate.open();
  EXPECT_EQ(pto_wait_all(runtime, 60), 0);
  EXPECT(order == (std::vector<uint64_t>{4, 2, 6, 0, 3, 1, 5}));
}

CASE("target_worker: only the named worker runs the task") {
  Runtime runtime(3);
  static thread_local int here = 0;
  static std::atomic<int> wrong;
  static std::atomic<uint64_t> thread_of[3];
  wrong = 0;
  for (auto& word : thread_of) word = 0;
  const pto_kernel check = runtime.kernel("check", [](void* const*, const uint64_t* scalars) -> int {
    uint64_t expected = 0;
    const uint64_t self = scalar(&here);
    if (!thread_of[scalars[0]].compare_exchange_strong(expected, self) && expected != self) ++wrong;
    return PTO_OK;
  });
  for (uint64_t t = 0; t < 600; ++t) {
    EXPECT(runtime.submit(check, {}, {.scalars = {t % 3}, .target_worker = static_cast<int32_t>(t % 3) + 1}) != 0);
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(wrong.load(), 0);
  EXPECT(thread_of[0].load() != thread_of[1].load() && thread_of[1].load() != thread_of[2].load());
}

CASE("worker types: a task runs on a worker of its type; a type without worker is rejected") {
  const uint8_t types[] = {1 << PTO_CUBE, 1 << PTO_VECTOR | 1 << PTO_AI_CPU};
  pto_config config = Runtime::config(2);
  config.worker_types = types;
  Runtime runtime(config);
  static thread_local int here = 0;
  static std::atomic<uint64_t> cube, vector;
  cube = vector = 0;
  const pto_kernel where = runtime.kernel("where", [](void* const*, const uint64_t* scalars) -> int {
    pointer<std::atomic<uint64_t>>(scalars[0])->store(scalar(&here));
    return PTO_OK;
  });
  for (int t = 0; t < 200; ++t) {
    EXPECT(runtime.submit(where, {}, {.scalars = {scalar(&cube)}, .type = PTO_CUBE}) != 0);
    EXPECT(runtime.submit(where, {}, {.scalars = {scalar(&vector)}, .type = PTO_VECTOR}) != 0);
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT(cube.load() != vector.load() && cube.load() != 0 && vector.load() != 0);
  EXPECT_EQ(runtime.submit(where, {}, {.scalars = {0}, .type = PTO_ACCELERATOR}), pto_task{0});
  EXPECT_EQ(runtime.submit(where, {}, {.target_worker = 1, .type = PTO_VECTOR}), pto_task{0});
}

CASE("a predicate is read after its writer, and skips only the kernel") {
  Runtime runtime(2);
  uint32_t flags[2] = {9, 9};
  int64_t x[2] = {1, 1};
  const pto_kernel slow_set = runtime.kernel("slow", [](void* const* buffers, const uint64_t* scalars) -> int {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    *static_cast<uint32_t*>(buffers[0]) = static_cast<uint32_t>(scalars[0]);
    return PTO_OK;
  });
  const pto_kernel set = runtime.kernel("set", set_kernel);
  for (int i = 0; i < 2; ++i) {
    const pto_handle flag = runtime.add(flags[i]);
    const pto_handle h = runtime.add(x[i]);
    runtime.submit(slow_set, {out(flag)}, {.scalars = {static_cast<uint64_t>(i)}});
    EXPECT(runtime.submit(set, {inout(h)}, {.scalars = {77}, .predicate = flag}) != 0);
    runtime.submit(slow_set, {out(flag)}, {.scalars = {1}});  // waits for the predicate's reader
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(x[0], 1);
  EXPECT_EQ(x[1], 77);
}

CASE("PTO_LATER: ended after and before the kernel returns, with success and failure, once") {
  for (const bool early : {false, true}) {
    Runtime runtime(2);
    int64_t x = 0;
    const pto_handle h = runtime.add(x);
    static std::atomic<bool> entered;
    static std::atomic<bool> may_leave;
    entered = false;
    may_leave = !early;
    const pto_kernel later = runtime.kernel("later", [](void* const*, const uint64_t*) -> int {
      entered = true;
      while (!may_leave) std::this_thread::yield();
      return PTO_LATER;
    });
    const pto_kernel set = runtime.kernel("set", set_kernel);
    const pto_task task = runtime.submit(later, {inout(h)});
    const pto_task next = runtime.submit(set, {inout(h)}, {.scalars = {3}});
    while (!entered) std::this_thread::yield();
    if (!early) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(pto_is_complete(runtime, next), 0);
    EXPECT_EQ(pto_wait(runtime, task, 0.01), PTO_TIMEOUT);
    EXPECT_EQ(pto_task_complete(runtime, task, PTO_OK), 0);
    may_leave = true;
    EXPECT_EQ(pto_wait(runtime, next, PTO_FOREVER), 0);
    EXPECT_EQ(x, 3);
    EXPECT_EQ(pto_task_complete(runtime, task, PTO_OK), PTO_BAD_ARGUMENT);
    const pto_task bad = runtime.submit(later, {inout(h)}, {.flags = PTO_KEEP});
    std::thread([&] {
      while (pto_task_complete(runtime, bad, 5) != 0) std::this_thread::yield();
    }).join();
    EXPECT_EQ(pto_wait(runtime, bad, PTO_FOREVER), PTO_TASK_FAILED);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  }
}

CASE("events: a task waits for a value without occupying a worker, for several values, and for a reached value") {
  Runtime runtime(1);
  std::atomic<int> count{0};
  const pto_kernel counting = runtime.kernel("count", count_kernel);
  const pto_event a = pto_event_open(runtime);
  const pto_event b = pto_event_open(runtime);
  EXPECT(a != 0 && b != 0 && a != b);
  std::vector<pto_task> tasks;
  for (uint64_t value = 0; value < 10; ++value) {
    tasks.push_back(runtime.submit(counting, {}, {.scalars = {scalar(&count)}, .waits = {{a, value}, {b, value / 2}}}));
  }
  EXPECT_EQ(pto_wait(runtime, tasks[0], PTO_FOREVER), 0);
  EXPECT_EQ(pto_wait(runtime, tasks[1], 0.01), PTO_TIMEOUT);
  EXPECT_EQ(pto_event_post(runtime, a, 3), 0);
  EXPECT_EQ(pto_wait(runtime, tasks[1], PTO_FOREVER), 0);
  EXPECT_EQ(pto_is_complete(runtime, tasks[2]), 0);
  std::thread([&] { pto_event_post(runtime, b, 100); }).join();
  EXPECT_EQ(pto_wait(runtime, tasks[3], PTO_FOREVER), 0);
  EXPECT_EQ(pto_is_complete(runtime, tasks[4]), 0);
  EXPECT_EQ(pto_event_post(runtime, a, 100), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(count.load(), 10);
  EXPECT_EQ(pto_event_value(runtime, a), uint64_t{103});
  EXPECT_EQ(pto_event_post(runtime, 99, 1), PTO_BAD_ARGUMENT);
}

CASE("a kernel may post an event") {
  Runtime runtime(1);
  std::atomic<int> count{0};
  static pto_event event;
  event = pto_event_open(runtime);
  inner_runtime = runtime;
  const pto_kernel raise_kernel = runtime.kernel(
      "post", [](void* const*, const uint64_t*) -> int { return pto_event_post(inner_runtime, event, 1); });
  const pto_kernel counting = runtime.kernel("count", count_kernel);
  for (uint64_t t = 1; t <= 50; ++t) runtime.submit(counting, {}, {.scalars = {scalar(&count)}, .waits = {{event, t}}});
  for (int t = 0; t < 50; ++t) runtime.submit(raise_kernel, {});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(count.load(), 50);
}

CASE("wait: deadlines, wait_any names the first, notify calls back once") {
  Runtime runtime(2);
  Gate gate;
  const pto_kernel gated = runtime.kernel("gate", Gate::kernel);
  const pto_task blocked = runtime.submit(gated, {}, {.scalars = {scalar(&gate)}});
  gate.await_inside(1);
  const pto_task quick = runtime.submit(PTO_NO_KERNEL, {});
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(pto_wait(runtime, blocked, 0.05), PTO_TIMEOUT);
  EXPECT(seconds_since(begin) >= 0.05);
  EXPECT_EQ(pto_wait_all(runtime, 0.01), PTO_TIMEOUT);
  const pto_task both[] = {blocked, quick};
  uint32_t first = 9;
  EXPECT_EQ(pto_wait_any(runtime, both, 2, PTO_FOREVER, &first), 0);
  EXPECT_EQ(first, 1u);
  EXPECT_EQ(pto_wait_any(runtime, both, 1, 0.01, &first), PTO_TIMEOUT);
  EXPECT_EQ(pto_wait_any(runtime, both, 0, 0.01, &first), PTO_BAD_ARGUMENT);
  std::atomic<int> called{0};
  const auto callback = [](void* context) { static_cast<std::atomic<int>*>(context)->fetch_add(1); };
  EXPECT_EQ(pto_notify(runtime, blocked, callback, &called), 0);
  EXPECT_EQ(pto_notify(runtime, quick, callback, &called), 0);
  EXPECT_EQ(called.load(), 1);
  EXPECT(pto_notify(runtime, 0, callback, &called) != 0);
  gate.open();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  while (called.load() < 2) std::this_thread::yield();
  for (int t = 0; t < 2000; ++t) {
    const pto_task task = runtime.submit(PTO_NO_KERNEL, {});
    pto_notify(runtime, task, callback, &called);
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  while (called.load() < 2002) std::this_thread::yield();
  EXPECT_EQ(called.load(), 2002);
}

CASE("cancel one and all: tasks that have not started are skipped, later ones run") {
  Runtime runtime(1);
  Gate gate;
  std::atomic<int> count{0};
  const pto_kernel gated = runtime.kernel("gate", Gate::kernel);
  const pto_kernel counting = runtime.kernel("count", count_kernel);
  runtime.submit(gated, {}, {.scalars = {scalar(&gate)}});
  gate.await_inside(1);
  const pto_task one = runtime.submit(counting, {}, {.scalars = {scalar(&count)}, .flags = PTO_KEEP});
  const pto_task two = runtime.submit(counting, {}, {.scalars = {scalar(&count)}});
  EXPECT_EQ(pto_cancel(runtime, one), 0);
  gate.open();
  EXPECT_EQ(pto_wait(runtime, two, 60), 0);
  EXPECT_EQ(pto_wait(runtime, one, 60), PTO_CANCELLED);
  EXPECT_EQ(pto_wait_all(runtime, 60), PTO_CANCELLED);
  EXPECT_EQ(count.load(), 1);
  Gate second;
  runtime.submit(gated, {}, {.scalars = {scalar(&second)}});
  second.await_inside(1);
  for (int t = 0; t < 20; ++t) runtime.submit(counting, {}, {.scalars = {scalar(&count)}});
  EXPECT_EQ(pto_cancel_all(runtime), 0);
  runtime.submit(counting, {}, {.scalars = {scalar(&count)}});
  second.open();
  EXPECT_EQ(pto_wait_all(runtime, 60), PTO_CANCELLED);
  EXPECT_EQ(pto_wait_all(runtime, 60), 0);
  EXPECT_EQ(count.load(), 2);
}

CASE("freeze: readers need no order, writers are rejected until it is thawed") {
  Runtime runtime(2);
  int64_t weights = 5;
  std::vector<int64_t> sums(64, 0);
  const pto_handle w = runtime.add(weights);
  const pto_kernel add = runtime.kernel("add", add_kernel);
  EXPECT_EQ(pto_freeze(runtime, w, 1), 0);
  for (auto& sum : sums) {
    const pto_handle h = runtime.add(sum);
    for (int round = 0; round < 10; ++round) runtime.submit(add, {inout(h), in(w)});
  }
  EXPECT_EQ(runtime.submit(add, {inout(w), in(w)}), pto_task{0});
  EXPECT(has(pto_last_error(), "frozen"));
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(pto_freeze(runtime, w, 0), 0);
  EXPECT(runtime.submit(runtime.kernel("set", set_kernel), {out(w)}, {.scalars = {6}}) != 0);
  EXPECT(pto_read(runtime, w, nullptr, PTO_FOREVER) != nullptr);
  EXPECT_EQ(weights, 6);
  EXPECT_EQ(sums[0] + sums[63], 100);
}

CASE("pto_read waits for writers only; pto_write waits for readers too") {
  Runtime runtime(2);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  Gate gate;
  const pto_kernel gated = runtime.kernel("gate", Gate::kernel);
  runtime.submit(runtime.kernel("set", set_kernel), {out(h)}, {.scalars = {4}});
  const pto_task reader = runtime.submit(gated, {in(h)}, {.scalars = {scalar(&gate)}});
  const auto* seen = static_cast<const int64_t*>(pto_read(runtime, h, nullptr, 60));
  EXPECT(seen != nullptr && *seen == 4);
  EXPECT(pto_write(runtime, h, nullptr, 0.02) == nullptr);
  EXPECT_EQ(pto_last_status(), PTO_TIMEOUT);
  EXPECT_EQ(pto_unregister(runtime, h, 0.02), PTO_TIMEOUT);
  EXPECT(pto_address(runtime, h) == &x);
  gate.open();
  auto* mine = static_cast<int64_t*>(pto_write(runtime, h, nullptr, 60));
  EXPECT(mine == &x);
  EXPECT_EQ(pto_is_complete(runtime, reader), 1);
}

CASE("reduction: the partial values are added in order of submission, with the same bits for 0 to 8 workers") {
  std::vector<float> first;
  for (uint32_t workers = 0; workers <= 8; ++workers) {
    Runtime runtime(workers);
    const pto_kernel sum = pto_kernel_find(runtime, "sum_f32");
    const pto_kernel part = runtime.kernel("part", [](void* const* buffers, const uint64_t* scalars) -> int {
      auto* partial = static_cast<float*>(buffers[0]);
      busy_kernel(nullptr, std::vector<uint64_t>{scalars[0] * 37 % 50}.data());
      for (int i = 0; i < 16; ++i) {
        partial[i] = 1.0f / static_cast<float>(scalars[0] + 3 + 7 * i) * (scalars[0] % 2 ? 1e6f : 1e-6f);
      }
      return PTO_OK;
    });
    std::vector<float> total(16, 0.125f);
    const pto_handle h = runtime.add(total);
    pto_scope_begin(runtime);
    for (uint64_t t = 0; t < 100; ++t) EXPECT(runtime.submit(part, {reduce(h, sum)}, {.scalars = {t}}) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
    EXPECT(pto_read(runtime, h, nullptr, PTO_FOREVER) != nullptr);
    if (first.empty()) first = total;
    EXPECT(std::memcmp(first.data(), total.data(), 64) == 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  }
}

CASE("commuting tasks run one at a time, also on two buffers taken in different orders") {
  Runtime runtime(4);
  static std::atomic<int> inside[2];
  static std::atomic<int> overlaps;
  inside[0] = inside[1] = overlaps = 0;
  const pto_kernel body = runtime.kernel("body", [](void* const* buffers, const uint64_t* scalars) -> int {
    for (int b = 0; b < 2; ++b) {
      if ((scalars[0] >> b & 1) != 0 && inside[b].fetch_add(1) != 0) ++overlaps;
    }
    if (scalars[0] % 2 == 1) ++value_of(buffers[0]);
    std::this_thread::yield();
    for (int b = 0; b < 2; ++b) {
      if ((scalars[0] >> b & 1) != 0) inside[b].fetch_sub(1);
    }
    return PTO_OK;
  });
  int64_t x = 0;
  int64_t y = 0;
  const pto_handle hx = runtime.add(x);
  const pto_handle hy = runtime.add(y);
  const int count = 2000 / kSlowdown;
  for (int t = 0; t < count; ++t) {
    EXPECT(runtime.submit(body, {commute(hx), commute(hy)}, {.scalars = {3}}) != 0);
    runtime.submit(body, {commute(hx)}, {.scalars = {1}});
    runtime.submit(body, {commute(hy)}, {.scalars = {2}});
  }
  EXPECT(pto_read(runtime, hx, nullptr, PTO_FOREVER) != nullptr);
  EXPECT_EQ(x, 2 * count);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(overlaps.load(), 0);
}

CASE("scopes: ending one that is not open is an error, and so is nesting too deep") {
  Runtime runtime;
  EXPECT_EQ(pto_scope_end(runtime), PTO_BAD_ARGUMENT);
  for (int s = 0; s < PTO_MAX_SCOPES; ++s) pto_scope_begin(runtime);
  EXPECT_EQ(pto_last_status(), PTO_OK);
  pto_scope_begin(runtime);
  EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
  for (int s = 0; s < PTO_MAX_SCOPES; ++s) EXPECT_EQ(pto_scope_end(runtime), 0);
  EXPECT_EQ(pto_scope_end(runtime), PTO_BAD_ARGUMENT);
}

CASE("statistics and traces count every task") {
  Runtime runtime(2);
  EXPECT_EQ(pto_trace_enable(runtime, 1000), 0);
  const pto_kernel empty = runtime.kernel("empty", empty_kernel);
  for (int t = 0; t < 300; ++t) runtime.submit(empty, {});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  const pto_stats stats = runtime.stats();
  EXPECT_EQ(stats.num_submitted, uint64_t{300});
  EXPECT_EQ(stats.num_completed, uint64_t{300});
  std::vector<pto_trace_task> records(1000);
  EXPECT_EQ(pto_trace_tasks(runtime, records.data(), records.size()), uint64_t{300});
  for (int t = 0; t < 300; ++t) {
    EXPECT(records[t].submit_ns <= records[t].ready_ns && records[t].ready_ns <= records[t].start_ns &&
           records[t].start_ns <= records[t].end_ns && records[t].kernel == empty);
  }
  EXPECT_EQ(pto_trace_enable(runtime, 0), 0);
}

CASE("edges from future tasks, undefined flags, missing arrays and infinite timeouts") {
  Runtime runtime(1);
  pto_task_spec spec{};
  spec.kernel = PTO_NO_KERNEL;
  const pto_task task = pto_submit(runtime, &spec);
  const pto_task later = task + (uint64_t{2} << 24);
  spec.after = &later;
  spec.num_after = 1;
  EXPECT_EQ(pto_submit(runtime, &spec), pto_task{0});
  spec.after = nullptr;
  EXPECT_EQ(pto_submit(runtime, &spec), pto_task{0});
  spec.num_after = 0;
  spec.flags = 64;
  EXPECT_EQ(pto_submit(runtime, &spec), pto_task{0});
  EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_wait(runtime, task, 1e300), PTO_OK);
  const pto_event event = pto_event_open(runtime);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(pto_event_post(runtime, event, UINT64_MAX / 2), PTO_OK);
  EXPECT_EQ(pto_event_value(runtime, event), UINT64_MAX);
  EXPECT_EQ(pto_graph_begin(runtime), PTO_OK);
  EXPECT_EQ(pto_graph_begin(runtime), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_graph_end(runtime, "/dev/null"), PTO_OK);
}

CASE("a stall is recorded with its submitter, cause, times and live tasks") {
  Runtime runtime(1, 4);
  EXPECT_EQ(pto_trace_enable(runtime, 100), 0);
  Gate gate;
  runtime.submit(runtime.kernel("gate", Gate::kernel), {}, {.scalars = {scalar(&gate)}});
  gate.await_inside(1);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.open();
  });
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  const pto_event event = pto_event_open(runtime);
  const pto_wait_for wait{event, 1};
  pto_param param = in(h);
  pto_task_spec spec{};
  spec.kernel = PTO_NO_KERNEL;
  spec.params = &param;
  spec.num_params = 1;
  spec.waits = &wait;
  spec.num_waits = 1;
  for (int t = 0; t < 4; ++t) EXPECT(pto_submit(runtime, &spec) != 0);  // the fourth finds the window full
  opener.join();
  pto_event_post(runtime, event, 1);
  EXPECT_EQ(pto_wait_all(runtime, 60), 0);
  std::vector<pto_trace_stall> stalls(100);
  const uint64_t count = pto_trace_stalls(runtime, stalls.data(), stalls.size());
  EXPECT(count > 0);
  for (uint64_t s = 0; s < std::min<uint64_t>(count, 100); ++s) {
    EXPECT_EQ(stalls[s].submitter, 1);
    EXPECT_EQ(stalls[s].cause, 0);
    EXPECT(stalls[s].begin_ns > 1'000'000 && stalls[s].begin_ns <= stalls[s].end_ns);
    EXPECT(stalls[s].end_ns - stalls[s].begin_ns < 60'000'000'000);
    EXPECT(stalls[s].live_tasks <= 4);
    EXPECT_EQ(stalls[s].heap_used_bytes, uint64_t{0});
  }
  EXPECT_EQ(pto_trace_enable(runtime, 0), 0);
}

CASE("the window's high-water mark is the number of live tasks, also if it was never full") {
  Runtime runtime(1, 2048);
  const pto_kernel gated = runtime.kernel("gated", Gate::kernel);
  Gate gate;
  runtime.submit(gated, {}, {.scalars = {scalar(&gate)}});
  gate.await_inside(1);  // so that no worker runs the rest
  for (int t = 0; t < 600; ++t) runtime.submit(PTO_NO_KERNEL, {});
  gate.open();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT(runtime.stats().window_high >= 512 && runtime.stats().window_high <= 601);
}

TILEWISE_TEST_MAIN
