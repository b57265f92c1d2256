// Timeouts and figures: infinity, negative numbers, NaN, messages, and which thread helped.
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "tasks/api/testing_cpp.h"

using namespace tilewise::tasks::testing;

namespace {

constexpr double kNaN = NAN;

/// A task that waits for an event that is not posted yet.
struct WaitingTask {
  explicit WaitingTask(uint32_t workers = 1) : runtime(workers), event(pto_event_open(runtime)), h(runtime.add(x)) {
    task = runtime.submit(PTO_NO_KERNEL, {out(h)}, {.waits = {{event, 1}}});
  }
  ~WaitingTask() { pto_event_post(runtime, event, 1); }
  int64_t x = 0;
  Runtime runtime;
  pto_event event;
  pto_handle h;
  pto_task task = 0;
};

}  // namespace

CASE("a negative timeout polls, as 0 does, in every call") {
  WaitingTask waiting;
  for (const double timeout_s : {0.0, -1.0, -1e300, -HUGE_VAL}) {
    EXPECT_EQ(pto_wait(waiting.runtime, waiting.task, timeout_s), PTO_TIMEOUT);
    EXPECT_EQ(pto_wait_all(waiting.runtime, timeout_s), PTO_TIMEOUT);
    EXPECT_EQ(pto_wait_any(waiting.runtime, &waiting.task, 1, timeout_s, nullptr), PTO_TIMEOUT);
    EXPECT_EQ(pto_unregister(waiting.runtime, waiting.h, timeout_s), PTO_TIMEOUT);
    EXPECT(pto_read(waiting.runtime, waiting.h, nullptr, timeout_s) == nullptr);
    EXPECT_EQ(pto_last_status(), PTO_TIMEOUT);
  }
  EXPECT(pto_write(waiting.runtime, waiting.h, nullptr, -3) == nullptr);
  EXPECT_EQ(pto_last_status(), PTO_TIMEOUT);
  EXPECT(has(pto_last_error(), "after -3 s"));  // the timeout as passed
}

CASE("every call rejects NaN, also if there is nothing to wait for") {
  WaitingTask waiting;
  const pto_task done = waiting.runtime.submit(PTO_NO_KERNEL, {});
  EXPECT_EQ(pto_wait(waiting.runtime, done, 10), 0);
  EXPECT_EQ(pto_wait(waiting.runtime, done, kNaN), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_wait(waiting.runtime, waiting.task, kNaN), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_wait_all(waiting.runtime, kNaN), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_wait_any(waiting.runtime, &waiting.task, 1, kNaN, nullptr), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_unregister(waiting.runtime, waiting.h, kNaN), PTO_BAD_ARGUMENT);
  EXPECT(pto_read(waiting.runtime, waiting.h, nullptr, kNaN) == nullptr && has(pto_last_error(), "NaN"));
  EXPECT(pto_write(waiting.runtime, waiting.h, nullptr, kNaN) == nullptr && has(pto_last_error(), "NaN"));
}

CASE("infinity waits for ever, and helps") {
  EXPECT(PTO_FOREVER == HUGE_VAL);
  Runtime runtime(0);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  const pto_task task = runtime.submit(runtime.kernel("set", set_kernel), {out(h)}, {.scalars = {4}});
  EXPECT_EQ(pto_wait(runtime, task, HUGE_VAL), 0);
  EXPECT_EQ(x, 4);
}

CASE("tasks that submitters ran are each counted, also without workers") {
  for (const uint32_t num_tasks : {1u, 7u, 100u}) {
    Runtime runtime(0, 256);
    int64_t x = 0;
    const pto_handle h = runtime.add(x);
    const pto_kernel step = runtime.kernel("step", step_kernel);
    for (uint32_t t = 0; t < num_tasks; ++t) runtime.submit(step, {inout(h)}, {.scalars = {1}});  // a chain
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT_EQ(runtime.stats().num_helped, num_tasks);
  }
}

CASE("children that a submitter runs are counted too") {
  Runtime runtime(0);
  static PTORuntime* shared;
  shared = runtime;
  const auto parent = [](void* const*, const uint64_t*) {
    for (int child = 0; child < 5; ++child) pto_submit_task(shared, PTO_NO_KERNEL, PTO_VECTOR, nullptr, 0);
    return pto_wait_all(shared, PTO_FOREVER);
  };
  runtime.submit(runtime.kernel("parent", parent, PTO_SUBMITS), {});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(runtime.stats().num_helped, 6u);
}

CASE("the error names the requested worker") {
  Runtime runtime(2);
  EXPECT_EQ(runtime.submit(PTO_NO_KERNEL, {}, {.target_worker = 8}), 0u);
  EXPECT(has(pto_last_error(), "got worker 7 of 2 workers"));
}

CASE("a library's name without a slash is a file of the current folder, if there is one") {
  Runtime runtime(1);
  EXPECT_EQ(pto_library_load(runtime, "no_such_library.so"), PTO_BAD_ARGUMENT);
  EXPECT(has(pto_last_error(), "no file of that name in the current folder"));
  EXPECT_EQ(pto_run_orchestration(runtime, "no_such_library.so", "f", nullptr), PTO_BAD_ARGUMENT);
  EXPECT(has(pto_last_error(), "[runtime.run_orchestration]") && has(pto_last_error(), "current folder"));
  const std::string name = "not_a_library_" + std::to_string(getpid()) + ".so";
  std::ofstream(name) << "text";
  EXPECT_EQ(pto_library_load(runtime, name.c_str()), PTO_BAD_ARGUMENT);
  EXPECT(has(pto_last_error(), ("./" + name).c_str()) && !has(pto_last_error(), "no file"));
  unlink(name.c_str());
  EXPECT_EQ(pto_library_load(runtime, "libm.so.6"), 0);
}

namespace cpp = tilewise::pto;
using cpp::testing::status_of;

CASE("in C++ a group's error gives the timeout of the call, not what was left of it") {
  cpp::testing::Bench b;
  cpp::TaskGroup group;
  group.add(b.rt.submit({}, {}, {}, {}, b.behind_event()));
  group.add(b.rt.submit({}, {}, {}, {}, b.behind_event()));
  EXPECT_EQ(status_of([&] { group.wait_all(0.02); }, "[pto.TaskGroup.wait_all]"), PTO_TIMEOUT);
  EXPECT_EQ(status_of([&] { group.wait_all(0.02); }, "after 0.02 s"), PTO_TIMEOUT);
  EXPECT_EQ(status_of(
                [&] {
                  for (auto& task : group.as_completed(0.02)) task.wait();
                },
                "after 0.02 s"),
            PTO_TIMEOUT);
  EXPECT_EQ(status_of([&] { group.wait_any(-2); }, "after -2 s"), PTO_TIMEOUT);
  EXPECT_EQ(status_of([&] { group[0].wait(-1); }, "after -1 s"), PTO_TIMEOUT);
  EXPECT_EQ(status_of([&] { group[0].wait(kNaN); }, "NaN"), PTO_BAD_ARGUMENT);
  b.start.post();
  group.wait_all();
}

namespace {

void add_one(void* const* buffers, const uint64_t*) { value_of(buffers[0]) += 1; }
void add_ten(void* const* buffers, const uint64_t*) noexcept { value_of(buffers[0]) += 10; }
int add_hundred(void* const* buffers, const uint64_t*) { return value_of(buffers[0]) += 100, 0; }
pto_status say_failed(void* const*, const uint64_t*) { return PTO_TASK_FAILED; }

}  // namespace

CASE("in C++ functions and lambdas that return void, a number or a status are kernels") {
  cpp::Runtime rt({.num_workers = 1});
  std::vector<int64_t> data{0};
  const cpp::Buffer x = rt.buffer(data);
  void (*pointer)(void* const*, const uint64_t*) = add_one;
  for (const cpp::Kernel kernel :
       {rt.kernel("trsm", pointer), rt.kernel("function", add_one), rt.kernel("noexcept", add_ten),
        rt.kernel("int", add_hundred), rt.kernel("int pointer", &add_hundred),
        rt.kernel("void lambda", [](void* const* b, const uint64_t*) { value_of(b[0]) += 1000; }),
        rt.kernel("int lambda", [](void* const* b, const uint64_t*) { return value_of(b[0]) += 10000, 0; }),
        rt.kernel("status lambda", [](void* const* b, const uint64_t*) { return value_of(b[0]) += 100000, PTO_OK; })}) {
    rt.submit(kernel, {inout(x)}).wait();
  }
  EXPECT_EQ(x.read<int64_t>()[0], 111212);
  EXPECT_EQ(status_of([&] { rt.submit(rt.kernel("failing", say_failed)).wait(); }), PTO_TASK_FAILED);
}

CASE("in C++ a View has the sizes and strides of a box, and rejects another type") {
  cpp::Runtime rt({.num_workers = 1});
  std::vector<float> data(12, 1);
  const cpp::Buffer x = rt.buffer(data);
  const cpp::Kernel scale = rt.kernel(
      "scale",
      [](void* const* buffers, const uint64_t* scalars) {
        const cpp::View<float> a(buffers[0]);
        for (uint64_t i = 0; i < a.size(0); ++i) {
          for (uint64_t j = 0; j < a.size(1); ++j) a(i, j) *= cpp::scalar<float>(scalars[0]);
        }
      },
      PTO_VIEWS);
  rt.submit(scale, {inout(x, cpp::tile(1, 1, 2, 2, 4, sizeof(float))).as<float>()}, {3.0});
  rt.submit(scale, {inout(x).as<float>({3, 4})}, {2.0}).wait();
  EXPECT(data == (std::vector<float>{2, 2, 2, 2, 2, 6, 6, 2, 2, 6, 6, 2}));
  EXPECT_EQ(status_of([&] { rt.submit(scale, {inout(x).as<double>({2, 3})}).wait(); }, "type of the elements"),
            PTO_TASK_FAILED);
  EXPECT_EQ(status_of([&] { rt.submit(scale, {inout(x).as<float>({3, 5})}); }, "must lie in"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { inout(x).as<float>(); }, "pass the sizes"), PTO_BAD_ARGUMENT);
}

CASE("in C++ a task has a name and a deadline, and a kernel can check whether to stop") {
  cpp::testing::Bench b;
  cpp::TaskOptions options = b.behind_event();
  options.name = "late one";
  options.deadline_s = 0.01;
  const cpp::TaskHandle task = b.rt.submit({}, {}, {}, {}, options);
  EXPECT_EQ(status_of([&] { task.wait(10); }, "'late one'"), PTO_TASK_FAILED);
  EXPECT_EQ(task.status(), PTO_TIMEOUT);
  EXPECT(!cpp::should_stop());
}

TILEWISE_TEST_MAIN
