// Failures: which tasks are poisoned, what clears the poison, and bounded memory for failures.
#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

CASE("exactly the data successors of a failed task are poisoned, siblings and later overwriters are not") {
  for (const uint32_t workers : {0u, 1u, 3u}) {
    Runtime runtime(workers);
    int64_t a = 0, b = 0, c = 0;
    const pto_handle ha = runtime.add(a), hb = runtime.add(b), hc = runtime.add(c);
    const pto_kernel fail = runtime.kernel("fail", fail_kernel);
    const pto_kernel set = runtime.kernel("set", set_kernel);
    const pto_kernel copy = runtime.kernel("copy", copy_kernel);
    const pto_task bad = runtime.submit(fail, {out(ha)}, {.flags = PTO_KEEP});
    const pto_task reader = runtime.submit(copy, {out(hb), in(ha)}, {.flags = PTO_KEEP});
    const pto_task second = runtime.submit(copy, {out(hc), in(hb)}, {.flags = PTO_KEEP});
    const pto_task overwriter = runtime.submit(set, {out(ha)}, {.scalars = {7}, .flags = PTO_KEEP});
    const pto_task healed = runtime.submit(copy, {out(hb), in(ha)}, {.flags = PTO_KEEP});
    EXPECT_EQ(pto_wait(runtime, healed, PTO_FOREVER), 0);
    EXPECT_EQ(pto_wait(runtime, bad, PTO_FOREVER), PTO_TASK_FAILED);
    EXPECT_EQ(pto_wait(runtime, reader, PTO_FOREVER), PTO_TASK_FAILED);
    EXPECT_EQ(pto_wait(runtime, second, PTO_FOREVER), PTO_TASK_FAILED);
    EXPECT_EQ(pto_wait(runtime, overwriter, PTO_FOREVER), 0);
    EXPECT_EQ(b, 7);
    EXPECT_EQ(c, 0);
    char text[400];
    EXPECT_EQ(pto_task_error(runtime, second, text, sizeof(text)), PTO_TASK_FAILED);
    EXPECT(has(text, "planted failure") && has(text, "fail"));
    EXPECT(pto_read(runtime, hc, nullptr, PTO_FOREVER) == nullptr);
    EXPECT(has(pto_last_error(), "planted failure"));
    EXPECT(pto_read(runtime, hb, nullptr, PTO_FOREVER) != nullptr);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
    EXPECT(has(pto_last_error(), "planted failure"));
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    for (const pto_task task : {bad, reader, second}) pto_task_release(runtime, task);
  }
}

CASE("an inout access passes poison on, a reader of an older value and an order-only successor do not get it") {
  Runtime runtime(2);
  int64_t a = 5, b = 0;
  const pto_handle ha = runtime.add(a), hb = runtime.add(b);
  const pto_kernel step = runtime.kernel("step", step_kernel);
  const pto_kernel copy = runtime.kernel("copy", copy_kernel);
  const pto_task early = runtime.submit(copy, {out(hb), in(ha)});
  runtime.submit(runtime.kernel("fail", fail_kernel), {inout(ha)});
  const pto_task through = runtime.submit(step, {inout(ha)}, {.scalars = {1}, .flags = PTO_KEEP});
  const pto_task reads_late = runtime.submit(PTO_NO_KERNEL, {in(ha)}, {.flags = PTO_KEEP});
  EXPECT_EQ(pto_wait(runtime, early, PTO_FOREVER), 0);
  EXPECT_EQ(pto_wait(runtime, through, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait(runtime, reads_late, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(a, 5);
  EXPECT_EQ(b, 5);
  EXPECT_EQ(pto_unregister(runtime, ha, PTO_FOREVER), 0);  // unregistering a poisoned buffer is not an error
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
}

CASE("a producer that is both a reader and a writer passes its poison on, for any number of producers") {
  for (const uint32_t num_readers : {1u, 3u, 8u}) {  // with eight, some are in chunks
    for (uint32_t failing = 0; failing < num_readers; ++failing) {
      Runtime runtime(1);
      int64_t x = 0;
      std::vector<int64_t> copies(num_readers);
      const pto_handle hx = runtime.add(x);
      const pto_kernel gated = runtime.kernel("gated", Gate::kernel), fail = runtime.kernel("fail", fail_kernel);
      Gate gate;
      runtime.submit(gated, {inout(hx)}, {.scalars = {scalar(&gate)}});
      std::vector<pto_param> params = {out(hx)};
      for (uint32_t r = 0; r < num_readers; ++r) {
        const pto_handle copy = runtime.add(copies[r]);
        runtime.submit(r == failing ? fail : PTO_NO_KERNEL, {out(copy), in(hx)});
        params.push_back(in(copy));
      }
      const pto_kernel set = runtime.kernel("set", set_kernel);
      const pto_task last = runtime.submit(set, params, {.scalars = {7}, .flags = PTO_KEEP});
      gate.open();
      EXPECT_EQ(pto_wait(runtime, last, PTO_FOREVER), PTO_TASK_FAILED);
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
      EXPECT_EQ(x, 0);
    }
  }
}

CASE("poison passes through readers, boxes, commuting groups, explicit edges and reductions") {
  Runtime runtime(2);
  std::vector<int64_t> x(16, 0), y(1, 0);
  const pto_handle hx = runtime.add(x), hy = runtime.add(y);
  const pto_region left{.offset = 0, .ndim = 1, .size = {64}, .stride = {1}};
  const pto_region right{.offset = 64, .ndim = 1, .size = {64}, .stride = {1}};
  const pto_kernel fail = runtime.kernel("fail", fail_kernel);
  const pto_kernel empty = runtime.kernel("empty", empty_kernel);
  const pto_task bad = runtime.submit(fail, {out(hx, &left)});
  const Extra keep{.flags = PTO_KEEP};
  const pto_task reader = runtime.submit(empty, {in(hx, &left)}, keep);
  const pto_task reader_after_reader = runtime.submit(empty, {inout(hx, &left)}, keep);
  const pto_task other_half = runtime.submit(empty, {inout(hx, &right)}, keep);
  const pto_task whole = runtime.submit(empty, {in(hx)}, keep);
  const pto_task edge = runtime.submit(empty, {}, {.after = {bad}, .flags = PTO_KEEP});
  EXPECT_EQ(pto_wait(runtime, reader, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait(runtime, reader_after_reader, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait(runtime, other_half, PTO_FOREVER), 0);
  EXPECT_EQ(pto_wait(runtime, whole, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait(runtime, edge, PTO_FOREVER), PTO_TASK_FAILED);
  runtime.submit(empty, {out(hx)});
  EXPECT_EQ(pto_wait(runtime, runtime.submit(empty, {in(hx)}), PTO_FOREVER), 0);
  runtime.submit(empty, {commute(hy)});
  runtime.submit(fail, {commute(hy)});
  runtime.submit(empty, {commute(hy)});
  EXPECT_EQ(pto_wait(runtime, runtime.submit(empty, {in(hy)}, keep), PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait(runtime, runtime.submit(empty, {out(hy)}), PTO_FOREVER), 0);
  runtime.submit(fail, {reduce(hy, pto_kernel_find(runtime, "sum_i64"))});
  EXPECT_EQ(pto_wait(runtime, runtime.submit(empty, {in(hy)}, keep), PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
}

CASE("C++ exceptions, odd statuses and forgotten reasons become the task's own error") {
  Runtime runtime(1);
  const pto_kernel throws =
      runtime.kernel("throws", [](void* const*, const uint64_t*) -> int { throw std::runtime_error("thrown"); });
  const pto_kernel odd = runtime.kernel("odd", [](void* const*, const uint64_t*) -> int { throw 5; });
  const pto_kernel fine = runtime.kernel("fine", [](void* const*, const uint64_t*) -> int {
    pto_fail("an unused reason");
    return PTO_OK;
  });
  const pto_kernel plain = runtime.kernel("plain", [](void* const*, const uint64_t*) -> int { return 42; });
  char text[400];
  const Extra keep{.flags = PTO_KEEP, .type = PTO_VECTOR};
  const pto_task first = runtime.submit(throws, {}, keep);
  EXPECT_EQ(pto_wait(runtime, first, 60), PTO_TASK_FAILED);
  pto_task_error(runtime, first, text, sizeof(text));
  EXPECT(has(text, "thrown") && has(text, "worker 0"));
  EXPECT_EQ(pto_wait(runtime, runtime.submit(odd, {}, keep), 60), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait(runtime, runtime.submit(fine, {}, keep), 60), 0);
  const pto_task last = runtime.submit(plain, {}, keep);
  EXPECT_EQ(pto_wait(runtime, last, 60), PTO_TASK_FAILED);
  pto_task_error(runtime, last, text, sizeof(text));
  EXPECT(has(text, "42") && !has(text, "unused"));
  EXPECT_EQ(pto_wait_all(runtime, 60), PTO_TASK_FAILED);
}

CASE("a child's failure becomes its parent's, unless the parent has seen it") {
  Runtime runtime(2);
  static PTORuntime* inner;
  static pto_kernel fail;
  inner = runtime;
  fail = runtime.kernel("fail", fail_kernel);
  const pto_kernel careless = runtime.kernel(
      "careless",
      [](void* const*, const uint64_t*) -> int {
        return pto_submit_task(inner, fail, PTO_VECTOR, nullptr, 0) != 0 ? PTO_OK : PTO_BAD_ARGUMENT;
      },
      PTO_SUBMITS);
  const pto_kernel careful = runtime.kernel(
      "careful",
      [](void* const*, const uint64_t*) -> int {
        pto_submit_task(inner, fail, PTO_VECTOR, nullptr, 0);
        return pto_wait_all(inner, PTO_FOREVER) == PTO_TASK_FAILED ? PTO_OK : PTO_BAD_ARGUMENT;
      },
      PTO_SUBMITS);
  EXPECT_EQ(pto_wait(runtime, runtime.submit(careless, {}, {.flags = PTO_KEEP}), PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT(has(pto_last_error(), "planted failure"));
  EXPECT_EQ(pto_wait(runtime, runtime.submit(careful, {}), PTO_FOREVER), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("the table of failures does not fill up over many failing tasks, even after it was half full") {
  pto_config config = Runtime::config(2, 16);
  config.max_handles = 64;  // the table has room for 768 failures
  Runtime runtime(config);
  std::vector<int64_t> x(8, 0);
  const pto_handle h = runtime.add(x);
  const pto_kernel fail = runtime.kernel("fail", fail_kernel);
  const pto_region box{.offset = 8, .ndim = 1, .size = {8}, .stride = {1}};
  std::vector<pto_task> failed(450);
  for (pto_task& task : failed) task = runtime.submit(fail, {out(h)}, {.flags = PTO_KEEP});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  for (const pto_task task : failed) pto_task_release(runtime, task);
  const int count = 100'000 / kSlowdown;
  for (int t = 0; t < count; ++t) {
    if (runtime.submit(fail, {t % 3 == 0 ? out(h, &box) : t % 3 == 1 ? inout(h) : out(h)}) == 0) {
      EXPECT(false);
      break;
    }
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(runtime.stats().num_failed, failed.size() + static_cast<uint64_t>(count));
  // A full table would pass a failure on to readers of tasks that are not in it.
  const pto_kernel set = runtime.kernel("set", set_kernel);
  runtime.submit(set, {out(h)}, {.scalars = {3}});
  runtime.submit(PTO_NO_KERNEL, {in(h)});
  EXPECT(pto_read(runtime, h, nullptr, PTO_FOREVER) != nullptr);
  EXPECT_EQ(x[0], 3);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("a waiting task keeps the poison of a producer that was overwritten and swept") {
  Runtime runtime(1, 256);
  int64_t a = 0, b = 0, c = 0;
  const pto_handle ha = runtime.add(a), hb = runtime.add(b), hc = runtime.add(c);
  const pto_kernel fail = runtime.kernel("fail", fail_kernel);
  const pto_event event = pto_event_open(runtime);
  pto_wait(runtime, runtime.submit(fail, {out(ha)}), PTO_FOREVER);
  runtime.submit(PTO_NO_KERNEL, {out(hb)}, {.waits = {{event, 1}}});
  const pto_task victim =
      runtime.submit(runtime.kernel("copy", copy_kernel), {out(hc), in(ha), in(hb)}, {.flags = PTO_KEEP});
  runtime.submit(PTO_NO_KERNEL, {out(ha)});
  for (int t = 0; t < 2000; ++t) runtime.submit(fail, {});  // several sweeps of the table
  EXPECT_EQ(pto_is_complete(runtime, victim), 0);
  pto_event_post(runtime, event, 1);
  EXPECT_EQ(pto_wait(runtime, victim, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
}

CASE("failures inside tasks are remembered while other submitters' failures are swept") {
  Runtime runtime(2, 64);
  static PTORuntime* inner;
  static pto_kernel fail, set;
  inner = runtime;
  fail = runtime.kernel("fail", fail_kernel);
  set = runtime.kernel("set", set_kernel);
  const pto_kernel parent = runtime.kernel(
      "parent",
      [](void* const*, const uint64_t*) -> int {
        int64_t mine[2] = {0, 0};
        const pto_handle a = pto_register(inner, &mine[0], 8), b = pto_register(inner, &mine[1], 8);
        pto_param bad[] = {out(a)};
        pto_submit_task(inner, fail, PTO_VECTOR, bad, 1);
        for (int t = 0; t < 30; ++t) {
          pto_param reader[] = {out(b), in(a)};
          pto_submit_task(inner, set, PTO_VECTOR, reader, 2);
        }
        const bool is_poisoned =
            pto_wait_all(inner, PTO_FOREVER) == PTO_TASK_FAILED && pto_read(inner, b, nullptr, PTO_FOREVER) == nullptr;
        pto_unregister(inner, a, PTO_FOREVER);
        pto_unregister(inner, b, PTO_FOREVER);
        return is_poisoned && mine[1] == 0 ? PTO_OK : PTO_TASK_FAILED;
      },
      PTO_SUBMITS);
  std::thread other([&] {
    for (int t = 0; t < 20'000 / kSlowdown; ++t) {
      pto_scope_begin(runtime);
      runtime.make(fail, 64);
      pto_scope_end(runtime);
    }
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  });
  for (int t = 0; t < 1000 / kSlowdown; ++t) EXPECT(runtime.submit(parent, {}) != 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  other.join();
}

CASE("cancelled tasks poison like failed ones, and say so") {
  Runtime runtime(1);
  Gate gate;
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  runtime.submit(runtime.kernel("gate", Gate::kernel), {}, {.scalars = {scalar(&gate)}});
  gate.await_inside(1);
  const pto_task victim = runtime.submit(runtime.kernel("set", set_kernel), {out(h)}, {.scalars = {1}});
  const pto_task reader = runtime.submit(PTO_NO_KERNEL, {in(h)}, {.flags = PTO_KEEP});
  pto_cancel(runtime, victim);
  gate.open();
  EXPECT_EQ(pto_wait(runtime, reader, 60), PTO_CANCELLED);
  EXPECT_EQ(x, 0);
  EXPECT_EQ(pto_wait_all(runtime, 60), PTO_CANCELLED);
}

CASE("a cancelled task stops waiting for events: the thread that would post may have ended") {
  Runtime runtime(1);
  const pto_event event = pto_event_open(runtime);
  const pto_wait_for wait{event, 1};
  pto_task_spec spec{};
  spec.kernel = PTO_NO_KERNEL;
  spec.waits = &wait;
  spec.num_waits = 1;
  const pto_task one = pto_submit(runtime, &spec);
  const pto_task other = pto_submit(runtime, &spec);
  EXPECT_EQ(pto_cancel(runtime, one), PTO_OK);
  EXPECT_EQ(pto_wait(runtime, one, 10), PTO_CANCELLED);
  EXPECT_EQ(pto_is_complete(runtime, other), 0);
  EXPECT_EQ(pto_cancel_all(runtime), PTO_OK);
  EXPECT_EQ(pto_wait(runtime, other, 10), PTO_CANCELLED);
}

CASE("the host heals a poisoned buffer by writing it") {
  Runtime runtime(1);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  runtime.submit(runtime.kernel("fail", [](void* const*, const uint64_t*) { return 5; }), {out(h)});
  EXPECT(pto_read(runtime, h, nullptr, 60) == nullptr);
  EXPECT(pto_write(runtime, h, nullptr, 60) == &x);
  x = 3;
  EXPECT(pto_read(runtime, h, nullptr, 60) == &x);
  EXPECT_EQ(pto_wait_all(runtime, 60), PTO_TASK_FAILED);
}

CASE("handles dropped before their tasks fail are forgotten: the table of failures does not fill up") {
  Runtime runtime(1, 64);
  const pto_kernel gated = runtime.kernel("gated", Gate::kernel), fail = runtime.kernel("fail", fail_kernel);
  const pto_kernel set = runtime.kernel("set", set_kernel);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  for (int round = 0; round < 1000; ++round) {  // far more than three quarters of the table
    Gate gate;
    runtime.submit(gated, {}, {.scalars = {scalar(&gate)}});
    gate.await_inside(1);
    for (int t = 0; t < 30; ++t) pto_task_release(runtime, runtime.submit(fail, {}, {.flags = PTO_KEEP}));
    gate.open();
    pto_wait_all(runtime, PTO_FOREVER);
  }
  EXPECT_EQ(pto_wait(runtime, runtime.submit(set, {out(h)}, {.scalars = {5}}), PTO_FOREVER), 0);
  EXPECT_EQ(x, 5);
}

CASE("the timeout of a read is for all of the buffer's tasks together") {
  Runtime runtime(3);
  const pto_kernel busy = runtime.kernel("busy", busy_kernel);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  for (int reader = 1; reader <= 3; ++reader) {  // they end one after the other
    runtime.submit(busy, {in(h)}, {.scalars = {static_cast<uint64_t>(reader) * 150'000}});
  }
  EXPECT_EQ(pto_unregister(runtime, h, 0.25), PTO_TIMEOUT);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

TILEWISE_TEST_MAIN
