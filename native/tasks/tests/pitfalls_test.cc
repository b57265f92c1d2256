// Every mistake in the brief (2.x) and every pitfall of the existing implementation (3.x), as a named case. Mistakes in
// small protocols are also planted in the protocol's template: see native/protocols.
#include <cstring>
#include <set>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

constexpr uint64_t kSegment = 256 << 10;

pto_config tiny(uint32_t workers, uint32_t window, uint64_t segments = 2) {
  pto_config config = Runtime::config(workers, window);
  config.heap_bytes = segments * kSegment;
  return config;
}

}  // namespace

CASE("brief 2.1: a leaf whose scope ended before it finished is consumed") {
  Runtime runtime(tiny(1, 2, 1));
  const pto_kernel gated = runtime.kernel("gate", Gate::kernel);
  for (int round = 0; round < 500; ++round) {
    Gate gate;
    pto_scope_begin(runtime);
    EXPECT(runtime.make(gated, kSegment, {}, {.scalars = {scalar(&gate)}}) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
    gate.open();
    pto_scope_begin(runtime);
    EXPECT(runtime.make(PTO_NO_KERNEL, kSegment) != 0);  // needs the leaf's memory
    EXPECT_EQ(pto_scope_end(runtime), 0);
    EXPECT_EQ(pto_wait_all(runtime, 30), 0);
  }
}

CASE("brief 2.2: a consumer of a completed producer becomes ready") {
  Runtime runtime(1);
  int64_t x = 0, y = 0;
  const pto_handle hx = runtime.add(x), hy = runtime.add(y);
  EXPECT_EQ(pto_wait(runtime, runtime.submit(runtime.kernel("set", set_kernel), {out(hx)}, {.scalars = {5}}), 30), 0);
  EXPECT_EQ(pto_wait(runtime, runtime.submit(runtime.kernel("copy", copy_kernel), {out(hy), in(hx)}), 30), 0);
  EXPECT_EQ(y, 5);
}

CASE("brief 2.3: many more tasks than slots: nothing is indexed by a growing id") {
  Runtime runtime(1, 2);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  const pto_kernel step = runtime.kernel("step", step_kernel);
  std::set<pto_task> names;
  const size_t count = 20'000 / kSlowdown;
  for (size_t t = 0; t < count; ++t) names.insert(runtime.submit(step, {inout(h)}, {.scalars = {1}}));
  EXPECT_EQ(names.size(), count);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  for (const pto_task name : names) EXPECT_EQ(pto_is_complete(runtime, name), 1);
}

CASE("brief 2.4: successors are linked while their producer completes, from two threads, with none lost") {
  Runtime runtime(2, 64);
  const pto_kernel empty = runtime.kernel("empty", empty_kernel);
  const auto submitter = [&] {
    int64_t x = 0;
    const pto_handle h = runtime.add(x);
    for (int t = 0; t < 20'000 / kSlowdown; ++t) EXPECT(runtime.submit(empty, {t % 5 == 0 ? inout(h) : in(h)}) != 0);
    EXPECT_EQ(pto_wait_all(runtime, 60), 0);
  };
  std::thread other(submitter);
  submitter();
  other.join();
}

CASE("brief 2.5: inner buffers return at the inner scope's end, whatever is open outside") {
  Runtime runtime(tiny(1, 8, 2));
  for (int s = 0; s < 10; ++s) pto_scope_begin(runtime);
  for (int round = 0; round < 1000; ++round) {
    pto_scope_begin(runtime);
    EXPECT(runtime.make(PTO_NO_KERNEL, 2 * kSegment) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
  for (int s = 0; s < 10; ++s) EXPECT_EQ(pto_scope_end(runtime), 0);
}

CASE("brief 2.6: tasks without outputs between tasks with outputs do not disturb the heap") {
  Runtime runtime(tiny(1, 8, 2));
  const pto_kernel set = runtime.kernel("set", set_kernel);
  for (uint64_t round = 0; round < 2000; ++round) {
    pto_scope_begin(runtime);
    const pto_handle a = runtime.make(set, 100'000, {}, {.scalars = {round}});
    EXPECT(runtime.submit(PTO_NO_KERNEL, {}) != 0);
    const pto_handle b = runtime.make(set, 100'000, {}, {.scalars = {round + 1}});
    EXPECT(pto_address(runtime, a) != pto_address(runtime, b) && a != 0 && b != 0);
    const auto* seen = static_cast<const int64_t*>(pto_read(runtime, a, nullptr, 30));
    EXPECT(seen != nullptr && *seen == static_cast<int64_t>(round));
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
}

CASE("brief 2.7: edges, boxes and handles are reclaimed; a lookup returns every producer; write after read holds") {
  pto_config config = tiny(2, 64);
  config.max_regions = 64;
  config.max_handles = 64;
  Runtime runtime(config);
  std::vector<int64_t> x(32, 1);
  int64_t sum = 0;
  const pto_handle hx = runtime.add(x), hs = runtime.add(sum);
  const pto_kernel set = runtime.kernel("set", set_kernel);
  const pto_kernel total = runtime.kernel("total", [](void* const* buffers, const uint64_t*) -> int {
    value_of(buffers[1]) = 0;
    for (int i = 0; i < 32; ++i) value_of(buffers[1]) += static_cast<int64_t*>(buffers[0])[i];
    return PTO_OK;
  });
  for (uint64_t round = 0; round < 300u / (kSlowdown > 4 ? 4 : 1); ++round) {
    for (uint64_t i = 0; i < 32; ++i) {
      const pto_region box{.offset = i * 8, .ndim = 1, .size = {8}, .stride = {1}};
      EXPECT(runtime.submit(set, {out(hx, &box)}, {.scalars = {round + i}}) != 0);  // after the last round's reader
    }
    EXPECT(runtime.submit(total, {in(hx), out(hs)}) != 0);  // after 32 writers
    if (round % 10 != 0) continue;
    EXPECT(pto_read(runtime, hs, nullptr, 30) != nullptr);
    EXPECT_EQ(sum, static_cast<int64_t>(32 * round + 31 * 16));
  }
  EXPECT_EQ(pto_wait_all(runtime, 30), 0);
}

CASE("brief 2.8: two submitters' tasks in one buffer's history: nothing newer is dropped with what is older") {
  Runtime runtime(2, 4);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  const pto_kernel bump = runtime.kernel("bump", [](void* const* buffers, const uint64_t*) -> int {
    const int64_t before = value_of(buffers[0]);
    std::this_thread::yield();
    value_of(buffers[0]) = before + 1;
    return PTO_OK;
  });
  const int count = 5000 / kSlowdown;
  const auto submitter = [&] {
    for (int t = 0; t < count; ++t) EXPECT(runtime.submit(bump, {inout(h)}) != 0);
    EXPECT_EQ(pto_wait_all(runtime, 60), 0);
  };
  std::thread other(submitter);
  submitter();
  other.join();
  EXPECT_EQ(x, 2 * count);
}

CASE("brief 2.9: names are 64 bits wide and an old one never refers to a new task in the same slot") {
  Runtime runtime(0, 2);
  const pto_task old = runtime.submit(PTO_NO_KERNEL, {});
  EXPECT_EQ(pto_wait(runtime, old, PTO_FOREVER), 0);
  const pto_event event = pto_event_open(runtime);
  const pto_task a = runtime.submit(PTO_NO_KERNEL, {}, {.waits = {{event, 1}}});
  const pto_task b = runtime.submit(PTO_NO_KERNEL, {}, {.waits = {{event, 1}}});
  EXPECT(a != old && b != old);
  EXPECT_EQ(pto_is_complete(runtime, old), 1);
  EXPECT_EQ(pto_is_complete(runtime, a) + pto_is_complete(runtime, b), 0);
  EXPECT_EQ(pto_cancel(runtime, old), 0);
  EXPECT_EQ(pto_event_post(runtime, event, 1), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);  // cancelling the old id cancelled no task
}

CASE("brief 2.10: a matrix product on strided tiles writes C and accumulates over k") {
  constexpr uint64_t kTiles = 4, kSide = 8, kLength = kTiles * kSide;
  Runtime runtime(2, 16);
  std::vector<float> a(kLength * kLength), b(kLength * kLength), c(kLength * kLength, 0.0f),
      expected(kLength * kLength, 0.0f);
  for (uint64_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<float>(i % 7) - 3;
    b[i] = static_cast<float>(i % 5) - 2;
  }
  const pto_kernel product = runtime.kernel("product", [](void* const* buffers, const uint64_t*) -> int {
    auto* out_tile = static_cast<float*>(buffers[0]);
    const auto* left = static_cast<const float*>(buffers[1]);
    const auto* right = static_cast<const float*>(buffers[2]);
    for (uint64_t i = 0; i < kSide; ++i) {
      for (uint64_t j = 0; j < kSide; ++j) {
        for (uint64_t k = 0; k < kSide; ++k) {
          out_tile[i * kLength + j] += left[i * kLength + k] * right[k * kLength + j];
        }
      }
    }
    return PTO_OK;
  });
  const pto_handle ha = runtime.add(a), hb = runtime.add(b), hc = runtime.add(c);
  const auto tile = [](uint64_t row, uint64_t column) {
    return pto_region{.offset = (row * kSide * kLength + column * kSide) * 4,
                      .ndim = 2,
                      .size = {kSide, kSide * 4},
                      .stride = {kLength * 4, 1}};
  };
  for (uint64_t k = 0; k < kTiles; ++k) {
    for (uint64_t i = 0; i < kTiles; ++i) {
      for (uint64_t j = 0; j < kTiles; ++j) {
        const pto_region rc = tile(i, j), ra = tile(i, k), rb = tile(k, j);
        EXPECT(runtime.submit(product, {inout(hc, &rc), in(ha, &ra), in(hb, &rb)}) != 0);
      }
    }
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  for (uint64_t i = 0; i < kLength; ++i) {
    for (uint64_t k = 0; k < kLength; ++k) {
      for (uint64_t j = 0; j < kLength; ++j) expected[i * kLength + j] += a[i * kLength + k] * b[k * kLength + j];
    }
  }
  EXPECT(c == expected);  // small integers: exact
}

CASE("brief 2.11: the metadata of the default sizes stays within 4 MB, and errors, cancelling and traces exist") {
  Runtime runtime(1);
  const pto_kernel empty = runtime.kernel("empty", empty_kernel);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  for (int t = 0; t < 20'000 / kSlowdown; ++t) runtime.submit(empty, {inout(h)});
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT(runtime.stats().metadata_bytes < 4 << 20);
}

CASE("pitfall 3.1: store/load crossing: a worker that goes to sleep never misses the task pushed meanwhile") {
  Runtime runtime(2);
  for (int t = 0; t < 400 / kSlowdown; ++t) {
    std::this_thread::sleep_for(std::chrono::microseconds(1000 + t % 7 * 50));  // about when workers fall asleep
    EXPECT_EQ(pto_wait(runtime, runtime.submit(PTO_NO_KERNEL, {}), 20), 0);
  }
}

CASE("pitfall 3.2: slot reuse: an outer scope reads what was made and consumed long before") {
  Runtime runtime(tiny(2, 2, 4));
  pto_scope_begin(runtime);
  const pto_kernel set = runtime.kernel("set", set_kernel);
  const pto_handle early = runtime.make(set, 8, {}, {.scalars = {42}});
  for (uint64_t round = 0; round < 2000; ++round) {
    pto_scope_begin(runtime);
    EXPECT(runtime.make(set, 5000, {in(early)}, {.scalars = {round}}) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
  const auto* seen = static_cast<const int64_t*>(pto_read(runtime, early, nullptr, 30));
  EXPECT(seen != nullptr && *seen == 42);
  EXPECT_EQ(pto_scope_end(runtime), 0);
}

CASE("pitfall 3.3: cleaning up a finished task never removes a newer writer of the same box") {
  pto_config config = tiny(2, 8);
  config.max_regions = 16;
  Runtime runtime(config);
  std::vector<int64_t> x(64, 0);
  const pto_handle h = runtime.add(x);
  const pto_kernel step = runtime.kernel("step", step_kernel);
  uint64_t expected[64] = {};
  for (uint64_t t = 0; t < 20'000u / kSlowdown; ++t) {
    const uint64_t i = t * 37 % 64;  // many more boxes than there are
    const pto_region box{.offset = i * 8, .ndim = 1, .size = {8}, .stride = {1}};
    EXPECT(runtime.submit(step, {inout(h, &box)}, {.scalars = {t}}) != 0);
    expected[i] = expected[i] * 3 + t;
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT(std::memcmp(expected, x.data(), sizeof(expected)) == 0);
}

CASE("pitfall 3.4: a heap that was emptied half way still serves a request of its whole size") {
  Runtime runtime(tiny(1, 8, 4));
  for (uint64_t round = 0; round < 200; ++round) {
    pto_scope_begin(runtime);
    EXPECT(runtime.make(PTO_NO_KERNEL, (round % 4 + 1) * kSegment) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
    EXPECT_EQ(pto_wait_all(runtime, 30), 0);
    pto_scope_begin(runtime);
    EXPECT(runtime.make(PTO_NO_KERNEL, 4 * kSegment) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
}

CASE("pitfall 3.5: a live task without memory blocks no memory of others") {
  Runtime runtime(tiny(2, 8, 2));
  Gate gate;
  runtime.submit(runtime.kernel("gate", Gate::kernel), {}, {.scalars = {scalar(&gate)}});
  gate.await_inside(1);
  for (int round = 0; round < 300; ++round) {
    pto_scope_begin(runtime);
    EXPECT(runtime.make(PTO_NO_KERNEL, 2 * kSegment) != 0);
    EXPECT_EQ(pto_scope_end(runtime), 0);
  }
  gate.open();
  EXPECT_EQ(pto_wait_all(runtime, 30), 0);
}

CASE("pitfall 3.6: disjoint views and empty views order nothing, so tasks that need each other run in parallel") {
  Runtime runtime(2);
  std::vector<int64_t> x(4, 0);
  const pto_handle h = runtime.add(x);
  static std::atomic<int> inside;
  inside = 0;
  const pto_kernel meet = runtime.kernel("meet", [](void* const*, const uint64_t*) -> int {
    inside.fetch_add(1);
    const auto begin = std::chrono::steady_clock::now();
    while (inside.load() < 2) {
      if (seconds_since(begin) > 30) return PTO_TASK_FAILED;
      std::this_thread::yield();
    }
    return PTO_OK;
  });
  const pto_region left{.offset = 0, .ndim = 2, .size = {2, 8}, .stride = {16, 1}};
  const pto_region right{.offset = 8, .ndim = 2, .size = {2, 8}, .stride = {16, 1}};
  const pto_region empty{.offset = 0, .ndim = 2, .size = {0, 32}, .stride = {32, 1}};
  runtime.submit(meet, {inout(h, &left)});
  runtime.submit(meet, {inout(h, &right)});
  EXPECT_EQ(pto_wait_all(runtime, 60), 0);
  inside = 0;
  runtime.submit(meet, {inout(h)});
  runtime.submit(meet, {inout(h, &empty)});
  EXPECT_EQ(pto_wait_all(runtime, 60), 0);
}

CASE("pitfall 3.7: an access that overlaps hundreds of earlier writers waits for all of them") {
  Runtime runtime(2);
  std::vector<int64_t> x(500, 0);
  int64_t sum = 0;
  const pto_handle h = runtime.add(x), hs = runtime.add(sum);
  const pto_kernel slow = runtime.kernel("slow", [](void* const* buffers, const uint64_t*) -> int {
    std::this_thread::yield();
    value_of(buffers[0]) = 1;
    return PTO_OK;
  });
  const pto_kernel total = runtime.kernel("total", [](void* const* buffers, const uint64_t*) -> int {
    for (int i = 0; i < 500; ++i) value_of(buffers[1]) += static_cast<int64_t*>(buffers[0])[i];
    return PTO_OK;
  });
  for (uint64_t i = 0; i < 500; ++i) {
    const pto_region box{.offset = i * 8, .ndim = 1, .size = {8}, .stride = {1}};
    runtime.submit(slow, {out(h, &box)});
  }
  EXPECT_EQ(pto_wait(runtime, runtime.submit(total, {in(h), inout(hs)}), 30), 0);
  EXPECT_EQ(sum, 500);
}

CASE("pitfall 3.8: a deadline ends a wait even when nothing else happens") {
  Runtime runtime(1);
  const pto_event never = pto_event_open(runtime);
  const pto_task task = runtime.submit(PTO_NO_KERNEL, {}, {.waits = {{never, 1}}});
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(pto_wait(runtime, task, 0.1), PTO_TIMEOUT);
  EXPECT(seconds_since(begin) >= 0.1 && seconds_since(begin) < 5);
  pto_event_post(runtime, never, 1);
  EXPECT_EQ(pto_wait_all(runtime, 30), 0);
}

CASE("pitfall 3.9: write after read: a writer waits for plain readers, which run in parallel") {
  Runtime runtime(2);
  int64_t x = 1;
  std::vector<int64_t> seen(16, 0);
  const pto_handle h = runtime.add(x);
  const pto_kernel slow_copy = runtime.kernel("slow", [](void* const* buffers, const uint64_t*) -> int {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    value_of(buffers[0]) = value_of(buffers[1]);
    return PTO_OK;
  });
  for (auto& value : seen) runtime.submit(slow_copy, {out(runtime.add(value)), in(h)});
  runtime.submit(runtime.kernel("set", set_kernel), {out(h)}, {.scalars = {2}});
  EXPECT_EQ(pto_wait_all(runtime, 30), 0);
  for (const int64_t value : seen) EXPECT_EQ(value, 1);
  EXPECT_EQ(x, 2);
}

TILEWISE_TEST_MAIN
