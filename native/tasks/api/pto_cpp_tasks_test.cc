// Tasks of tilewise/pto.hpp: handles, groups, hints, scopes, recordings, kernels that submit. Every wait has a
// timeout, dropping never blocks, and exceptions leave nothing open.
#include "tasks/api/testing_cpp.h"

using namespace tilewise::pto;
using namespace tilewise::pto::testing;
using tilewise::tasks::testing::set_kernel;
using tilewise::tasks::testing::step_kernel;

CASE("a handle waits only for its task, reports its end repeatedly, and moves") {
  Bench bench;
  int64_t x = 0;
  const Buffer b = bench.rt.buffer(&x, sizeof(x));
  const TaskHandle waits = bench.rt.submit(bench.set, {no_dep(b)}, {9}, {}, bench.behind_event());
  TaskHandle good = bench.rt.submit(bench.set, {output(b)}, {1});
  good.wait();
  good.wait(0);
  EXPECT(good.is_complete() && !good.exception() && good.status() == PTO_OK && good.runtime() == bench.rt.get());
  EXPECT(!waits.is_complete() && waits.status() == PTO_OK);
  const TaskHandle bad = bench.rt.submit(bench.fail, {output(b)});
  const TaskHandle heir = bench.rt.submit(bench.add, {inout(b), input(b)});
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(status_of([&] { bad.wait(); }, "planted failure"), PTO_TASK_FAILED);
    EXPECT_EQ(heir.exception()->status(), PTO_TASK_FAILED);
    EXPECT(has(heir.exception()->what(), "planted failure"));
  }
  EXPECT_EQ(bad.status(), PTO_TASK_FAILED);
  waits.cancel();
  EXPECT_EQ(waits.exception()->status(), PTO_CANCELLED);
  EXPECT_EQ(status_of([&] { waits.wait(); }, "cancelled"), PTO_CANCELLED);
  const pto_task id = good.id();
  TaskHandle moved = std::move(good);
  TaskHandle none;
  for (const TaskHandle* empty : {&good, &none}) {
    EXPECT(!*empty);
    for (const auto& use : std::vector<std::function<void()>>{[=] { empty->wait(); }, [=] { empty->exception(); },
                                                              [=] { empty->is_complete(); }, [=] { empty->id(); },
                                                              [=] { empty->status(); }, [=] { empty->cancel(); }}) {
      EXPECT_EQ(status_of(use, "moved from"), PTO_BAD_ARGUMENT);
    }
  }
  none.detach();
  TaskHandle& same = moved;
  moved = std::move(same);
  EXPECT(moved && moved.id() == id);
  moved = bench.rt.submit(bench.set, {output(b)}, {2});
  EXPECT(moved.id() != id);
  moved.wait();
  moved.detach();
  EXPECT(!moved);
}

CASE("dropping, detaching or overwriting the handle of a running task does not wait for it") {
  Bench bench;
  Gate gate;
  int64_t x = 0;
  const Buffer b = bench.rt.buffer(&x, sizeof(x));
  {
    const TaskHandle dropped = bench.rt.submit(bench.gate, {}, {&gate});
  }
  gate.await_inside(1);  // it runs, and the gate is closed: waiting for it would never end
  bench.rt.submit(bench.set, {output(b)}, {1}, {}, {.after = {bench.rt.submit(bench.gate, {}, {&gate}).id()}}).detach();
  TaskHandle handle = bench.rt.submit(bench.set, {output(b)}, {2});
  handle = TaskHandle();
  {
    TaskGroup group;
    group.add(bench.rt.submit(bench.set, {output(b)}, {3}));
  }
  EXPECT_EQ(x, int64_t{0});
  gate.open();
  bench.rt.wait_all();
  EXPECT_EQ(x, int64_t{3});
}

CASE("options and hints: edges, events, predicates, worker types, priorities, workers, and impossible hints") {
  Runtime rt({.num_workers = 1, .worker_types = {1 << PTO_VECTOR | 1 << PTO_CUBE}});
  const Kernel set = rt.kernel("set", set_kernel), step = rt.kernel("step", step_kernel);
  const Kernel gated = rt.kernel("gate", Gate::kernel);
  Gate gate;
  int64_t x = 0;
  uint32_t flag = 0;
  const Buffer b = rt.buffer(&x, sizeof(x)), p = rt.buffer(&flag, sizeof(flag));
  TaskHandle closed = rt.submit(gated, {}, {&gate}, {}, {.worker_type = PTO_CUBE});
  gate.await_inside(1);  // the only worker is busy: what follows is chosen by priority, then by edges
  rt.submit(step, {no_dep(b)}, {1}, {.priority = -1});
  const TaskHandle middle = rt.submit(step, {no_dep(b)}, {2}, {.target_node = 0, .target_worker = 0, .priority = 1});
  rt.submit(step, {no_dep(b)}, {3}, {.priority = 2});
  rt.submit(step, {no_dep(b)}, {4}, {.priority = 9}, {.after = {closed.id(), middle.id()}});
  gate.open();
  rt.wait_all(60);  // with a deadline this thread does not help
  EXPECT_EQ(x, int64_t{((3 * 3 + 2) * 3 + 4) * 3 + 1});
  const Event event = rt.event();
  rt.submit(set, {output(b)}, {50}, {.prefetch_inputs = false}, {.wait_for = {event.at_least(2)}});
  EXPECT_EQ(x, int64_t{112});
  event.post();
  event.post(1);
  EXPECT_EQ(event.value(), uint64_t{2});
  EXPECT_EQ(b.read<int64_t>()[0], int64_t{50});
  rt.submit(set, {output(b)}, {60}, {}, {.predicate = p.handle()}).wait();
  EXPECT_EQ(x, int64_t{50});
  p.write<uint32_t>()[0] = 1;
  const pto_handle early[] = {b.handle()};
  rt.submit(set, {output(b)}, {60}, {.prefetch_handles = early}, {.predicate = p.handle()}).wait();
  EXPECT_EQ(x, int64_t{60});
  const auto refused = [&](const TaskExecutionHints& hints, const TaskOptions& options, const char* text) {
    return status_of([&] { rt.submit(set, {output(b)}, {0}, hints, options); }, text);
  };
  EXPECT_EQ(refused({.target_node = 1}, {}, "target_node"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({.target_node = -2}, {}, "target_node"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({.target_worker = -2}, {}, "target_worker"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({.target_worker = INT32_MAX}, {}, "target_worker"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({.target_worker = 1}, {}, "worker"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({.prefetch_handles = {pto_handle{12345}}}, {}, "alive"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({}, {.worker_type = PTO_ACCELERATOR}, "worker"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({}, {.after = {UINT64_MAX}}, "edge"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({}, {.wait_for = {{77, 1}}}, "event"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(x, int64_t{60});
}

CASE("a group returns its tasks as they end, once each, and waits for all") {
  Bench bench(2);
  const Event order = bench.rt.event();
  TaskGroup group;
  EXPECT(group.empty());
  for (const uint64_t turn : {3u, 1u, 2u}) {
    group.add(bench.rt.submit({}, {}, {}, {}, {.wait_for = {order.at_least(turn)}}));
  }
  const pto_task first = group[0].id(), second = group[1].id(), third = group[2].id();
  EXPECT_EQ(group.size(), size_t{3});
  order.post();
  EXPECT_EQ(group.wait_any(), size_t{1});
  EXPECT_EQ(status_of([&] { group.wait_any(0); }, "wait_any"), PTO_TIMEOUT);
  order.post();
  std::vector<pto_task> seen;
  for (TaskHandle& task : group.as_completed(60)) {
    seen.push_back(task.id());
    EXPECT(task.is_complete());
    order.post();
  }
  EXPECT(seen == (std::vector<pto_task>{third, first}));
  EXPECT_EQ(status_of([&] { group.wait_any(); }, "been returned"), PTO_BAD_ARGUMENT);
  for (TaskHandle& task : group.as_completed(60)) EXPECT(!task);  // none is left
  for (int twice = 0; twice < 2; ++twice) {
    std::vector<pto_task> all;
    for (TaskHandle& task : group) all.push_back(task.id());  // in order of adding, repeatedly
    EXPECT(all == (std::vector<pto_task>{first, second, third}));
  }
  TaskHandle& handle = group[1];
  for (int i = 0; i < 100; ++i) group.add(bench.rt.submit({}));
  EXPECT(&handle == &group[1] && handle.id() == second);
  group.wait_all();
  size_t count = 0;
  for (TaskHandle& task : group.as_completed(60)) count += task.is_complete() ? 1 : 0;
  EXPECT_EQ(count, size_t{100});
  TaskGroup moved = std::move(group);
  EXPECT_EQ(moved.size(), size_t{103});
  moved.wait_all(0);
}

CASE("a group throws its first failure once all have ended, cancels, and rejects other runtimes' tasks") {
  Bench bench, other;
  int64_t x = 0;
  const Buffer b = bench.rt.buffer(&x, sizeof(x));
  TaskGroup group;
  EXPECT_EQ(status_of([&] { group.wait_any(); }, "been returned"), PTO_BAD_ARGUMENT);
  group.wait_all();
  for (TaskHandle& task : group) EXPECT(!task);
  group.add(bench.rt.submit({}, {}, {}, {}, bench.behind_event()));
  group.add(bench.rt.submit(bench.fail));
  TaskHandle& last = group.add(bench.rt.submit(bench.set, {output(b)}, {1}));
  EXPECT_EQ(status_of([&] { group.add(other.rt.submit({})); }, "one runtime"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { group.add(TaskHandle()); }, "must name a task"), PTO_BAD_ARGUMENT);
  group[1].exception();
  last.wait();
  EXPECT_EQ(group[group.wait_any()].status(), PTO_TASK_FAILED);  // failed tasks are returned like others
  bench.start.post();
  EXPECT_EQ(status_of([&] { group.wait_all(); }, "planted failure"), PTO_TASK_FAILED);
  EXPECT(group[0].is_complete() && group[0].status() == PTO_OK);
  TaskGroup skipped;
  const Event never = bench.rt.event();
  for (int i = 0; i < 3; ++i) skipped.add(bench.rt.submit({}, {}, {}, {}, {.wait_for = {never.at_least(1)}}));
  skipped.cancel();
  EXPECT_EQ(status_of([&] { skipped.wait_all(); }), PTO_CANCELLED);
}

CASE("every wait can time out, and the task continues") {
  Bench bench;
  int64_t x = 0;
  const Buffer b = bench.rt.buffer(&x, sizeof(x));
  TaskGroup group;
  TaskHandle& task = group.add(bench.rt.submit(bench.set, {output(b)}, {1}, {}, bench.behind_event()));
  for (const double timeout_s : {0.0, kShort}) {
    EXPECT_EQ(status_of([&] { task.wait(timeout_s); }, "TaskHandle.wait"), PTO_TIMEOUT);
    EXPECT_EQ(status_of([&] { task.exception(timeout_s); }), PTO_TIMEOUT);
    EXPECT_EQ(status_of([&] { group.wait_all(timeout_s); }), PTO_TIMEOUT);
    EXPECT_EQ(status_of([&] { group.wait_any(timeout_s); }, "TaskGroup.wait_any"), PTO_TIMEOUT);
    EXPECT_EQ(status_of([&] {
                for (TaskHandle& done : group.as_completed(timeout_s)) EXPECT(!done);
              }),
              PTO_TIMEOUT);
    EXPECT_EQ(status_of([&] { bench.rt.wait_all(timeout_s); }, "Runtime.wait_all"), PTO_TIMEOUT);
    EXPECT_EQ(status_of([&] { b.read(timeout_s); }), PTO_TIMEOUT);
    EXPECT_EQ(status_of([&] { b.write(timeout_s); }), PTO_TIMEOUT);
    EXPECT_EQ(status_of([&] { bench.rt.at(b.handle()).read(timeout_s); }), PTO_TIMEOUT);
  }
  EXPECT(!task.is_complete());
  bench.start.post();
  for (TaskHandle& done : group.as_completed(60)) done.wait(60);
  EXPECT_EQ(b.read<int64_t>(60)[0], int64_t{1});
  bench.rt.wait_all(60);
}

CASE("wait_all throws the first failure once; cancel_all skips what has not started") {
  Bench bench;
  bench.rt.submit(bench.fail);
  EXPECT_EQ(status_of([&] { bench.rt.wait_all(); }, "planted failure"), PTO_TASK_FAILED);
  bench.rt.wait_all();
  const TaskHandle skipped = bench.rt.submit({}, {}, {}, {}, bench.behind_event());
  bench.rt.cancel_all();
  EXPECT_EQ(skipped.exception()->status(), PTO_CANCELLED);
}

CASE("an exception in the middle of a scope ends the scope, waits for its buffers, and closes without hanging") {
  static std::atomic<int> num_run;
  num_run = 0;
  std::string text;
  try {
    Runtime rt({.num_workers = 1, .window = 16, .heap_bytes = 1 << 20});
    const Kernel set = rt.kernel("set", set_kernel);
    const Kernel count = rt.kernel("count", [](void* const*, const uint64_t*) { ++num_run; });
    const Event never = rt.event();
    int64_t x = 0;
    Output inner(8);
    try {
      const Buffer b = rt.buffer(&x, sizeof(x));
      const Scope outer(rt);
      const Scope scope(rt);
      const TaskHandle dropped = rt.submit(set, {output(inner)}, {1});
      rt.submit(set, {output(b)}, {2});
      throw std::runtime_error("planted");
    } catch (const std::runtime_error&) {
      EXPECT_EQ(x, int64_t{2});
      EXPECT_EQ(status_of([&] { inner.read(); }, "scope has ended"), PTO_BAD_ARGUMENT);
      EXPECT_EQ(pto_scope_end(rt.get()), PTO_BAD_ARGUMENT);  // both scopes have ended
    }
    rt.submit(count, {}, {}, {}, {.wait_for = {never.at_least(1)}});  // never posted
    throw std::runtime_error("outer");
  } catch (const std::runtime_error& error) {
    text = error.what();
  }
  EXPECT_EQ(text, std::string("outer"));
  EXPECT_EQ(num_run.load(), 0);
}

CASE("a scope ends once, early or with its block, and nests no deeper than allowed") {
  Bench bench;
  Scope early(bench.rt);
  Output out(8);
  bench.rt.submit(bench.set, {output(out)}, {1});
  early.end();
  EXPECT_EQ(status_of([&] { out.read(); }, "scope has ended"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { early.end(); }), PTO_BAD_ARGUMENT);
  std::deque<Scope> nested;
  for (int i = 0; i < PTO_MAX_SCOPES; ++i) nested.emplace_back(bench.rt);
  EXPECT_EQ(status_of([&] { nested.emplace_back(bench.rt); }, "nest"), PTO_BAD_ARGUMENT);
  while (!nested.empty()) nested.pop_back();
  EXPECT_EQ(pto_scope_end(bench.rt.get()), PTO_BAD_ARGUMENT);
}

CASE("a recording replays on the same and on other buffers; impossible replays are rejected") {
  Bench bench;
  Runtime& rt = bench.rt;
  int64_t values[4] = {1, 2, 3, 4}, small = 0, wide[2] = {};
  std::vector<Buffer> b;
  for (int64_t& value : values) b.push_back(rt.buffer(&value, sizeof(value)));
  const Buffer large = rt.buffer(wide), unused = rt.buffer(&small, sizeof(small));
  Recording recording = rt.record([&] {
    rt.submit(bench.add, {inout(b[0]), input(b[1])});
    rt.submit(bench.add, {inout(b[1]), input(b[0])});
  });
  recording.replay();
  recording.replay({b[0].handle(), b[1].handle()}, {b[2].handle(), b[3].handle()});
  EXPECT_EQ(b[0].read<int64_t>()[0], int64_t{8});
  EXPECT_EQ(b[1].read<int64_t>()[0], int64_t{13});
  EXPECT_EQ(b[2].read<int64_t>()[0], int64_t{7});
  EXPECT_EQ(b[3].read<int64_t>()[0], int64_t{11});
  const auto refused = [&](List<pto_handle> from, List<pto_handle> to, const char* text) {
    return status_of([&] { recording.replay(from, to); }, text);
  };
  EXPECT_EQ(refused({b[0].handle()}, {}, "different lengths"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({unused.handle()}, {b[0].handle()}, "no recorded task"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({b[0].handle()}, {large.handle()}, "same size"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(refused({b[0].handle()}, {b[1].handle()}, "apart"), PTO_BAD_ARGUMENT);
  Recording moved = std::move(recording);
  EXPECT_EQ(status_of([&] { recording.replay(); }, "moved from"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { rt.record([&] { rt.record([] {}); }); }, "one recording at a time"), PTO_BAD_ARGUMENT);
  std::string text;
  try {
    rt.record([&] {
      rt.submit(bench.set, {output(b[0])}, {0});
      throw std::runtime_error("planted");
    });
  } catch (const std::runtime_error& error) {
    text = error.what();
  }
  EXPECT_EQ(text, std::string("planted"));
  recording = rt.record([&] { rt.submit(bench.set, {output(b[0])}, {5}); });  // the broken one has ended
  moved.replay();
  recording.replay();
  EXPECT_EQ(b[0].read<int64_t>()[0], int64_t{5});
}

CASE("kernels that submit borrow their runtime; tasks that end later are completed by any thread") {
  Bench bench(2);
  Runtime& rt = bench.rt;
  int64_t x = 0;
  const Buffer b = rt.buffer(&x, sizeof(x));
  const Kernel parent = rt.kernel(
      "parent",
      [](void* const*, const uint64_t* s) {
        Runtime inner = Runtime::borrow(scalar<PTORuntime*>(s[0]));
        const BufferRef buffer = inner.at(s[1]);
        for (int i = 0; i < 3; ++i) inner.submit(inner.kernel("step"), {inout(buffer)}, {i});
        if (s[2] != 0) inner.submit(Kernel{}, {inout(inner.at(12345))});  // its Error fails the task
        inner.wait_all();
      },
      PTO_SUBMITS);
  rt.submit(parent, {inout(b)}, {rt.get(), b.handle(), 0}).wait();
  EXPECT_EQ(x, int64_t{(0 * 3 + 1) * 3 + 2});
  const TaskHandle bad = rt.submit(parent, {inout(b)}, {rt.get(), b.handle(), 1});
  EXPECT_EQ(status_of([&] { bad.wait(); }, "must be alive"), PTO_TASK_FAILED);
  static std::atomic<pto_task> handed;
  handed = 0;
  const Kernel later = rt.kernel("later", [](void* const*, const uint64_t*) {
    handed.store(pto_this_task());
    return PTO_LATER;
  });
  for (const int status : {int{PTO_OK}, 5}) {
    const TaskHandle task = rt.submit(later);
    pto_task name = 0;
    std::thread ender([&] {
      while ((name = handed.exchange(0)) == 0) std::this_thread::yield();
      rt.complete(name, status);
    });
    EXPECT_EQ(status_of([&] { task.wait(); }), status == PTO_OK ? PTO_OK : PTO_TASK_FAILED);
    ender.join();
    EXPECT_EQ(task.id(), name);
    EXPECT_EQ(status_of([&] { rt.complete(name); }), PTO_BAD_ARGUMENT);
  }
}

CASE("threads submit to one runtime at once, and several wait for one task") {
  Bench bench(2);
  constexpr int kThreads = 4, kTasks = 200;
  int64_t x = 0;
  const Buffer b = bench.rt.buffer(&x, sizeof(x));
  const Kernel more = bench.rt.kernel("more", [](void* const* buffers, const uint64_t*) { ++value_of(buffers[0]); });
  const TaskHandle first = bench.rt.submit({}, {inout(b)}, {}, {}, bench.behind_event());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kTasks / 10; ++i) bench.rt.submit(more, {inout(b)});
      if (!first.is_complete()) bench.start.post();
      first.wait();
      for (int i = kTasks / 10; i < kTasks; ++i) bench.rt.submit(more, {inout(b)});
      bench.rt.wait_all();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(b.read<int64_t>()[0], int64_t{kThreads * kTasks});
}

TILEWISE_TEST_MAIN
