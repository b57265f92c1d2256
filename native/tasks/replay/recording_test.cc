// Record and replay: a replay has the effect of submitting again, with other buffers, in any interleaving.
#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

struct Kernels {
  explicit Kernels(Runtime& runtime)
      : set(runtime.kernel("set", set_kernel)),
        add(runtime.kernel("add", add_kernel)),
        step(runtime.kernel("step", step_kernel)),
        copy(runtime.kernel("copy", copy_kernel)) {}
  pto_kernel set, add, step, copy;
};

/// y = 3 y + 1; x += y; y += x through a runtime-owned buffer.
void submit_body(Runtime& runtime, const Kernels& k, pto_handle x, pto_handle y) {
  pto_scope_begin(runtime);
  runtime.submit(k.step, {inout(y)}, {.scalars = {1}});
  const pto_handle sum = runtime.make(k.copy, 8, {in(y)});
  runtime.submit(k.add, {inout(x), in(sum)});
  runtime.submit(k.add, {inout(sum), in(x)});
  runtime.submit(k.add, {inout(y), in(sum)});
  EXPECT_EQ(pto_scope_end(runtime), 0);
}
void body(int64_t& x, int64_t& y) {
  y = static_cast<int64_t>(static_cast<uint64_t>(y) * 3 + 1);
  const uint64_t sum = static_cast<uint64_t>(y);
  x = static_cast<int64_t>(static_cast<uint64_t>(x) + sum);
  y = static_cast<int64_t>(static_cast<uint64_t>(y) + sum + static_cast<uint64_t>(x));
}

}  // namespace

CASE("a replay equals submitting again: same buffers, other buffers, back to back without waiting") {
  for (const uint32_t workers : {0u, 1u, 3u}) {
    Runtime runtime(workers, 64);
    const Kernels k(runtime);
    int64_t x[3] = {1, 2, 3}, y[3] = {4, 5, 6};
    int64_t ox[3] = {1, 2, 3}, oy[3] = {4, 5, 6};
    pto_handle hx[3], hy[3];
    for (int i = 0; i < 3; ++i) {
      hx[i] = runtime.add(x[i]);
      hy[i] = runtime.add(y[i]);
    }
    EXPECT_EQ(pto_record_begin(runtime), 0);
    EXPECT_EQ(pto_record_begin(runtime), PTO_BAD_ARGUMENT);
    submit_body(runtime, k, hx[0], hy[0]);
    body(ox[0], oy[0]);
    const pto_recording recording = pto_record_end(runtime);
    EXPECT(recording != 0);
    for (int round = 0; round < 300; ++round) {
      const int i = round * 7 % 5 % 3;
      const pto_handle from[] = {hx[0], hy[0]};
      const pto_handle to[] = {hx[i], hy[i]};
      pto_scope_begin(runtime);
      EXPECT_EQ(pto_replay(runtime, recording, from, to, 2), 0);
      EXPECT_EQ(pto_scope_end(runtime), 0);
      body(ox[i], oy[i]);
      if (round % 3 == 0) {  // live tasks before and after replays
        runtime.submit(k.step, {inout(hx[i])}, {.scalars = {9}});
        ox[i] = static_cast<int64_t>(static_cast<uint64_t>(ox[i]) * 3 + 9);
      }
      if (round % 5 == 0) {
        runtime.submit(k.add, {inout(hy[1]), in(hx[2])});
        oy[1] = static_cast<int64_t>(static_cast<uint64_t>(oy[1]) + static_cast<uint64_t>(ox[2]));
      }
    }
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(x[i], ox[i]);
      EXPECT_EQ(y[i], oy[i]);
    }
    EXPECT_EQ(pto_recording_free(runtime, recording), 0);
    EXPECT_EQ(pto_recording_free(runtime, recording), PTO_BAD_ARGUMENT);
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), PTO_BAD_ARGUMENT);
  }
}

CASE("a recording larger than the window streams through it") {
  for (const uint32_t workers : {0u, 2u}) {
    Runtime runtime(workers, 8);
    const Kernels k(runtime);
    std::vector<int64_t> values(5, 1);
    std::vector<int64_t> oracle(5, 1);
    std::vector<pto_handle> handles;
    for (auto& value : values) handles.push_back(runtime.add(value));
    const auto pass = [&](bool submits) {
      for (uint64_t t = 0; t < 300; ++t) {
        const size_t a = t * 3 % 5, b = (t * 3 + 1 + t % 4) % 5;
        if (a == b) continue;
        if (submits) runtime.submit(k.add, {inout(handles[a]), in(handles[b])});
        oracle[a] = static_cast<int64_t>(static_cast<uint64_t>(oracle[a]) + static_cast<uint64_t>(oracle[b]));
      }
    };
    EXPECT_EQ(pto_record_begin(runtime), 0);
    pass(true);
    const pto_recording recording = pto_record_end(runtime);
    for (int round = 0; round < 10; ++round) {
      EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
      pass(false);
    }
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT(values == oracle);
  }
}

CASE("rebinding is checked: aliasing, sizes, unknown and stale buffers") {
  Runtime runtime;
  const Kernels k(runtime);
  int64_t x = 0, y = 0;
  std::vector<int64_t> large(4, 0);
  const pto_handle hx = runtime.add(x), hy = runtime.add(y), hl = runtime.add(large);
  const pto_handle inside = pto_register(runtime, &large[1], 8);
  const pto_handle overlapping = pto_register(runtime, reinterpret_cast<char*>(&large[1]) + 4, 8);
  pto_record_begin(runtime);
  runtime.submit(k.add, {inout(hx), in(hy)});
  const pto_recording recording = pto_record_end(runtime);
  const pto_handle from[] = {hx, hy};
  const pto_handle same[] = {hx, hx};
  EXPECT_EQ(pto_replay(runtime, recording, from, same, 2), PTO_BAD_ARGUMENT);
  EXPECT(has(pto_last_error(), "apart"));
  const pto_handle alias[] = {inside, overlapping};
  EXPECT_EQ(pto_replay(runtime, recording, from, alias, 2), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_replay(runtime, recording, from, &hl, 1), PTO_BAD_ARGUMENT);
  EXPECT(has(pto_last_error(), "size"));
  EXPECT_EQ(pto_replay(runtime, recording, &hl, &hl, 1), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_replay(runtime, recording, from, &inside, 1), 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(pto_unregister(runtime, hy, PTO_FOREVER), 0);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), PTO_BAD_ARGUMENT);
  EXPECT_EQ(pto_record_end(runtime), pto_recording{0});
}

CASE("a runtime-owned buffer from before the recording is the same one in every replay") {
  Runtime runtime;
  const Kernels k(runtime);
  std::vector<pto_param> params{fresh(8)};
  runtime.submit(k.set, params, {.scalars = {5}});  // params[0] keeps its `bytes`
  pto_record_begin(runtime);
  runtime.submit(k.set, params, {.scalars = {6}});
  const pto_recording recording = pto_record_end(runtime);
  runtime.submit(k.set, {out(params[0].handle)}, {.scalars = {1}});
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  const auto* seen = static_cast<const int64_t*>(pto_read(runtime, params[0].handle, nullptr, PTO_FOREVER));
  EXPECT(seen != nullptr && *seen == 6);
}

CASE("commuting tasks stay exclusive in replays, on registered and on runtime-owned buffers") {
  Runtime runtime(4);
  const pto_kernel body = runtime.kernel("body", [](void* const* buffers, const uint64_t*) -> int {
    const int64_t before = value_of(buffers[0]);
    std::this_thread::yield();
    value_of(buffers[0]) = before + 1;  // overlapping tasks would lose an addition
    return PTO_OK;
  });
  const Kernels k(runtime);
  int64_t x = 0, seen = 0;
  const pto_handle hx = runtime.add(x), hs = runtime.add(seen);
  for (const bool owned : {false, true}) {
    pto_record_begin(runtime);
    pto_scope_begin(runtime);
    const pto_handle h = owned ? runtime.make(k.set, 8, {}, {.scalars = {0}}) : hx;
    for (int t = 0; t < 40; ++t) runtime.submit(body, {commute(h)});
    runtime.submit(k.copy, {out(hs), in(h)});
    pto_scope_end(runtime);
    const pto_recording recording = pto_record_end(runtime);
    for (int round = 0; round < 20; ++round) {
      pto_scope_begin(runtime);
      EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
      pto_scope_end(runtime);
    }
    EXPECT(pto_read(runtime, hs, nullptr, PTO_FOREVER) != nullptr);
    EXPECT_EQ(seen, owned ? 40 : 21 * 40);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  }
}

CASE("commuting tasks on a buffer that every replay allocates do not affect other tasks' mutexes") {
  Runtime runtime(2, 4);
  Gate gate;
  const pto_kernel gated = runtime.kernel("gated", Gate::kernel);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  EXPECT_EQ(pto_record_begin(runtime), 0);
  pto_scope_begin(runtime);
  const pto_handle made = runtime.make(PTO_NO_KERNEL, 64);
  EXPECT(runtime.submit(PTO_NO_KERNEL, {commute(made)}) != 0);
  EXPECT_EQ(pto_scope_end(runtime), 0);
  const pto_recording recording = pto_record_end(runtime);
  EXPECT(recording != 0);
  for (int n = 0; n < 8; ++n) {  // every slot has had a task with the mutex of h
    EXPECT(runtime.submit(PTO_NO_KERNEL, {commute(h)}) != 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  }
  const std::vector<uint64_t> of_gate{reinterpret_cast<uint64_t>(&gate)};
  for (int n = 0; n < 2; ++n) EXPECT(runtime.submit(gated, {commute(h)}, {.scalars = of_gate}) != 0);
  gate.await_inside(1);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(gate.num_inside.load(), 1);  // the second still waits for the first
  gate.open();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(gate.num_inside.load(), 2);
}

CASE("boxes: disjoint ones stay parallel, overlapping ones ordered, also against live tasks") {
  Runtime runtime(2, 64);
  std::vector<uint64_t> data(64, 1), oracle(64, 1);
  const pto_handle h = runtime.add(data);
  static const pto_region boxes[4] = {{.offset = 0, .ndim = 2, .size = {4, 32}, .stride = {64, 1}},
                                      {.offset = 32, .ndim = 2, .size = {4, 32}, .stride = {64, 1}},
                                      {.offset = 128, .ndim = 2, .size = {4, 48}, .stride = {64, 1}},
                                      {.offset = 264, .ndim = 1, .size = {240}, .stride = {1}}};
  const auto touch = [](uint64_t* words, uint64_t box, uint64_t factor) {
    const pto_region& r = boxes[box];
    const uint64_t rows = r.ndim == 2 ? r.size[0] : 1;
    const uint64_t columns = (r.ndim == 2 ? r.size[1] : r.size[0]) / 8;
    for (uint64_t i = 0; i < rows; ++i) {
      for (uint64_t j = 0; j < columns; ++j) words[i * 8 + j] = words[i * 8 + j] * factor + j + i;
    }
  };
  static const auto the_touch = touch;
  const pto_kernel kernel = runtime.kernel("touch", [](void* const* buffers, const uint64_t* scalars) -> int {
    the_touch(static_cast<uint64_t*>(buffers[0]), scalars[0], scalars[1]);
    return PTO_OK;
  });
  const auto pass = [&](bool submits, uint64_t factor) {
    for (const uint64_t b : {0, 1, 2, 3, 1, 2, 0}) {
      if (submits) runtime.submit(kernel, {inout(h, &boxes[b])}, {.scalars = {b, factor}});
      touch(oracle.data() + boxes[b].offset / 8, b, factor);
    }
  };
  pto_record_begin(runtime);
  pass(true, 3);
  const pto_recording recording = pto_record_end(runtime);
  for (int round = 0; round < 200; ++round) {
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
    pass(false, 3);
    if (round % 3 == 0) pass(true, 5);
  }
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT(data == oracle);
}

CASE("event values are relative to the beginning of the recording and of each replay") {
  Runtime runtime(1);
  const Kernels k(runtime);
  const pto_event event = pto_event_open(runtime);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  pto_event_post(runtime, event, 10);
  pto_record_begin(runtime);
  runtime.submit(k.step, {inout(h)}, {.scalars = {1}, .waits = {{event, 12}}});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, 0.01), PTO_TIMEOUT);
  pto_event_post(runtime, event, 2);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  EXPECT_EQ(pto_wait_all(runtime, 0.01), PTO_TIMEOUT);
  pto_event_post(runtime, event, 1);
  EXPECT_EQ(pto_wait_all(runtime, 0.01), PTO_TIMEOUT);
  pto_event_post(runtime, event, 1);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(x, 4);
}

CASE("readers, reductions, predicates, priorities and explicit edges survive a replay") {
  Runtime runtime(3);
  const Kernels k(runtime);
  const pto_kernel sum = pto_kernel_find(runtime, "sum_i64");
  int64_t total = 0, x = 1, flag = 0, skipped = 0;
  const pto_handle ht = runtime.add(total), hx = runtime.add(x), hf = runtime.add(flag), hs = runtime.add(skipped);
  pto_record_begin(runtime);
  pto_scope_begin(runtime);
  for (uint64_t t = 0; t < 10; ++t) {
    runtime.submit(k.copy, {reduce(ht, sum), in(hx)}, {.priority = static_cast<int32_t>(t % 3)});
  }
  const pto_task stepped = runtime.submit(k.step, {inout(hx)}, {.scalars = {1}});
  runtime.submit(k.set, {out(hs)}, {.scalars = {5}, .after = {stepped}, .predicate = hf});
  pto_scope_end(runtime);
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(total, 10);
  EXPECT_EQ(skipped, 0);
  flag = 1;
  pto_scope_begin(runtime);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  pto_scope_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(total, 50);
  EXPECT_EQ(x, 13);
  EXPECT_EQ(skipped, 5);
}

CASE("a failure inside one replay poisons the next until it is overwritten") {
  Runtime runtime(1);
  const Kernels k(runtime);
  static std::atomic<bool> fails;
  fails = false;
  const pto_kernel maybe = runtime.kernel("maybe", [](void* const* buffers, const uint64_t*) -> int {
    ++value_of(buffers[0]);
    return fails ? PTO_TASK_FAILED : PTO_OK;
  });
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  pto_record_begin(runtime);
  runtime.submit(maybe, {inout(h)});
  const pto_recording recording = pto_record_end(runtime);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  fails = true;
  pto_replay(runtime, recording, nullptr, nullptr, 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  fails = false;
  pto_replay(runtime, recording, nullptr, nullptr, 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  EXPECT_EQ(x, 2);
  runtime.submit(k.set, {out(h)}, {.scalars = {10}});
  pto_replay(runtime, recording, nullptr, nullptr, 0);
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  EXPECT_EQ(x, 11);
}

CASE("a replay that is interrupted half way: its submitted tasks are still waited for") {
  static std::atomic<bool> interrupts;
  interrupts = false;
  pto_set_hooks(nullptr, nullptr, [] { return interrupts ? 1 : 0; });
  for (const bool has_boxes : {false, true}) {
    Runtime runtime(1, 8);
    const Kernels k(runtime);
    const pto_kernel gated = runtime.kernel("gated", Gate::kernel);
    const pto_kernel slow_step = runtime.kernel("slow_step", [](void* const* buffers, const uint64_t*) -> int {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that a missing wait is noticed
      ++value_of(buffers[0]);
      return PTO_OK;
    });
    int64_t x = 0, copy = 0;
    const pto_handle hx = runtime.add(x), hc = runtime.add(copy);
    const pto_region whole{.offset = 0, .ndim = 1, .size = {8}, .stride = {1}};
    Gate gate;
    gate.open();
    pto_record_begin(runtime);
    runtime.submit(gated, {commute(hx)}, {.scalars = {scalar(&gate)}});
    for (int t = 0; t < 30; ++t) runtime.submit(slow_step, {inout(hx, has_boxes ? &whole : nullptr)});
    const pto_recording recording = pto_record_end(runtime);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    x = 0;
    gate.is_open = gate.num_inside = 0;
    const pto_task blocker = runtime.submit(gated, {inout(hx)}, {.scalars = {scalar(&gate)}});
    EXPECT(blocker != 0);
    gate.await_inside(1);  // the worker runs it: this thread has nothing to run
    interrupts = true;
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), PTO_INTERRUPTED);
    interrupts = false;
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      gate.open();
    });
    const pto_task reader = runtime.submit(k.copy, {out(hc), in(hx)});
    EXPECT_EQ(pto_wait(runtime, reader, PTO_FOREVER), 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT(x > 0);
    EXPECT_EQ(copy, x);
    opener.join();
  }
  pto_set_hooks(nullptr, nullptr, nullptr);
}

TILEWISE_TEST_MAIN
