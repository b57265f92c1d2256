// Sleeping and waking: more threads than cores, thousands of sleeps, nobody forgotten.
#include "tasks/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

void nap(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

}  // namespace

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

CASE("workers of different types sleep side by side and the right one wakes") {
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
    std::thread raiser([&] {
      nap(3000);
      pto_event_raise(runtime, event, 1);
    });
    const pto_task task = runtime.submit(busy, {}, {.scalars = {10}, .waits = {{event, round}}});
    for (int t = 0; t < 8; ++t) EXPECT(runtime.submit(busy, {}, {.scalars = {500}}) != 0);
    EXPECT_EQ(pto_wait(runtime, task, 20), 0);
    raiser.join();
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

CASE("an idle runtime uses no processor time to speak of") {
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
