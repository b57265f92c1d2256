// When the references between live tasks run out: submissions and replays are refused, and no order is lost.
#include "tasks/api/inside.h"
#include "tasks/engine/handles.h"
#include "tasks/open.h"
#include "tasks/replay/recordings.h"
#include "tasks/sched/submit_lock.h"
#include "tasks/submit/buffers.h"
#include "tasks/submit/submit.h"
#include "tasks/tests/testing_runtime.h"
#include "tasks/wait/wait.h"

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

CASE("more live edges than the tables hold: the task is refused, and those accepted keep their order") {
  for (const bool is_plain : {false, true}) {
    const auto engine = small_engine();
    Gate gate;
    const pto_kernel held = engine->kernels.add("held", Gate::kernel, 0);
    const pto_kernel add = engine->kernels.add("add", add_kernel, 0);
    const pto_kernel copy = engine->kernels.add("copy", copy_kernel, 0);
    int64_t x = 1, sum = 0, seen = -1, always = 1;
    const pto_handle hx = register_buffer(*engine, &x, 8), hsum = register_buffer(*engine, &sum, 8);
    const pto_handle hseen = register_buffer(*engine, &seen, 8), halways = register_buffer(*engine, &always, 8);
    const auto submit = [&](pto_kernel kernel, std::vector<pto_param> params, std::vector<uint64_t> scalars) {
      // The predicate makes it no plain task: it goes the general way.
      return submit_to(*engine, kernel, std::move(params), std::move(scalars), is_plain ? 0 : halways);
    };
    submit(held, {param(PTO_INOUT, hx)}, {reinterpret_cast<uint64_t>(&gate)});
    gate.await_inside(1);
    // A chain on `sum`, of readers of x: with one of them the references run out, after `sum` has been told of it.
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
    const pto_task behind = submit(copy, {param(PTO_OUTPUT, hseen), param(PTO_INPUT, hsum)}, {});
    EXPECT_EQ(wait(*engine, behind, 0.01, true), PTO_TIMEOUT);  // behind all that were accepted
    gate.open();
    EXPECT_EQ(wait_all(*engine, 30, false), PTO_OK);
    EXPECT_EQ(seen, accepted);
    EXPECT_EQ(sum, accepted);
    tilewise::tasks::close_engine(*engine);
  }
}

CASE("no references left for a task's producers: it is refused, its slot is free again, and waiting ends") {
  for (const bool is_plain : {false, true}) {
    const auto engine = small_engine();
    Gate gate;
    const pto_kernel held = engine->kernels.add("held", Gate::kernel, 0);
    const auto of_gate = reinterpret_cast<uint64_t>(&gate);
    int64_t always = 1;
    const pto_handle halways = register_buffer(*engine, &always, 8);
    std::vector<int64_t> cells(20 * 24);
    std::vector<pto_handle> handles;
    for (int64_t& cell : cells) handles.push_back(register_buffer(*engine, &cell, 8));
    const auto submit = [&](std::vector<pto_param> params) {
      return submit_to(*engine, held, std::move(params), {of_gate}, is_plain ? 0 : halways);
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

CASE("three readers of a buffer, and a writer that finds its producers twice, take nothing from the tables") {
  const auto engine = small_engine();
  Gate gate;
  const pto_kernel held = engine->kernels.add("held", Gate::kernel, 0);
  const auto of_gate = reinterpret_cast<uint64_t>(&gate);
  constexpr size_t kPoints = 4;
  int64_t cells[2 * kPoints] = {};
  std::vector<pto_handle> handles;
  for (int64_t& cell : cells) handles.push_back(register_buffer(*engine, &cell, 8));
  for (size_t step = 0; step < 20; ++step) {  // of a stencil, of which nothing can end yet
    const pto_handle* const to = &handles[step % 2 * kPoints];
    const pto_handle* const from = &handles[(step + 1) % 2 * kPoints];
    for (size_t point = 0; point < kPoints; ++point) {
      std::vector<pto_param> params = {param(PTO_OUTPUT, to[point]), param(PTO_INPUT, from[point])};
      if (point > 0) params.push_back(param(PTO_INPUT, from[point - 1]));
      if (point + 1 < kPoints) params.push_back(param(PTO_INPUT, from[point + 1]));
      submit_to(*engine, held, params, {of_gate});
    }
  }
  EXPECT_EQ(engine->store.header->pools.fresh_chunks, 0u);
  gate.open();
  EXPECT_EQ(wait_all(*engine, 20, false), int{PTO_OK});
}

CASE("a buffer goes while its task waits for the submission lock: the task is refused, and its slot is free again") {
  const auto engine = small_engine();
  const pto_kernel add = engine->kernels.add("add", add_kernel, 0);
  int64_t x = 0;
  const pto_handle hx = register_buffer(*engine, &x, 8);
  tilewise::tasks::Handle& buffer = tilewise::tasks::resolve(*engine, hx, "test");
  tilewise::tasks::Header& header = *engine->store.header;
  int status = PTO_OK;
  std::atomic<int> stage{0};
  std::thread submitter([&] {
    submit_to(*engine, add, {param(PTO_INOUT, hx), param(PTO_INPUT, hx)});  // now it has a lane
    stage.store(1);
    while (stage.load() != 2) std::this_thread::yield();
    status = status_of([&] { submit_to(*engine, add, {param(PTO_INOUT, hx), param(PTO_INPUT, hx)}); });
  });
  while (stage.load() != 1) std::this_thread::yield();
  {
    const tilewise::tasks::SubmitGuard guard(header, header.num_workers + 2, engine->fences);
    stage.store(2);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it has looked at the buffer
    buffer.flags = 0;                                            // as unregister() leaves it
  }
  submitter.join();
  EXPECT(status != PTO_OK);
  EXPECT_EQ(wait_all(*engine, 5, false), int{PTO_OK});
  buffer.flags = tilewise::tasks::kUsed;
}

CASE("a replay that is refused half way has ended what it had submitted, when nothing is left to write it down with") {
  const auto engine = small_engine();
  Gate held_back, before;
  held_back.open();
  const pto_kernel held = engine->kernels.add("held", Gate::kernel, 0);
  int64_t x = 0, z = 0;
  const pto_handle hx = register_buffer(*engine, &x, 8), hz = register_buffer(*engine, &z, 8);
  recordings_of(*engine).begin();
  for (int t = 0; t < 200; ++t) {  // readers; what is no dependency keeps them from being kept
    submit_to(*engine, held, {param(PTO_INPUT, hx), param(PTO_NO_DEP, hz)}, {scalar(&held_back)});
    if (t % 8 == 7) wait_all(*engine, 30, false);
  }
  submit_to(*engine, PTO_NO_KERNEL, {param(PTO_INOUT, hx)});  // behind more than there are references
  const pto_recording recording = recordings_of(*engine).end();
  EXPECT_EQ(wait_all(*engine, 30, false), PTO_OK);
  held_back.is_open = held_back.num_inside = 0;
  submit_to(*engine, held, {param(PTO_INOUT, hx)}, {scalar(&before)});
  before.await_inside(1);
  const auto num_submitted = [&] {
    pto_stats stats{};
    tilewise::tasks::stats(*engine, &stats);
    return stats.num_submitted;
  };
  const uint64_t earlier = num_submitted();
  std::thread opener([&] {
    while (num_submitted() < earlier + 200) std::this_thread::yield();  // they are counted when the last is refused
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

CASE("a round that could not begin leaves no failure behind") {
  const auto engine = small_engine();
  Gate gate;
  const pto_kernel held = engine->kernels.add("held", Gate::kernel, 0), set = engine->kernels.add("set", set_kernel, 0);
  const pto_kernel fails = engine->kernels.add("fails", fail_kernel, 0);
  const pto_kernel step = engine->kernels.add("step", step_kernel, 0);
  int64_t x = 0, z = 0;
  const pto_handle hx = register_buffer(*engine, &x, 8), hz = register_buffer(*engine, &z, 8);
  recordings_of(*engine).begin();
  submit_to(*engine, step, {param(PTO_INOUT, hx)}, {1});
  submit_to(*engine, set, {param(PTO_OUTPUT, hz)}, {1});
  const pto_recording recording = recordings_of(*engine).end();
  EXPECT_EQ(wait_all(*engine, 30, false), PTO_OK);
  submit_to(*engine, held, {param(PTO_INOUT, hz)}, {scalar(&gate)});
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

TILEWISE_TEST_MAIN
