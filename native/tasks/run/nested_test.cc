// Tasks that submit tasks: their own domain of dependencies, what they may access, when they complete, and which
// threads help.
#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

// Shared with kernels; set before each use, while nothing runs.
struct Shared {
  PTORuntime* runtime = nullptr;
  pto_kernel step = 0, add = 0, set = 0, count = 0, tree = 0, busy = 0;
  pto_handle a = 0, b = 0;
  std::atomic<int> counter{0};
};
Shared shared;

pto_task submit_here(pto_kernel kernel, std::vector<pto_param> params, std::vector<uint64_t> scalars = {},
                     int32_t target = 0, std::vector<pto_task> after = {}) {
  pto_task_spec spec{};
  spec.kernel = kernel;
  spec.worker_type = PTO_VECTOR;
  spec.params = params.data();
  spec.num_params = static_cast<uint32_t>(params.size());
  spec.scalars = scalars.data();
  spec.num_scalars = static_cast<uint32_t>(scalars.size());
  spec.target_worker = target;
  spec.after = after.data();
  spec.num_after = static_cast<uint32_t>(after.size());
  return pto_submit(shared.runtime, &spec);
}

void prepare(Runtime& runtime) {
  shared.runtime = runtime;
  shared.step = runtime.kernel("step", step_kernel);
  shared.add = runtime.kernel("add", add_kernel);
  shared.set = runtime.kernel("set", set_kernel);
  shared.count = runtime.kernel("count", count_kernel);
  shared.busy = runtime.kernel("busy", busy_kernel);
  shared.counter = 0;
}

int tree_kernel(void* const*, const uint64_t* scalars) {
  shared.counter.fetch_add(1);
  for (int c = 0; scalars[0] > 0 && c < 3; ++c) {
    if (submit_here(shared.tree, {}, {scalars[0] - 1, scalars[1]}) != 0) continue;
    pto_fail(pto_last_error());
    return PTO_TASK_FAILED;
  }
  return scalars[1] != 0 ? pto_wait_all(shared.runtime, PTO_FOREVER) : static_cast<int>(PTO_OK);
}

}  // namespace

CASE("a parent completes after its children, and its successors see what they wrote") {
  for (const uint32_t workers : {0u, 1u, 3u}) {
    Runtime runtime(workers, 64);
    prepare(runtime);
    int64_t x = 0, y = 0;
    shared.a = runtime.add(x);
    shared.b = runtime.add(y);
    const pto_kernel parent = runtime.kernel(
        "parent",
        [](void* const*, const uint64_t*) -> int {
          for (uint64_t c = 0; c < 20; ++c) {
            if (submit_here(shared.step, {inout(shared.a)}, {c}) == 0) return PTO_TASK_FAILED;
          }
          return PTO_OK;
        },
        PTO_SUBMITS);
    int64_t expected = 0;
    for (int round = 0; round < 30; ++round) {
      const pto_task task = runtime.submit(parent, {inout(shared.a)});
      EXPECT(task != 0);
      for (int64_t c = 0; c < 20; ++c) {
        expected = static_cast<int64_t>(static_cast<uint64_t>(expected) * 3 + static_cast<uint64_t>(c));
      }
      runtime.submit(runtime.kernel("copy", copy_kernel), {out(shared.b), in(shared.a)});
      if (round % 4 == 0) {
        EXPECT_EQ(pto_wait(runtime, task, PTO_FOREVER), 0);
        EXPECT_EQ(x, expected);
      }
    }
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT_EQ(y, expected);
  }
}

CASE("a child may access only what its parent declared, and write only what it declared to write") {
  Runtime runtime(1);
  prepare(runtime);
  int64_t x = 0, y = 0;
  shared.a = runtime.add(x);
  shared.b = runtime.add(y);
  const pto_kernel parent = runtime.kernel(
      "parent",
      [](void* const*, const uint64_t*) -> int {
        const bool refused = submit_here(shared.set, {out(shared.a)}, {1}) == 0 && has(pto_last_error(), "declared") &&
                             submit_here(shared.set, {in(shared.b)}, {1}) == 0;
        const bool accepted = submit_here(PTO_NO_KERNEL, {in(shared.a)}) != 0;
        return refused && accepted ? PTO_OK : PTO_TASK_FAILED;
      },
      PTO_SUBMITS);
  EXPECT_EQ(pto_wait(runtime, runtime.submit(parent, {in(shared.a)}), PTO_FOREVER), 0);
}

CASE("inside a task: own buffers, own scopes, reading a result, waiting for one and for all") {
  for (const uint32_t workers : {1u, 2u}) {
    Runtime runtime(workers, 16);
    prepare(runtime);
    const pto_kernel parent = runtime.kernel(
        "parent",
        [](void* const* buffers, const uint64_t*) -> int {
          int64_t local = 2;
          const pto_handle mine = pto_register(shared.runtime, &local, sizeof(local));
          pto_scope_begin(shared.runtime);
          std::vector<pto_param> params{fresh(8)};
          pto_task_spec spec{};
          const uint64_t seven = 7;
          spec.kernel = shared.set;
          spec.worker_type = PTO_VECTOR;
          spec.params = params.data();
          spec.num_params = 1;
          spec.scalars = &seven;
          spec.num_scalars = 1;
          if (pto_submit(shared.runtime, &spec) == 0) return PTO_TASK_FAILED;
          const pto_task task = submit_here(shared.add, {inout(mine), in(params[0].handle)});
          if (pto_wait(shared.runtime, task, PTO_FOREVER) != 0 || local != 9) return PTO_TASK_FAILED;
          const auto* seen =
              static_cast<const int64_t*>(pto_read(shared.runtime, params[0].handle, nullptr, PTO_FOREVER));
          if (seen == nullptr || *seen != 7) return PTO_TASK_FAILED;
          if (pto_scope_end(shared.runtime) != 0 || pto_scope_end(shared.runtime) != PTO_BAD_ARGUMENT) {
            return PTO_TASK_FAILED;
          }
          submit_here(shared.step, {inout(mine)}, {1});
          if (pto_wait_all(shared.runtime, PTO_FOREVER) != 0 || local != 28) return PTO_TASK_FAILED;
          value_of(buffers[0]) += local;
          return pto_unregister(shared.runtime, mine, PTO_FOREVER);
        },
        PTO_SUBMITS);
    int64_t x = 0;
    const pto_handle h = runtime.add(x);
    for (int t = 0; t < 200; ++t) runtime.submit(parent, {inout(h)});
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT_EQ(x, 200 * 28);
  }
}

CASE("trees of tasks, with and without waiting inside, on fewer and more workers than cores") {
  for (const uint32_t workers : {1u, 2u, 4u}) {
    for (const uint64_t waits : {0u, 1u}) {
      Runtime runtime(workers, 256);
      prepare(runtime);
      shared.tree = runtime.kernel("tree", tree_kernel, PTO_SUBMITS);
      EXPECT(runtime.submit(shared.tree, {}, {.scalars = {5, waits}}) != 0);
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
      if (pto_last_status() != 0) std::fprintf(stderr, "%s\n", pto_last_error());
      EXPECT_EQ(shared.counter.load(), 1 + 3 + 9 + 27 + 81 + 243);
    }
  }
}

CASE("a task that waits runs what its children have submitted if there is no other worker") {
  Runtime runtime(1);
  prepare(runtime);
  shared.tree = runtime.kernel("tree", tree_kernel, PTO_SUBMITS);
  const pto_kernel parent = runtime.kernel(
      "parent",
      [](void* const*, const uint64_t*) -> int {
        if (submit_here(shared.tree, {}, {2, 0}) == 0) return PTO_TASK_FAILED;  // no task of this tree waits
        return pto_wait_all(shared.runtime, PTO_FOREVER);
      },
      PTO_SUBMITS);
  runtime.submit(parent, {});
  EXPECT_EQ(pto_wait_all(runtime, 60), 0);
  EXPECT_EQ(shared.counter.load(), 1 + 3 + 9);
}

// All slots of a window of eight have tasks that may submit. The first needs a slot for its child, and has no child
// that it could run.
CASE("a task that finds the window full runs other tasks, also those that may submit; a deadlock is an error") {
  for (const uint64_t num_that_submit : {1u, 7u, 8u, 64u}) {
    const uint32_t window = num_that_submit == 64 ? 64 : 8;  // 64: more than may be nested on one thread's stack
    Runtime runtime(1, window);
    prepare(runtime);
    shared.tree = runtime.kernel("tree", tree_kernel, PTO_SUBMITS);
    const pto_kernel root = runtime.kernel(
        "root",
        [](void* const*, const uint64_t* scalars) -> int {
          for (uint64_t c = 0; c < scalars[1]; ++c) {
            if (submit_here(shared.tree, {}, {c < scalars[0] ? 1u : 0u, 0}) == 0) return PTO_TASK_FAILED;
          }
          return PTO_OK;
        },
        PTO_SUBMITS);
    runtime.submit(root, {}, {.scalars = {num_that_submit, window}});
    const int status = pto_wait_all(runtime, 60);
    if (num_that_submit < window) {
      EXPECT_EQ(status, PTO_OK);
      EXPECT_EQ(shared.counter.load(), static_cast<int>(window + 3 * num_that_submit));
    } else {
      EXPECT_EQ(status, PTO_TASK_FAILED);
      EXPECT(has(pto_last_error(), "increase window"));
    }
  }
}

CASE("the worker of a waiting parent runs a child that only it may run") {
  Runtime runtime(2);
  prepare(runtime);
  const pto_kernel parent = runtime.kernel(
      "parent",
      [](void* const*, const uint64_t*) -> int {
        for (int32_t target = 1; target <= 2; ++target)
          submit_here(shared.count, {}, {scalar(&shared.counter)}, target);
        return pto_wait_all(shared.runtime, PTO_FOREVER);
      },
      PTO_SUBMITS);
  for (int t = 0; t < 50; ++t) runtime.submit(parent, {}, {.target_worker = 1 + t % 2});
  EXPECT_EQ(pto_wait_all(runtime, 60), 0);
  EXPECT_EQ(shared.counter.load(), 100);
}

CASE("a kernel that submits may return PTO_LATER: the task ends after its children and its end from outside") {
  Runtime runtime(2, 16);
  prepare(runtime);
  int64_t x = 0;
  shared.a = runtime.add(x);
  const pto_kernel later = runtime.kernel(
      "later",
      [](void* const*, const uint64_t*) -> int {
        submit_here(shared.busy, {}, {2000});
        submit_here(shared.set, {out(shared.a)}, {4});
        return PTO_LATER;
      },
      PTO_SUBMITS);
  for (int round = 0; round < 50; ++round) {
    x = 0;
    const pto_task task = runtime.submit(later, {inout(shared.a)});
    while (pto_task_complete(runtime, task, PTO_OK) != 0) std::this_thread::yield();
    EXPECT_EQ(pto_wait(runtime, task, PTO_FOREVER), 0);
    EXPECT_EQ(x, 4);
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("a rejected end from outside changes nothing: for a task whose children run, and for one ended before") {
  Runtime runtime(2, 16);
  prepare(runtime);
  static pto_event event;
  event = pto_event_open(runtime);
  const pto_kernel parent = runtime.kernel(
      "parent",
      [](void* const*, const uint64_t*) -> int {
        const pto_wait_for wait{event, 1};
        pto_task_spec spec{};
        spec.kernel = PTO_NO_KERNEL;
        spec.waits = &wait;
        spec.num_waits = 1;
        return pto_submit(shared.runtime, &spec) == 0 ? PTO_TASK_FAILED : PTO_OK;
      },
      PTO_SUBMITS);
  const pto_task with_child = runtime.submit(parent, {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // its kernel has returned, its child waits
  EXPECT_EQ(pto_task_complete(runtime, with_child, 7), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_event_post(runtime, event, 1), 0);
  EXPECT_EQ(pto_wait(runtime, with_child, PTO_FOREVER), 0);

  static std::atomic<bool> has_entered, may_leave;
  has_entered = may_leave = false;
  const pto_kernel later = runtime.kernel("later", [](void* const*, const uint64_t*) -> int {
    has_entered = true;
    while (!may_leave) std::this_thread::yield();
    return PTO_LATER;
  });
  const pto_task task = runtime.submit(later, {});
  while (!has_entered) std::this_thread::yield();
  EXPECT_EQ(pto_task_complete(runtime, task, PTO_OK), 0);
  EXPECT_EQ(pto_task_complete(runtime, task, 7), PTO_BAD_ARGUMENT);
  EXPECT(std::string(pto_last_error()).find("has been ended") != std::string::npos);
  may_leave = true;
  EXPECT_EQ(pto_wait(runtime, task, PTO_FOREVER), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("children are ordered by explicit edges and boxes of what the parent declared") {
  Runtime runtime(3, 32);
  prepare(runtime);
  std::vector<int64_t> x(4, 0);
  shared.a = runtime.add(x);
  const pto_kernel parent = runtime.kernel(
      "parent",
      [](void* const*, const uint64_t*) -> int {
        for (uint64_t c = 0; c < 40; ++c) {
          const pto_region box{.offset = c % 4 * 8, .ndim = 1, .size = {8}, .stride = {1}};
          if (submit_here(shared.step, {inout(shared.a, &box)}, {c}) == 0) return PTO_TASK_FAILED;
        }
        return PTO_OK;
      },
      PTO_SUBMITS);
  for (int round = 0; round < 20; ++round) runtime.submit(parent, {inout(shared.a)});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  uint64_t expected[4] = {};
  for (int round = 0; round < 20; ++round) {
    for (uint64_t c = 0; c < 40; ++c) expected[c % 4] = expected[c % 4] * 3 + c;
  }
  for (int i = 0; i < 4; ++i) EXPECT_EQ(static_cast<uint64_t>(x[static_cast<size_t>(i)]), expected[i]);
}

CASE("a kernel without PTO_SUBMITS may neither submit nor wait") {
  Runtime runtime;
  shared.runtime = runtime;
  const pto_kernel greedy = runtime.kernel("greedy", [](void* const*, const uint64_t*) -> int {
    const bool refused = pto_submit_task(shared.runtime, PTO_NO_KERNEL, PTO_VECTOR, nullptr, 0) == 0 &&
                         has(pto_last_error(), "PTO_SUBMITS") && pto_wait_all(shared.runtime, 1) == PTO_BAD_ARGUMENT;
    return refused ? PTO_OK : PTO_TASK_FAILED;
  });
  EXPECT_EQ(pto_wait(runtime, runtime.submit(greedy, {}), PTO_FOREVER), 0);
}

CASE("closing a runtime from inside a task is an error") {
  Runtime runtime;
  shared.runtime = runtime;
  const pto_kernel closing = runtime.kernel("close", [](void* const*, const uint64_t*) -> int {
    return pto_runtime_close(shared.runtime) == PTO_BAD_ARGUMENT ? PTO_OK : PTO_TASK_FAILED;
  });
  EXPECT_EQ(pto_wait(runtime, runtime.submit(closing, {}), PTO_FOREVER), 0);
}

CASE("a child may access only the boxes that its parent declared") {
  Runtime runtime(1);
  static PTORuntime* shared = nullptr;
  static pto_handle whole = 0;
  static int results[4] = {};
  shared = runtime;
  int64_t cells[8] = {};
  whole = runtime.add(cells);
  const pto_kernel parent = pto_kernel_add(
      runtime, "parent",
      [](void* const*, const uint64_t*) {
        const pto_region boxes[3] = {{8, 1, {8}, {1}}, {0, 1, {16}, {1}}, {16, 1, {8}, {1}}};
        for (int b = 0; b < 4; ++b) {
          pto_param param = {PTO_INOUT, 0, whole, 0, b < 3 ? &boxes[b] : nullptr, nullptr};
          pto_task_spec spec{};
          spec.kernel = PTO_NO_KERNEL;
          spec.params = &param;
          spec.num_params = 1;
          results[b] = pto_submit(shared, &spec) != 0 ? PTO_OK : pto_last_status();
        }
        return static_cast<int>(PTO_OK);
      },
      PTO_SUBMITS);
  const pto_region declared{0, 1, {16}, {1}};
  pto_param param = {PTO_INOUT, 0, whole, 0, &declared, nullptr};
  EXPECT(pto_submit_task(runtime, parent, PTO_VECTOR, &param, 1) != 0);
  EXPECT_EQ(pto_wait_all(runtime, 60), PTO_OK);
  EXPECT_EQ(results[0], PTO_OK);
  EXPECT_EQ(results[1], PTO_OK);
  EXPECT_EQ(results[2], PTO_BAD_ARGUMENT);
  EXPECT_EQ(results[3], PTO_BAD_ARGUMENT);
}

CASE("a task that waits for itself gets an error") {
  Runtime runtime(1);
  static PTORuntime* shared = nullptr;
  static std::atomic<pto_task> own{0};
  static int result = PTO_OK;
  shared = runtime;
  const pto_kernel kernel = pto_kernel_add(
      runtime, "selfish",
      [](void* const*, const uint64_t*) {
        while (own.load() == 0) {
        }
        result = pto_wait(shared, own.load(), PTO_FOREVER);
        return static_cast<int>(PTO_OK);
      },
      PTO_SUBMITS);
  own = pto_submit_task(runtime, kernel, PTO_VECTOR, nullptr, 0);
  EXPECT_EQ(pto_wait_all(runtime, 60), PTO_OK);
  EXPECT_EQ(result, PTO_DEADLOCK);
}

TILEWISE_TEST_MAIN
