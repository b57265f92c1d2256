// Tasks that the submitting thread runs itself (PTO_RUN_HERE), and data that libraries keep with a runtime.
#include <thread>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

int note_thread(void* const*, const uint64_t* scalars) {
  *pointer<std::thread::id>(scalars[0]) = std::this_thread::get_id();
  return PTO_OK;
}

int fail(void* const*, const uint64_t*) {
  pto_fail("on purpose");
  return 5;
}

const Extra kHere{.flags = PTO_KEEP | PTO_RUN_HERE};

Extra here(std::thread::id& thread) {
  Extra extra = kHere;
  extra.scalars = {scalar(&thread)};
  return extra;
}

int num_made = 0, num_dropped = 0;
void* make_data() { return new int(++num_made); }
void drop_data(void* data) {
  ++num_dropped;
  delete static_cast<int*>(data);
}

}  // namespace

CASE("a task that waits for no other runs on the submitter's thread, before submit returns") {
  Runtime runtime(2);
  int64_t value = 0;
  const pto_handle x = runtime.add(value);
  const pto_kernel kernel = runtime.kernel("note", note_thread);
  const pto_region box = {0, 1, {4}, {1}};
  for (const pto_region* region : {static_cast<const pto_region*>(nullptr), &box}) {  // both paths of submission
    std::thread::id thread;
    const pto_task task = runtime.submit(kernel, {inout(x, region)}, here(thread));
    EXPECT(thread == std::this_thread::get_id());
    EXPECT_EQ(pto_is_complete(runtime, task), 1);
    EXPECT_EQ(pto_wait(runtime, task, 0), PTO_OK);
    pto_task_release(runtime, task);
  }
  EXPECT_EQ(runtime.stats().num_helped, 2u);
}

CASE("a task that waits for another runs in order, on the thread that finds it ready") {
  Runtime runtime(1);
  int64_t value = 0;
  const pto_handle x = runtime.add(value);
  Gate gate;
  runtime.submit(runtime.kernel("gate", Gate::kernel), {inout(x)}, {.scalars = {scalar(&gate)}});
  gate.await_inside(1);
  std::thread::id thread;
  const pto_task task = runtime.submit(runtime.kernel("note", note_thread), {inout(x)}, here(thread));
  EXPECT_EQ(pto_is_complete(runtime, task), 0);
  EXPECT(thread == std::thread::id());
  gate.open();
  EXPECT_EQ(pto_wait(runtime, task, PTO_FOREVER), PTO_OK);
  EXPECT(thread != std::thread::id());
}

CASE("a task for a chosen worker, and one whose kernel may submit, go to workers") {
  Runtime runtime(1);
  int64_t value = 0;
  const pto_handle x = runtime.add(value);
  const pto_kernel kernel = runtime.kernel("note", note_thread);
  const pto_kernel parent = runtime.kernel("parent", note_thread, PTO_SUBMITS);
  std::thread::id first, second;
  Extra chosen = here(first);
  chosen.target_worker = 1;
  const pto_task task = runtime.submit(kernel, {inout(x)}, chosen);
  EXPECT_EQ(pto_wait(runtime, task, PTO_FOREVER), PTO_OK);
  const pto_task other = runtime.submit(parent, {inout(x)}, here(second));
  EXPECT_EQ(pto_wait(runtime, other, PTO_FOREVER), PTO_OK);
  EXPECT(first != std::this_thread::get_id() && second != std::this_thread::get_id());
}

CASE("its failure is that of a task, and reaches the tasks behind it") {
  Runtime runtime(1);
  int64_t value = 0;
  const pto_handle x = runtime.add(value);
  const pto_task task = runtime.submit(runtime.kernel("fail", fail), {inout(x)}, kHere);
  EXPECT_EQ(pto_wait(runtime, task, PTO_FOREVER), PTO_TASK_FAILED);
  char text[256];
  pto_task_error(runtime, task, text, sizeof(text));
  EXPECT(std::string(text).find("on purpose") != std::string::npos);
  std::thread::id thread;
  const pto_task next = runtime.submit(runtime.kernel("note", note_thread), {inout(x)}, here(thread));
  EXPECT_EQ(pto_wait(runtime, next, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT(thread == std::thread::id());
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
}

CASE("waiting tasks start when a task that ran here has ended") {
  Runtime runtime(1);
  int64_t values[2] = {};
  const pto_handle x = runtime.add(values[0]), y = runtime.add(values[1]);
  const pto_kernel kernel = runtime.kernel("note", note_thread);
  for (int round = 0; round < 100; ++round) {
    std::thread::id first, second;
    runtime.submit(kernel, {inout(x)}, here(first));
    runtime.submit(kernel, {inout(x), inout(y)}, {.scalars = {scalar(&second)}});
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_OK);
    EXPECT(second != std::thread::id());
  }
}

CASE("data of a library is made once per runtime and dropped when it is closed") {
  {
    Runtime runtime(1), other(0);
    void* const data = pto_runtime_data(runtime, make_data, drop_data);
    std::thread([&] { EXPECT(pto_runtime_data(runtime, make_data, drop_data) == data); }).join();
    EXPECT(pto_runtime_data(other, make_data, drop_data) != data);
    EXPECT_EQ(num_made, 2);
    EXPECT_EQ(num_dropped, 0);
  }
  EXPECT_EQ(num_dropped, 2);
  EXPECT(pto_runtime_data(nullptr, make_data, drop_data) == nullptr);
  EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_set_error(PTO_TIMEOUT, "mine"), PTO_TIMEOUT);
  EXPECT(std::string(pto_last_error()) == "mine" && pto_last_status() == PTO_TIMEOUT);
}

TILEWISE_TEST_MAIN
