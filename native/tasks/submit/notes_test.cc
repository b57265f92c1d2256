// Rare attributes of tasks: views of their parameters, names, deadlines, and the flag that asks a running kernel to
// stop.
#include <fstream>
#include <sstream>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

/// Sums two dimensions of floats into an int64 and checks what the view says. scalars: rows, columns, bytes of a row.
int sum_view(void* const* buffers, const uint64_t* scalars) {
  const auto& in = *static_cast<const pto_view*>(buffers[0]);
  const auto& sum = *static_cast<const pto_view*>(buffers[1]);
  if (in.ndim != 2 || in.type != PTO_F32 || in.item_bytes != 4 || in.size[0] != scalars[0] ||
      in.size[1] != scalars[1] || in.stride[0] != scalars[2] || in.stride[1] != 4) {
    return 3;
  }
  for (uint64_t r = 0; r < in.size[0]; ++r) {
    for (uint64_t c = 0; c < in.size[1]; ++c) {
      const auto* at = static_cast<const std::byte*>(in.data) + r * in.stride[0] + c * in.stride[1];
      *static_cast<int64_t*>(sum.data) += static_cast<int64_t>(*reinterpret_cast<const float*>(at));
    }
  }
  return PTO_OK;
}

/// Checks views of parameters without explicit views: bytes. scalars: dimensions, size and stride of the first.
int expect_bytes(void* const* buffers, const uint64_t* scalars) {
  const auto& view = *static_cast<const pto_view*>(buffers[0]);
  const bool is_right = view.type == PTO_U8 && view.item_bytes == 1 && view.ndim == scalars[0] &&
                        view.size[0] == scalars[1] && view.stride[0] == scalars[2];
  return is_right ? PTO_OK : 4;
}

pto_param seen_as(pto_param param, const pto_view& view) {
  param.view = &view;
  return param;
}

pto_task submit_named(Runtime& runtime, pto_kernel kernel, std::vector<pto_param> params, const char* name,
                      float deadline_s = 0, std::vector<pto_wait_for> waits = {}, std::vector<uint64_t> scalars = {}) {
  pto_task_spec spec{};
  spec.kernel = kernel;
  spec.worker_type = PTO_VECTOR;
  spec.params = params.data();
  spec.num_params = static_cast<uint32_t>(params.size());
  spec.waits = waits.data();
  spec.num_waits = static_cast<uint32_t>(waits.size());
  spec.scalars = scalars.data();
  spec.num_scalars = static_cast<uint32_t>(scalars.size());
  spec.flags = PTO_KEEP;
  spec.name = name;
  spec.deadline_s = static_cast<float>(deadline_s);
  return pto_submit(runtime, &spec);
}

/// Runs until it should stop; scalars: a Gate.
int stop_kernel(void* const*, const uint64_t* scalars) {
  Gate* gate = pointer<Gate>(scalars[0]);
  gate->num_inside.fetch_add(1);
  const auto begin = std::chrono::steady_clock::now();
  while (pto_should_stop() == 0 && seconds_since(begin) < 20) std::this_thread::yield();
  return pto_should_stop() != 0 ? 9 : PTO_OK;
}

}  // namespace

CASE("a kernel with views sees sizes, strides and types of whole buffers, boxes and new outputs, also in replays") {
  for (const uint32_t workers : {0u, 2u}) {
    Runtime runtime(workers);
    std::vector<float> data(24, 2);
    int64_t sum = 0;
    const pto_handle h = runtime.add(data), hs = runtime.add(sum);
    const pto_kernel kernel = runtime.kernel("sum_view", sum_view, PTO_VIEWS);
    const pto_view whole{nullptr, 2, PTO_F32, 0, {4, 6}, {24, 4}}, tile{nullptr, 2, PTO_F32, 0, {2, 3}, {24, 4}};
    const pto_view one{nullptr, 0, PTO_I64, 0, {}, {}};
    const pto_region box{24 + 8, 2, {2, 12}, {24, 1}};
    EXPECT_EQ(pto_record_begin(runtime), 0);
    runtime.submit(kernel, {seen_as(in(h), whole), seen_as(inout(hs), one)}, {.scalars = {4, 6, 24}});
    runtime.submit(kernel, {seen_as(in(h, &box), tile), seen_as(inout(hs), one)}, {.scalars = {2, 3, 24}});
    const pto_recording recording = pto_record_end(runtime);
    EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
    EXPECT_EQ(sum, 2 * (48 + 12));
    const pto_kernel bytes = runtime.kernel("bytes", expect_bytes, PTO_VIEWS);
    runtime.submit(bytes, {in(h)}, {.scalars = {1, 96, 1}});
    runtime.submit(bytes, {in(h, &box)}, {.scalars = {2, 2, 24}});
    runtime.submit(bytes, {fresh(40)}, {.scalars = {1, 40, 1}});
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  }
}

CASE("a view must lie in its buffer or box") {
  Runtime runtime(1);
  std::vector<float> data(24);
  const pto_handle h = runtime.add(data);
  const pto_kernel kernel = runtime.kernel("views", empty_kernel, PTO_VIEWS);
  const pto_region column{4, 2, {4, 4}, {24, 1}}, tile{0, 2, {2, 8}, {24, 1}}, row{24, 2, {1, 24}, {24, 1}};
  const auto refused = [&](const pto_region* region, const pto_view& view) {
    return runtime.submit(kernel, {seen_as(in(h, region), view)}) == 0 && pto_last_status() == PTO_BAD_ARGUMENT;
  };
  EXPECT(!refused(nullptr, {nullptr, 2, PTO_F32, 0, {4, 6}, {24, 4}}));
  EXPECT(!refused(nullptr, {nullptr, 1, PTO_F32, 0, {12}, {8}}));  // every second element
  EXPECT(!refused(&column, {nullptr, 1, PTO_F32, 0, {4}, {24}}));
  EXPECT(!refused(&tile, {nullptr, 2, PTO_F32, 0, {2, 2}, {24, 4}}));
  EXPECT(!refused(&tile, {nullptr, 2, PTO_F32, 0, {2, 1}, {24, 4}}));  // only a part
  EXPECT(!refused(&row, {nullptr, 1, PTO_F32, 0, {6}, {4}}));
  EXPECT(!refused(&row, {nullptr, 1, PTO_OTHER, 12, {2}, {12}}));
  EXPECT(!refused(&tile, {nullptr, 1, PTO_F32, 0, {0}, {4}}));
  EXPECT(refused(nullptr, {nullptr, 2, PTO_F32, 0, {4, 7}, {24, 4}}));
  EXPECT(refused(nullptr, {nullptr, 2, PTO_F64, 0, {4, 6}, {48, 8}}));
  EXPECT(refused(&column, {nullptr, 1, PTO_F32, 0, {4}, {4}}));
  EXPECT(refused(&tile, {nullptr, 1, PTO_F32, 0, {4}, {4}}));
  EXPECT(refused(&tile, {nullptr, 2, PTO_F32, 0, {2, 3}, {24, 4}}));
  EXPECT(refused(nullptr, {nullptr, 5, PTO_F32, 0, {1, 1, 1, 1}, {4, 4, 4, 4}}));
  EXPECT(refused(nullptr, {nullptr, 1, static_cast<pto_type>(16), 0, {1}, {4}}));
  EXPECT(refused(nullptr, {nullptr, 1, PTO_OTHER, 0, {1}, {4}}));
  EXPECT(refused(nullptr, {nullptr, 2, PTO_F32, 0, {1ull << 40, 1ull << 40}, {1ull << 40, 4}}));
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
}

CASE("a task's name is in its error, its trace and the graph, also in a replay") {
  Runtime runtime(1);
  int64_t x = 0;
  const pto_handle h = runtime.add(x);
  const pto_kernel step = runtime.kernel("step", step_kernel), fail = runtime.kernel("fail", fail_kernel);
  EXPECT_EQ(pto_trace_enable(runtime, 100), 0);
  EXPECT_EQ(pto_graph_begin(runtime), 0);
  EXPECT_EQ(pto_record_begin(runtime), 0);
  const pto_task named = submit_named(runtime, step, {inout(h)}, "potrf(3)", 0, {}, {1});
  const pto_task plain = runtime.submit(step, {inout(h)}, {.scalars = {1}, .flags = PTO_KEEP});
  const pto_recording recording = pto_record_end(runtime);
  const std::string path = "/tmp/pto_notes_" + std::to_string(getpid()) + ".json";
  EXPECT_EQ(pto_graph_end(runtime, path.c_str()), 0);
  EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  const pto_task bad = submit_named(runtime, fail, {inout(h)}, "syrk(1, \"2\")");
  EXPECT_EQ(pto_wait(runtime, bad, PTO_FOREVER), PTO_TASK_FAILED);
  char text[400];
  EXPECT_EQ(pto_task_error(runtime, bad, text, sizeof(text)), PTO_TASK_FAILED);
  EXPECT(has(text, " 'syrk(1, \"2\")' (fail) on "));
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  std::vector<pto_trace_task> records(10);
  records.resize(pto_trace_tasks(runtime, records.data(), records.size()));
  EXPECT_EQ(records.size(), 5u);
  const auto count = [&](const char* name) {
    return std::count_if(records.begin(), records.end(), [&](const auto& r) { return std::string(r.name) == name; });
  };
  EXPECT_EQ(count("potrf(3)"), 2);
  EXPECT_EQ(count(""), 2);
  EXPECT_EQ(count("syrk(1, \"2\")"), 1);
  std::stringstream graph;
  graph << std::ifstream(path).rdbuf();
  EXPECT(has(graph.str().c_str(), "\"name\":\"potrf(3)\""));
  unlink(path.c_str());
  for (const pto_task task : {named, plain, bad}) pto_task_release(runtime, task);
  EXPECT_EQ(submit_named(runtime, step, {inout(h)}, std::string(64, 'n').c_str()), 0u);
  EXPECT(has(pto_last_error(), "at most 63 bytes"));
}

CASE("a task that has not started by its deadline fails together with its consumers; an earlier start is in time") {
  for (const uint32_t workers : {0u, 1u}) {
    Runtime runtime(workers);
    int64_t x = 0;
    const pto_handle h = runtime.add(x);
    const pto_kernel step = runtime.kernel("step", step_kernel), busy = runtime.kernel("busy", busy_kernel);
    EXPECT_EQ(pto_wait(runtime, submit_named(runtime, step, {inout(h)}, "early", 60, {}, {1}), PTO_FOREVER), 0);
    runtime.submit(busy, {inout(h)}, {.scalars = {30'000}});
    const pto_task late = submit_named(runtime, step, {inout(h)}, "late", 0.001, {}, {1});
    const pto_task heir = runtime.submit(PTO_NO_KERNEL, {in(h)}, {.flags = PTO_KEEP});
    EXPECT_EQ(pto_wait(runtime, heir, PTO_FOREVER), PTO_TASK_FAILED);
    EXPECT_EQ(pto_wait(runtime, late, PTO_FOREVER), PTO_TASK_FAILED);
    EXPECT_EQ(pto_task_status(runtime, late), PTO_TIMEOUT);
    EXPECT_EQ(pto_task_status(runtime, heir), PTO_TIMEOUT);
    char text[400];
    pto_task_error(runtime, late, text, sizeof(text));
    EXPECT(has(text, "deadline") && has(text, "'late'") && has(text, "give it longer"));
    EXPECT_EQ(x, 1);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
    for (const pto_task task : {late, heir}) pto_task_release(runtime, task);
  }
}

CASE("a deadline ends the wait for an event, with sleeping, waiting or no workers") {
  for (const uint32_t workers : {0u, 1u, 2u}) {
    Runtime runtime(workers);
    const pto_event never = pto_event_open(runtime), also = pto_event_open(runtime);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // workers are asleep
    const auto begin = std::chrono::steady_clock::now();
    std::vector<pto_task> tasks;
    for (const float deadline_s : {0.06F, 0.02F, 0.04F}) {
      tasks.push_back(submit_named(runtime, PTO_NO_KERNEL, {}, nullptr, deadline_s, {{never, 1}, {also, 1}}));
    }
    if (workers > 0) {
      while (pto_is_complete(runtime, tasks[1]) == 0 && seconds_since(begin) < 10) std::this_thread::yield();
      EXPECT_EQ(pto_is_complete(runtime, tasks[1]), 1);
    }
    for (const pto_task task : tasks) {
      EXPECT_EQ(pto_wait(runtime, task, workers > 0 ? 10 : PTO_FOREVER), PTO_TASK_FAILED);
      EXPECT_EQ(pto_task_status(runtime, task), PTO_TIMEOUT);
      pto_task_release(runtime, task);
    }
    EXPECT(seconds_since(begin) > 0.05 && seconds_since(begin) < 5);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  }
}

CASE("names are UTF-8 without control characters: they are written into JSON and HTML") {
  Runtime runtime(1);
  for (const char* name : {"\xFF\xFE", "\xC3", "a\xC3(", "\xC0\xAF", "\xED\xA0\x80", "\xF5\x80\x80\x80", "a\nb", "\x7F",
                           "\xC2\x85", "\xE0\x9F\xBF"}) {
    EXPECT_EQ(submit_named(runtime, PTO_NO_KERNEL, {}, name), 0u);
    EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
    EXPECT(pto_kernel_add(runtime, name, empty_kernel, 0) < 0);
    EXPECT(has(pto_last_error(), "UTF-8"));
  }
  for (const char* name : {"gemm(1, 2)", "\xC3\xA9", "\xE6\x97\xA5", "\xF0\x9F\x98\x80", "\xED\x9F\xBF"}) {
    EXPECT(submit_named(runtime, PTO_NO_KERNEL, {}, name) != 0);
    EXPECT(pto_kernel_add(runtime, name, empty_kernel, 0) >= 0);
  }
}

CASE("a deadline is a positive number of seconds") {
  Runtime runtime(1);
  for (const double bad : {-1.0, -HUGE_VAL, static_cast<double>(NAN)}) {
    EXPECT_EQ(submit_named(runtime, PTO_NO_KERNEL, {}, nullptr, bad), 0u);
    EXPECT(has(pto_last_error(), "deadline"));
  }
  EXPECT_EQ(pto_wait(runtime, submit_named(runtime, PTO_NO_KERNEL, {}, nullptr, HUGE_VAL), PTO_FOREVER), 0);
}

CASE("a running kernel sees its cancellation, the cancellation of all, and its deadline") {
  EXPECT_EQ(pto_should_stop(), 0);
  for (const int how : {0, 1, 2}) {
    Runtime runtime(1);
    Gate gate;
    const pto_kernel kernel = runtime.kernel("stop", stop_kernel);
    const pto_task task = submit_named(runtime, kernel, {}, nullptr, how == 2 ? 0.05 : 0, {}, {scalar(&gate)});
    gate.await_inside(1);
    if (how == 0) EXPECT_EQ(pto_cancel(runtime, task), 0);
    if (how == 1) EXPECT_EQ(pto_cancel_all(runtime), 0);
    EXPECT_EQ(pto_wait(runtime, task, 10), PTO_TASK_FAILED);
    EXPECT_EQ(pto_task_status(runtime, task), PTO_TASK_FAILED);  // as its kernel returned
    pto_task_release(runtime, task);
    EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), PTO_TASK_FAILED);
  }
}

CASE("a child sees its parent's cancellation") {
  Runtime runtime(2);
  static PTORuntime* shared;
  static pto_kernel child;
  shared = runtime;
  child = runtime.kernel("child", stop_kernel);
  Gate gate;
  const auto parent = [](void* const*, const uint64_t* scalars) {
    pto_task_spec spec{};
    spec.kernel = child;
    spec.worker_type = PTO_VECTOR;
    spec.scalars = scalars;
    spec.num_scalars = 1;
    return pto_submit(shared, &spec) != 0 && pto_wait_all(shared, PTO_FOREVER) == PTO_TASK_FAILED ? 0 : 5;
  };
  const pto_task task =
      submit_named(runtime, runtime.kernel("parent", parent, PTO_SUBMITS), {}, nullptr, 0, {}, {scalar(&gate)});
  gate.await_inside(1);
  EXPECT_EQ(pto_cancel(runtime, task), 0);
  EXPECT_EQ(pto_wait(runtime, task, 10), 0);
  pto_task_release(runtime, task);
}

TILEWISE_TEST_MAIN
