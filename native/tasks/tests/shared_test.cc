// Two processes: this one submits, a forked one runs tasks. Correct products, rejections, and detecting a death within
// a second.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

std::string new_path(const char* name) { return "/tmp/tilewise-" + std::string(name) + "-" + std::to_string(getpid()); }

/// Forks before this process has threads; the child's exit status is the status of pto_workers_run, negated.
pid_t fork_workers(const std::string& path) {
  const pid_t child = fork();
  if (child != 0) return child;
  int status = PTO_BAD_ARGUMENT;
  for (int tries = 0; tries < 500 && status == PTO_BAD_ARGUMENT; ++tries) {
    status = pto_workers_run(path.c_str(), nullptr, 0);
    if (status == PTO_BAD_ARGUMENT) usleep(10'000);  // the file does not exist yet
  }
  _exit(-status);
}

pto_config shared_config(const std::string& path) {
#if defined(__SANITIZE_THREAD__)
  pto_config config =
      Runtime::config(1, 32);  // ThreadSanitizer cannot see the other process's order between two workers
#else
  pto_config config = Runtime::config(2, 32);
#endif
  config.shared_path = path.c_str();
  config.heap_bytes = 8 << 20;
  return config;
}

int exit_status(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace

CASE("the other process runs tasks in order, and ends when the orchestrator closes") {
  const std::string path = new_path("products");
  const pid_t child = fork_workers(path);
  {
    Runtime runtime(shared_config(path));
    const pto_kernel fill = pto_kernel_find(runtime, "fill");
    const pto_kernel sum = pto_kernel_find(runtime, "sum_i64");
    const pto_kernel copy = pto_kernel_find(runtime, "copy");
    const pto_handle total = pto_alloc(runtime, 80);
    EXPECT(runtime.submit(fill, {out(total)}, {.scalars = {80, 0}}) != 0);
    for (uint64_t t = 0; t < 2000u / kSlowdown; ++t) {
      pto_scope_begin(runtime);
      const pto_handle ones = runtime.make(fill, 80, {}, {.scalars = {80, 1}});
      const pto_handle copied = runtime.make(copy, 80, {in(ones)}, {.scalars = {80}});
      if (runtime.submit(sum, {inout(total), in(copied)}, {.scalars = {80}}) == 0) {
        std::fprintf(stderr, "%s\n", pto_last_error());
      }
      EXPECT_EQ(pto_scope_end(runtime), 0);
    }
    const auto* seen = static_cast<const int64_t*>(pto_read(runtime, total, nullptr, 30));
    EXPECT(seen != nullptr && seen[9] == static_cast<int64_t>(0x0101010101010101u * (2000u / kSlowdown)));
    int64_t local = 0;
    EXPECT_EQ(runtime.add(local), pto_handle{0});
    EXPECT_EQ(runtime.submit(fill, {raw(&local)}, {.scalars = {8, 0}}), pto_task{0});
    EXPECT(pto_notify(runtime, runtime.submit(PTO_NO_KERNEL, {}), [](void*) {}, nullptr) != 0);
    EXPECT_EQ(pto_wait_all(runtime, 30), 0);
  }
  EXPECT_EQ(exit_status(child), 0);
  EXPECT(access(path.c_str(), F_OK) != 0);
}

CASE("a trace shows the other process's tasks, each time that it is on") {
  const std::string path = new_path("traced");
  const pid_t child = fork_workers(path);
  {
    Runtime runtime(shared_config(path));
    const pto_kernel fill = pto_kernel_find(runtime, "fill");
    const pto_handle h = pto_alloc(runtime, 64);
    std::vector<pto_trace_task> records(100);
    for (const uint64_t count : {30, 7}) {
      EXPECT_EQ(pto_trace_enable(runtime, 100), 0);
      for (uint64_t t = 0; t < count; ++t) runtime.submit(fill, {inout(h)}, {.scalars = {64, t}});
      EXPECT_EQ(pto_wait_all(runtime, 30), 0);
      EXPECT_EQ(pto_trace_enable(runtime, 0), 0);
      runtime.submit(fill, {inout(h)}, {.scalars = {64, 1}});
      EXPECT_EQ(pto_wait_all(runtime, 30), 0);
      EXPECT_EQ(pto_trace_tasks(runtime, records.data(), 100), count);
      for (uint64_t r = 0; r < count; ++r) {
        EXPECT(records[r].worker >= 0 && records[r].kernel == fill);
        EXPECT(records[r].submit_ns > 0 && records[r].submit_ns <= records[r].ready_ns &&
               records[r].ready_ns <= records[r].start_ns && records[r].start_ns <= records[r].end_ns);
      }
    }
  }
  EXPECT_EQ(exit_status(child), 0);
}

CASE("SIGKILL of the workers is PTO_PEER_LOST within a second, and the runtime still closes") {
  const std::string path = new_path("killed");
  const pid_t child = fork_workers(path);
  Runtime runtime(shared_config(path));
  const pto_event never = pto_event_open(runtime);
  const pto_handle h = pto_alloc(runtime, 64);
  const pto_task task =
      runtime.submit(pto_kernel_find(runtime, "fill"), {out(h)}, {.scalars = {64, 1}, .waits = {{never, 1}}});
  EXPECT_EQ(pto_wait(runtime, task, 0.05), PTO_TIMEOUT);
  std::thread killer([&] {
    usleep(50'000);
    kill(child, SIGKILL);
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(pto_wait(runtime, task, PTO_FOREVER), PTO_PEER_LOST);
  EXPECT(seconds_since(begin) < 1.0);
  killer.join();
  EXPECT_EQ(exit_status(child), 1000 + SIGKILL);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_PEER_LOST);
}

CASE("the file is complete as soon as it exists") {
  for (int round = 0; round < 60 / kSlowdown; ++round) {
    const std::string path = new_path("complete");
    const pid_t child = fork();
    if (child == 0) {
      int status = PTO_BAD_ARGUMENT;
      while (status == PTO_BAD_ARGUMENT) {
        status = pto_workers_run(path.c_str(), nullptr, 0);
        if (status == PTO_BAD_ARGUMENT && !has(pto_last_error(), "No such file")) _exit(100);
      }
      _exit(-status);
    }
    {
      Runtime runtime(shared_config(path));
    }
    EXPECT_EQ(exit_status(child), 0);
  }
}

CASE("workers whose orchestrator dies return PTO_PEER_LOST") {
  const std::string path = new_path("orphans");
  const pid_t orchestrator = fork();
  if (orchestrator == 0) {
    const pto_config config = shared_config(path);
    PTORuntime* runtime = nullptr;
    pto_runtime_open(&config, &runtime);
    _exit(9);
  }
  const pid_t workers = fork_workers(path);
  EXPECT_EQ(exit_status(orchestrator), 9);
  EXPECT_EQ(exit_status(workers), -PTO_PEER_LOST);
  unlink(path.c_str());
}

CASE("no process attaches: PTO_TIMEOUT, and the file is removed; other paths are rejected") {
  const std::string path = new_path("alone");
  pto_config config = shared_config(path);
  config.peer_timeout_s = 0.1;
  PTORuntime* runtime = nullptr;
  EXPECT_EQ(pto_runtime_open(&config, &runtime), PTO_TIMEOUT);
  EXPECT(has(pto_last_error(), "attach"));
  EXPECT(access(path.c_str(), F_OK) != 0);
  EXPECT_EQ(pto_workers_run("/no/such/region", nullptr, 0), PTO_BAD_ARGUMENT);
  std::fclose(std::fopen(path.c_str(), "w"));
  EXPECT_EQ(pto_runtime_open(&config, &runtime), PTO_BAD_ARGUMENT);
  EXPECT(has(pto_last_error(), "must be a new file"));
  EXPECT_EQ(unlink(path.c_str()), 0);  // another program's file is not removed
}

CASE("an invalid peer_timeout_s is rejected") {
  for (const double patience : {-1.0, -1e300, std::nan("")}) {
    pto_config config = Runtime::config(1, 32);
    config.peer_timeout_s = patience;
    PTORuntime* runtime = nullptr;
    EXPECT_EQ(pto_runtime_open(&config, &runtime), int{PTO_BAD_ARGUMENT});
    EXPECT(std::string(pto_last_error()).find("peer_timeout_s") != std::string::npos);
  }
}

TILEWISE_TEST_MAIN
