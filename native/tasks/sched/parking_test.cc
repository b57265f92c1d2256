// Sleeping and waking: more threads than cores, thousands of sleeps, no forgotten sleeper.
//
// This program defines its own clock_gettime, which the runtime calls. It is the system's, except for a worker whose
// time is stopped: so a test can act between the worker's decision to park and its parking.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

void nap(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

/// The state of a worker whose time is frozen: idle, about to park, or allowed to park.
enum Stage { kIdle, kAboutToPark, kMayPark };
std::atomic<Stage> stage{kIdle};
thread_local int num_frozen = 0;  // further calls of the clock by this thread that return the frozen time
thread_local timespec frozen_time;

/// Freezes the time of the worker that runs it. The worker's first call of the clock sets the start of its idle time,
/// later ones check how long it has been idle. So the last frozen call is such a check, and only the time after it lets
/// the worker park.
int freeze_time_kernel(void* const*, const uint64_t*) {
  clock_gettime(CLOCK_MONOTONIC, &frozen_time);
  num_frozen = 8;
  return PTO_OK;
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (num_frozen == 0) return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  *time = frozen_time;
  if (--num_frozen > 0) return 0;
  stage.store(kAboutToPark);
  while (stage.load() != kMayPark) std::this_thread::yield();
  time->tv_sec += 1;
  return 0;
}

CASE("a worker that sleeps is woken by every single submission, thousands of times") {
  Runtime runtime(1);
  std::atomic<int> count{0};
  const pto_kernel counting = runtime.kernel("count", count_kernel);
  for (int t = 0; t < 3000 / kSlowdown; ++t) {
    const pto_task task = runtime.submit(counting, {}, {.scalars = {scalar(&count)}});
    if (t % 16 == 0) nap(1500);  // long enough to fall asleep
    EXPECT_EQ(pto_wait(runtime, task, 20), 0);
  }
  EXPECT_EQ(count.load(), 3000 / kSlowdown);
}

#if defined(__x86_64__)  // elsewhere the runtime also uses the clock for short delays
CASE("a worker that has decided to park sees a task submitted before it is counted as parked") {
  Runtime runtime(1);
  std::atomic<int> count{0};
  const pto_kernel holding = runtime.kernel("hold", freeze_time_kernel);
  const pto_kernel counting = runtime.kernel("count", count_kernel);
  bool is_run = true;
  for (int round = 1; round <= 20 && is_run; ++round) {
    stage.store(kIdle);
    EXPECT_EQ(pto_wait(runtime, runtime.submit(holding, {}), 20), 0);
    const auto begin = std::chrono::steady_clock::now();
    while (stage.load() != kAboutToPark && seconds_since(begin) < 20) std::this_thread::yield();
    EXPECT_EQ(stage.load(), kAboutToPark);
    const pto_task task = runtime.submit(counting, {}, {.scalars = {scalar(&count)}});
    stage.store(kMayPark);
    is_run = pto_wait(runtime, task, 5) == 0;  // with a timeout this thread does not help
    EXPECT(is_run);
    EXPECT_EQ(count.load(), round);
  }
  EXPECT_EQ(runtime.stats().num_helped, 0u);
}
#endif

CASE("eight workers on fewer cores: bursts and pauses, all tasks run") {
  Runtime runtime(8);
  std::atomic<int> count{0};
  const pto_kernel counting = runtime.kernel("count", count_kernel);
  int expected = 0;
  for (int burst = 0; burst < 300 / kSlowdown; ++burst) {
    for (int t = 0; t < burst % 50; ++t, ++expected) {
      runtime.submit(counting, {}, {.scalars = {scalar(&count)}, .target_worker = t % 5 == 0 ? 1 + t % 8 : 0});
    }
    if (burst % 3 == 0) nap(1300);
    EXPECT_EQ(pto_wait_all(runtime, burst % 2 == 0 ? 20.0 : PTO_FOREVER), 0);
  }
  EXPECT_EQ(count.load(), expected);
}

CASE("workers of different types sleep and the right one wakes") {
  const uint8_t types[] = {1 << PTO_CUBE, 1 << PTO_VECTOR, 1 << PTO_AI_CPU, 1 << PTO_ACCELERATOR};
  pto_config config = Runtime::config(4);
  config.worker_types = types;
  Runtime runtime(config);
  std::atomic<int> count{0};
  const pto_kernel counting = runtime.kernel("count", count_kernel);
  const int rounds = 400 / kSlowdown;
  for (int t = 0; t < rounds; ++t) {
    if (t % 4 == 0) nap(1300);
    const pto_task task =
        runtime.submit(counting, {}, {.scalars = {scalar(&count)}, .type = static_cast<pto_worker_type>(t * 7 % 4)});
    EXPECT_EQ(pto_wait(runtime, task, 20), 0);
  }
  EXPECT_EQ(count.load(), rounds);
}

CASE("sleeping submitters are woken by completions, events, callbacks and room") {
  Runtime runtime(2, 4);
  const pto_kernel busy = runtime.kernel("busy", busy_kernel);
  const pto_event event = pto_event_open(runtime);
  for (uint64_t round = 1; round <= 60u / kSlowdown + 1; ++round) {
    std::thread poster([&] {
      nap(3000);
      pto_event_post(runtime, event, 1);
    });
    const pto_task task = runtime.submit(busy, {}, {.scalars = {10}, .waits = {{event, round}}});
    for (int t = 0; t < 8; ++t) EXPECT(runtime.submit(busy, {}, {.scalars = {500}}) != 0);
    EXPECT_EQ(pto_wait(runtime, task, 20), 0);
    poster.join();
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("many submitters wait at once, each for its own task") {
  Runtime runtime(2, 64);
  const pto_kernel busy = runtime.kernel("busy", busy_kernel);
  std::vector<std::thread> threads;
  std::atomic<int> num_done{0};
  for (int t = 0; t < 10; ++t) {
    threads.emplace_back([&, t] {
      for (int n = 0; n < 200 / kSlowdown; ++n) {
        const pto_task task = runtime.submit(busy, {}, {.scalars = {static_cast<uint64_t>(n % 30)}});
        EXPECT_EQ(pto_wait(runtime, task, t % 2 == 0 ? 30.0 : PTO_FOREVER), 0);
      }
      num_done.fetch_add(1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_done.load(), 10);
}

CASE("an idle runtime uses almost no processor time") {
  Runtime runtime(4);
  pto_wait(runtime, runtime.submit(PTO_NO_KERNEL, {}), PTO_FOREVER);
  nap(20'000);
  const auto used_ns = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
  };
  const int64_t before = used_ns();
  nap(200'000);
  EXPECT(used_ns() - before < 100'000'000);
}

CASE("hundreds of runtimes open and close, with tasks just submitted") {
  for (int n = 0; n < 200 / kSlowdown; ++n) {
    std::atomic<int> count{0};
    {
      Runtime runtime(static_cast<uint32_t>(n % 4));
      const pto_kernel counting = runtime.kernel("count", count_kernel);
      for (int t = 0; t < n % 7; ++t) runtime.submit(counting, {}, {.scalars = {scalar(&count)}});
    }
    EXPECT_EQ(count.load(), n % 7);
  }
}

TILEWISE_TEST_MAIN
