// Full tables. References to ended tasks are reclaimed. If those to live ones do not fit, submissions and replays are
// rejected, and no order is lost. With too many buffers, the error names the full table.
#include <random>

#include "tasks/api/inside.h"
#include "tasks/engine/handles.h"
#include "tasks/open.h"
#include "tasks/replay/recordings.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/submit/buffers.h"
#include "tasks/submit/submit.h"
#include "tasks/tests/testing_runtime.h"
#include "tasks/wait/wait.h"
#include "tilewise/pto.hpp"

using namespace tilewise::tasks::testing;
using tilewise::tasks::Engine;
using tilewise::tasks::StatusError;

namespace {

pto_param param(pto_mode mode, pto_handle handle) { return {mode, 0, handle, {0}, nullptr, nullptr}; }

pto_task submit_to(Engine& engine, pto_kernel kernel, std::vector<pto_param> params, std::vector<uint64_t> scalars = {},
                   pto_handle predicate = 0) {
  pto_task_spec spec{};
  spec.kernel = kernel;
  spec.worker_type = PTO_VECTOR;
  spec.params = params.data();
  spec.num_params = static_cast<uint32_t>(params.size());
  spec.scalars = scalars.data();
  spec.num_scalars = static_cast<uint32_t>(scalars.size());
  spec.predicate = predicate;
  return submit(engine, spec);
}

/// One worker, and room for 168 references.
tilewise::tasks::OpenEngine small_engine() {
  tilewise::tasks::Options options;
  options.window = 512;
  options.max_chunks = 24;
  std::fill_n(options.worker_types, 1, uint8_t{0xF});
  return tilewise::tasks::open_engine(options);
}

template <class Body>
int status_of(Body&& body) {
  try {
    body();
  } catch (const StatusError& error) {
    return error.status;
  }
  return PTO_OK;
}

}  // namespace

CASE("more live edges than fit in the tables: the task is rejected, and accepted ones keep their order") {
  for (const bool is_plain : {false, true}) {
    const auto engine = small_engine();
    Gate gate;
    const pto_kernel gated = engine->kernels.add("gated", Gate::kernel, 0);
    const pto_kernel add = engine->kernels.add("add", add_kernel, 0);
    const pto_kernel copy = engine->kernels.add("copy", copy_kernel, 0);
    int64_t x = 1, sum = 0, seen = -1, always = 1;
    const pto_handle hx = register_buffer(*engine, &x, 8), hsum = register_buffer(*engine, &sum, 8);
    const pto_handle hseen = register_buffer(*engine, &seen, 8), halways = register_buffer(*engine, &always, 8);
    const auto submit = [&](pto_kernel kernel, std::vector<pto_param> params, std::vector<uint64_t> scalars) {
      // With the predicate the task is not plain and takes the general path.
      return submit_to(*engine, kernel, std::move(params), std::move(scalars), is_plain ? 0 : halways);
    };
    submit(gated, {param(PTO_INOUT, hx)}, {reinterpret_cast<uint64_t>(&gate)});
    gate.await_inside(1);
    // A chain on `sum` of readers of x. At one of them references run out, after the state of `sum` names it.
    int64_t accepted = 0;
    bool is_refused = false;
    while (accepted < 400 && !is_refused) {
      try {
        submit(add, {param(PTO_INOUT, hsum), param(PTO_INPUT, hx)}, {});
        ++accepted;
      } catch (const StatusError& error) {
        is_refused = true;
        EXPECT_EQ(error.status, PTO_NO_MEMORY);
      }
    }
    EXPECT(is_refused && accepted > 20);
    // Without the predicate, which would need another reference.
    const pto_task behind = submit_to(*engine, copy, {param(PTO_OUTPUT, hseen), param(PTO_INPUT, hsum)});
    EXPECT_EQ(wait(*engine, behind, 0.01, true), PTO_TIMEOUT);  // waits for all accepted tasks
    gate.open();
    EXPECT_EQ(wait_all(*engine, 30, false), PTO_OK);
    EXPECT_EQ(seen, accepted);
    EXPECT_EQ(sum, accepted);
    tilewise::tasks::close_engine(*engine);
  }
}

CASE("no references left for a task's producers: it is rejected, its slot is free again, and waiting ends") {
  for (const bool is_plain : {false, true}) {
    const auto engine = small_engine();
    Gate gate;
    const pto_kernel gated = engine->kernels.add("gated", Gate::kernel, 0);
    const auto of_gate = reinterpret_cast<uint64_t>(&gate);
    int64_t always = 1;
    const pto_handle halways = register_buffer(*engine, &always, 8);
    std::vector<int64_t> cells(20 * 24);
    std::vector<pto_handle> handles;
    for (int64_t& cell : cells) handles.push_back(register_buffer(*engine, &cell, 8));
    const auto submit = [&](std::vector<pto_param> params) {
      return submit_to(*engine, gated, std::move(params), {of_gate}, is_plain ? 0 : halways);
    };
    const int status = status_of([&] {
      for (size_t set = 0; set < 20; ++set) {
        std::vector<pto_param> reads;
        for (size_t i = set * 24; i < set * 24 + 24; ++i) {
          submit({param(PTO_INOUT, handles[i])});
          reads.push_back(param(PTO_INPUT, handles[i]));
        }
        submit(reads);  // waits for 24 live producers
        submit(reads);
      }
    });
    EXPECT_EQ(status, int{PTO_NO_MEMORY});
    gate.open();
    EXPECT_EQ(wait_all(*engine, 20, false), int{PTO_OK});
  }
}

CASE("three readers of a buffer, and a writer that collects its producers twice, need no references") {
  const auto engine = small_engine();
  Gate gate;
  const pto_kernel gated = engine->kernels.add("gated", Gate::kernel, 0);
  const auto of_gate = reinterpret_cast<uint64_t>(&gate);
  constexpr size_t kPoints = 4;
  int64_t cells[2 * kPoints] = {};
  std::vector<pto_handle> handles;
  for (int64_t& cell : cells) handles.push_back(register_buffer(*engine, &cell, 8));
  for (size_t step = 0; step < 20; ++step) {  // a stencil whose tasks cannot end yet
    const pto_handle* const to = &handles[step % 2 * kPoints];
    const pto_handle* const from = &handles[(step + 1) % 2 * kPoints];
    for (size_t point = 0; point < kPoints; ++point) {
      std::vector<pto_param> params = {param(PTO_OUTPUT, to[point]), param(PTO_INPUT, from[point])};
      if (point > 0) params.push_back(param(PTO_INPUT, from[point - 1]));
      if (point + 1 < kPoints) params.push_back(param(PTO_INPUT, from[point + 1]));
      submit_to(*engine, gated, params, {of_gate});
    }
  }
  EXPECT_EQ(engine->store.header->pools.fresh_chunks, 0u);
  gate.open();
  EXPECT_EQ(wait_all(*engine, 20, false), int{PTO_OK});
}

CASE("a buffer is unregistered while its task waits for the submission lock: the task is rejected, its slot freed") {
  const auto engine = small_engine();
  const pto_kernel add = engine->kernels.add("add", add_kernel, 0);
  int64_t x = 0;
  const pto_handle hx = register_buffer(*engine, &x, 8);
  tilewise::tasks::Handle& buffer = tilewise::tasks::resolve(*engine, hx, "test");
  tilewise::tasks::Header& header = *engine->store.header;
  int status = PTO_OK;
  std::atomic<int> stage{0};
  std::thread submitter([&] {
    submit_to(*engine, add, {param(PTO_INOUT, hx), param(PTO_INPUT, hx)});  // now it has a submission context
    stage.store(1);
    while (stage.load() != 2) std::this_thread::yield();
    status = status_of([&] { submit_to(*engine, add, {param(PTO_INOUT, hx), param(PTO_INPUT, hx)}); });
  });
  while (stage.load() != 1) std::this_thread::yield();
  {
    const tilewise::tasks::SubmitGuard guard(header, header.num_workers + 2, engine->fences);
    stage.store(2);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it has checked the buffer
    buffer.flags = 0;                                            // as unregister() leaves it
  }
  submitter.join();
  EXPECT(status != PTO_OK);
  EXPECT_EQ(wait_all(*engine, 5, false), int{PTO_OK});
  buffer.flags = tilewise::tasks::kUsed;
}

CASE("a replay that is rejected half way, without references to record it, has waited for its submitted tasks") {
  const auto engine = small_engine();
  Gate held_back, before;
  held_back.open();
  const pto_kernel gated = engine->kernels.add("gated", Gate::kernel, 0);
  int64_t x = 0, z = 0;
  const pto_handle hx = register_buffer(*engine, &x, 8), hz = register_buffer(*engine, &z, 8);
  recordings_of(*engine).begin();
  for (int t = 0; t < 200; ++t) {  // readers; PTO_NO_DEP prevents an instantiated graph
    submit_to(*engine, gated, {param(PTO_INPUT, hx), param(PTO_NO_DEP, hz)}, {scalar(&held_back)});
    if (t % 8 == 7) wait_all(*engine, 30, false);
  }
  submit_to(*engine, PTO_NO_KERNEL, {param(PTO_INOUT, hx)});  // waits for more tasks than there are references
  const pto_recording recording = recordings_of(*engine).end();
  EXPECT_EQ(wait_all(*engine, 30, false), PTO_OK);
  held_back.is_open = held_back.num_inside = 0;
  submit_to(*engine, gated, {param(PTO_INOUT, hx)}, {scalar(&before)});
  before.await_inside(1);
  const auto num_submitted = [&] {
    pto_stats stats{};
    tilewise::tasks::stats(*engine, &stats);
    return stats.num_submitted;
  };
  const uint64_t earlier = num_submitted();
  std::thread opener([&] {
    while (num_submitted() < earlier + 200)
      std::this_thread::yield();  // they are counted when the last one is rejected
    before.open();
    held_back.await_inside(1);
    held_back.open();
  });
  EXPECT_EQ(status_of([&] { recordings_of(*engine).replay(recording, nullptr, nullptr, 0); }), PTO_NO_MEMORY);
  EXPECT_EQ(held_back.num_inside.load(), 200);
  opener.join();
  EXPECT_EQ(wait_all(*engine, 30, false), PTO_OK);
  tilewise::tasks::close_engine(*engine);
}

CASE("a replay that could not begin leaves no failure") {
  const auto engine = small_engine();
  Gate gate;
  const pto_kernel gated = engine->kernels.add("gated", Gate::kernel, 0),
                   set = engine->kernels.add("set", set_kernel, 0);
  const pto_kernel fails = engine->kernels.add("fails", fail_kernel, 0);
  const pto_kernel step = engine->kernels.add("step", step_kernel, 0);
  int64_t x = 0, z = 0;
  const pto_handle hx = register_buffer(*engine, &x, 8), hz = register_buffer(*engine, &z, 8);
  recordings_of(*engine).begin();
  submit_to(*engine, step, {param(PTO_INOUT, hx)}, {1});
  submit_to(*engine, set, {param(PTO_OUTPUT, hz)}, {1});
  const pto_recording recording = recordings_of(*engine).end();
  EXPECT_EQ(wait_all(*engine, 30, false), PTO_OK);
  submit_to(*engine, gated, {param(PTO_INOUT, hz)}, {scalar(&gate)});
  gate.await_inside(1);
  for (int t = 0; t < 100; ++t) submit_to(*engine, PTO_NO_KERNEL, {param(PTO_INPUT, hz)});
  wait(*engine, submit_to(*engine, fails, {param(PTO_INOUT, hx)}), PTO_FOREVER, true);
  EXPECT_EQ(status_of([&] { recordings_of(*engine).replay(recording, nullptr, nullptr, 0); }), PTO_NO_MEMORY);
  gate.open();
  EXPECT_EQ(status_of([&] { wait_all(*engine, 30, false); }), PTO_TASK_FAILED);
  submit_to(*engine, set, {param(PTO_OUTPUT, hx)}, {5});
  submit_to(*engine, set, {param(PTO_OUTPUT, hz)}, {5});
  EXPECT_EQ(wait_all(*engine, 30, false), PTO_OK);
  recordings_of(*engine).replay(recording, nullptr, nullptr, 0);
  EXPECT_EQ(status_of([&] { wait_all(*engine, 30, false); }), PTO_OK);
  EXPECT_EQ(x, 16);
  tilewise::tasks::close_engine(*engine);
}

namespace {

/// One thread's random program of readers and writers on its own buffers. Each task checks that its buffer has the last
/// writer's value.
struct ReadersAndWriters {
  Engine& engine;
  pto_kernel check;
  std::atomic<int>& num_wrong;
  uint64_t seed;

  static int kernel(void* const* buffers, const uint64_t* scalars) {
    int64_t* const halves = static_cast<int64_t*>(buffers[0]);
    if (halves[0] != static_cast<int64_t>(scalars[0])) pointer<std::atomic<int>>(scalars[2])->fetch_add(1);
    if (scalars[1] != scalars[0]) halves[0] = static_cast<int64_t>(scalars[1]);  // a writer
    const uint64_t microseconds = 2;  // longer than a submission, so that readers of one buffer pile up
    return busy_kernel(nullptr, &microseconds);
  }

  /// Half of the buffers are used by boxes of 8 bytes, which have separate states.
  void run(int num_tasks) {
    std::mt19937_64 random(seed);
    std::vector<std::array<int64_t, 2>> memory(300);
    std::vector<std::array<uint64_t, 2>> expected(memory.size());
    std::vector<pto_handle> handles;
    for (auto& buffer : memory) handles.push_back(register_buffer(engine, buffer.data(), 16));
    size_t at = 0;
    for (int t = 0; t < num_tasks; ++t) {
      if (random() % 32 == 0) at = random() % memory.size();  // usually the buffer of the previous task
      const size_t half = at % 2 == 0 ? 0 : random() % 2;
      const pto_region box = {8 * half, 1, {8}, {1}};
      pto_param access = param(PTO_INPUT, handles[at]);
      if (at % 2 != 0) access.region = &box;
      const uint64_t before = expected[at][half];
      const uint64_t kind = random() % 32;
      if (kind < 2) access.mode = PTO_INOUT;
      const uint64_t after = kind < 2 ? before + 1 : before;
      expected[at][half] = after;
      submit_to(engine, check, {access}, {before, after, scalar(&num_wrong)});
      if (random() % 64 == 0) wait_all(engine, PTO_FOREVER, true);
    }
    EXPECT_EQ(wait_all(engine, 60, false), int{PTO_OK});
    for (const pto_handle handle : handles) unregister(engine, handle, PTO_FOREVER, true);
  }
};

/// A task that reads many of its own buffers many times.
struct Nested {
  Engine* engine;
  pto_kernel empty;

  static int kernel(void* const*, const uint64_t* scalars) {
    const Nested& self = *pointer<Nested>(scalars[0]);
    return status_of([&] {
      begin_scope(*self.engine);
      for (int b = 0; b < 120; ++b) {
        const pto_handle own = allocate(*self.engine, 8);
        for (int r = 0; r < 20; ++r) submit_to(*self.engine, self.empty, {param(PTO_INPUT, own)});
        wait_all(*self.engine, PTO_FOREVER, true);
      }
      end_scope(*self.engine);
    });
  }
};

}  // namespace

CASE("references to ended tasks are reclaimed, on several threads, for whole buffers, boxes and nested tasks") {
  for (const int num_submitters : {1, 3}) {
    tilewise::tasks::Options options;
    options.window = 64;
    options.num_workers = 2;
    options.max_submitters = 4;
    options.max_chunks = 600;  // the buffers' readers would need some thousand
    std::fill_n(options.worker_types, 2, uint8_t{0xF});
    const auto engine = tilewise::tasks::open_engine(options);
    std::atomic<int> num_wrong{0};
    const pto_kernel check = engine->kernels.add("check", ReadersAndWriters::kernel, 0);
    Nested nested{engine.get(), engine->kernels.add("empty", empty_kernel, 0)};
    const pto_kernel nests = engine->kernels.add("nests", Nested::kernel, PTO_SUBMITS);
    std::vector<std::thread> threads;
    for (int l = 0; l < num_submitters; ++l) {
      threads.emplace_back([&, l] {
        ReadersAndWriters{*engine, check, num_wrong, uint64_t(l)}.run(20'000 / kSlowdown);
        int64_t declared = 0;
        const pto_handle buffer = register_buffer(*engine, &declared, 8);
        submit_to(*engine, nests, {param(PTO_INOUT, buffer)}, {scalar(&nested)});
        EXPECT_EQ(wait_all(*engine, 60, false), int{PTO_OK});
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(num_wrong.load(), 0);
    tilewise::tasks::close_engine(*engine);
  }
}

CASE("a blocked LU factorisation of 16,384 tiles runs with the default options and has the same bits as loops") {
  namespace pto = tilewise::pto;
  constexpr size_t kBlock = 8, kTiles = kSlowdown == 1 ? 128 : 24, kWords = kBlock * kBlock;
  const auto factor = [](void* const* b, const uint64_t*) {
    auto* a = static_cast<double*>(b[0]);
    for (size_t k = 0; k < kBlock; ++k) {
      for (size_t i = k + 1; i < kBlock; ++i) {
        a[i * kBlock + k] /= a[k * kBlock + k];
        for (size_t j = k + 1; j < kBlock; ++j) a[i * kBlock + j] -= a[i * kBlock + k] * a[k * kBlock + j];
      }
    }
  };
  const auto solve_row = [](void* const* b, const uint64_t*) {  // x := L^-1 x
    auto* x = static_cast<double*>(b[0]);
    const auto* l = static_cast<const double*>(b[1]);
    for (size_t k = 0; k < kBlock; ++k) {
      for (size_t i = k + 1; i < kBlock; ++i) {
        for (size_t j = 0; j < kBlock; ++j) x[i * kBlock + j] -= l[i * kBlock + k] * x[k * kBlock + j];
      }
    }
  };
  const auto solve_column = [](void* const* b, const uint64_t*) {  // x := x U^-1
    auto* x = static_cast<double*>(b[0]);
    const auto* u = static_cast<const double*>(b[1]);
    for (size_t i = 0; i < kBlock; ++i) {
      for (size_t k = 0; k < kBlock; ++k) {
        x[i * kBlock + k] /= u[k * kBlock + k];
        for (size_t j = k + 1; j < kBlock; ++j) x[i * kBlock + j] -= x[i * kBlock + k] * u[k * kBlock + j];
      }
    }
  };
  const auto update = [](void* const* b, const uint64_t*) {
    auto* c = static_cast<double*>(b[0]);
    const auto *x = static_cast<const double*>(b[1]), *y = static_cast<const double*>(b[2]);
    for (size_t i = 0; i < kBlock; ++i) {
      for (size_t k = 0; k < kBlock; ++k) {
        for (size_t j = 0; j < kBlock; ++j) c[i * kBlock + j] -= x[i * kBlock + k] * y[k * kBlock + j];
      }
    }
  };
  std::mt19937_64 random(1);
  std::vector<double> tiles(kTiles * kTiles * kWords);
  for (double& value : tiles) value = static_cast<double>(random() % 1000) / 1000;
  for (size_t d = 0; d < kTiles * kBlock; ++d) {  // dominant, so that it needs no pivots
    const size_t tile = d / kBlock, in = d % kBlock;
    tiles[(tile * kTiles + tile) * kWords + in * kBlock + in] += kTiles * kBlock;
  }
  std::vector<double> expected = tiles;
  const auto sweep = [&](auto&& run) {  // run(kernel, tiles of its operands)
    for (size_t k = 0; k < kTiles; ++k) {
      run(0, {k * kTiles + k});
      for (size_t j = k + 1; j < kTiles; ++j) run(1, {k * kTiles + j, k * kTiles + k});
      for (size_t i = k + 1; i < kTiles; ++i) {
        run(2, {i * kTiles + k, k * kTiles + k});
        for (size_t j = k + 1; j < kTiles; ++j) run(3, {i * kTiles + j, i * kTiles + k, k * kTiles + j});
      }
    }
  };
  using Tiles = std::initializer_list<size_t>;
  sweep([&](int kernel, Tiles operands) {
    void* addresses[3];
    size_t p = 0;
    for (const size_t tile : operands) addresses[p++] = &expected[tile * kWords];
    kernel == 0   ? factor(addresses, nullptr)
    : kernel == 1 ? solve_row(addresses, nullptr)
    : kernel == 2 ? solve_column(addresses, nullptr)
                  : update(addresses, nullptr);
  });
  pto::Runtime runtime({.num_workers = 2});
  const auto named = std::array{runtime.kernel("factor", factor), runtime.kernel("solve_row", solve_row),
                                runtime.kernel("solve_column", solve_column), runtime.kernel("update", update)};
  std::vector<pto::Buffer> buffers;
  for (size_t tile = 0; tile < kTiles * kTiles; ++tile) {
    buffers.push_back(runtime.buffer(&tiles[tile * kWords], kWords * sizeof(double)));
  }
  sweep([&](int kernel, Tiles operands) {
    const size_t* tile = operands.begin();
    if (kernel == 0) return void(runtime.submit(named[0], {pto::inout(buffers[tile[0]])}));
    if (kernel < 3) {
      return void(runtime.submit(named[static_cast<size_t>(kernel)],
                                 {pto::inout(buffers[tile[0]]), pto::input(buffers[tile[1]])}));
    }
    runtime.submit(named[3],
                   {pto::inout(buffers[tile[0]]), pto::input(buffers[tile[1]]), pto::input(buffers[tile[2]])});
  });
  runtime.wait_all();
  EXPECT(tiles == expected);
}

CASE("more buffers than handles: the error names the full table and the option to increase") {
  pto_config config = Runtime::config(1);
  config.max_handles = 20;
  Runtime runtime(config);
  std::vector<int64_t> cells(20);
  for (int64_t& cell : cells) EXPECT(runtime.add(cell) != 0);
  EXPECT_EQ(runtime.add(cells), pto_handle{0});
  EXPECT(has(pto_last_error(), "20") && has(pto_last_error(), "increase max_handles"));
  EXPECT(!has(pto_last_error(), "depth 0"));
}

TILEWISE_TEST_MAIN
