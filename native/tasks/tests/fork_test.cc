// A forked child: its copy of a runtime has no threads, so every call is rejected; it closes at once.
#include <sys/wait.h>
#include <unistd.h>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

/// The child's failed expectations; 1000 + SIGALRM if it hangs.
template <class Body>
int failures_in_child(Body&& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    const int before = tilewise::testing::failures();
    body();
    _exit(tilewise::testing::failures() - before);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace

CASE("a forked child cannot wait, submit or lock, and can close at once") {
  PTORuntime* runtime = nullptr;
  const pto_config config = Runtime::config(2, 32);
  EXPECT_EQ(pto_runtime_open(&config, &runtime), 0);
  std::vector<int64_t> data(4);
  const pto_handle x = pto_register(runtime, data.data(), 32);
  const pto_event event = pto_event_open(runtime);
  const pto_wait_for wait{event, 1};
  pto_param params[] = {inout(x)};
  pto_task_spec spec{};
  spec.kernel = PTO_NO_KERNEL;
  spec.worker_type = PTO_VECTOR;
  spec.params = params;
  spec.num_params = 1;
  spec.waits = &wait;
  spec.num_waits = 1;
  const pto_task task = pto_submit(runtime, &spec);
  EXPECT(task != 0);
  const int failed = failures_in_child([&] {
    EXPECT_EQ(pto_submit(runtime, &spec), pto_task{0});
    EXPECT_EQ(pto_last_status(), int{PTO_CLOSED});
    EXPECT(std::string(pto_last_error()).find("made in another process") != std::string::npos);
    EXPECT_EQ(pto_wait(runtime, task, PTO_FOREVER), int{PTO_CLOSED});
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), int{PTO_CLOSED});
    EXPECT_EQ(pto_is_complete(runtime, task), int{PTO_CLOSED});
    EXPECT(pto_read(runtime, x, nullptr, PTO_FOREVER) == nullptr);
    EXPECT_EQ(pto_unregister(runtime, x, PTO_FOREVER), int{PTO_CLOSED});
    EXPECT_EQ(pto_event_post(runtime, event, 1), int{PTO_CLOSED});
    EXPECT_EQ(pto_alloc(runtime, 8), pto_handle{0});
    EXPECT_EQ(pto_bytes(runtime, x), uint64_t{32});
    pto_task_release(runtime, task);
    EXPECT_EQ(pto_runtime_close(runtime), 0);
#if !defined(__SANITIZE_THREAD__)  // it allows no threads in a child
    Runtime mine(config);
    EXPECT(mine.submit(PTO_NO_KERNEL, {}) != 0);
    EXPECT_EQ(pto_wait_all(mine, PTO_FOREVER), 0);
#endif
  });
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(pto_event_post(runtime, event, 1), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(pto_runtime_close(runtime), 0);
}

CASE("a fork at any moment of busy submitters gives a child whose calls fail at once") {
  Runtime runtime(Runtime::config(2, 32));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      std::vector<int64_t> data(1);
      const pto_handle x = runtime.add(data);
      while (!stop.load()) {
        runtime.submit(PTO_NO_KERNEL, {inout(x)});
        std::thread([&] { runtime.submit(PTO_NO_KERNEL, {}); }).join();  // takes and returns a submission context
      }
      EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
      EXPECT_EQ(pto_unregister(runtime, x, PTO_FOREVER), 0);
    });
  }
  for (int n = 0; n < 100 / kSlowdown; ++n) {
    EXPECT_EQ(failures_in_child([&] {
                EXPECT_EQ(runtime.submit(PTO_NO_KERNEL, {}), pto_task{0});
                EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), int{PTO_CLOSED});
              }),
              0);
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
}

TILEWISE_TEST_MAIN
