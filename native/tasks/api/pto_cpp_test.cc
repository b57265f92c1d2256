// Types of tilewise/pto.hpp: runtimes, kernels, buffers, scalars, parameters and outputs; their errors, and their
// moved-from states.
#include "tasks/api/testing_cpp.h"
#include "tilewise/pto.hpp"

using namespace tilewise::pto;
using namespace tilewise::pto::testing;
using tilewise::tasks::testing::set_kernel;

namespace {

template <class... Args>
concept CanMakeBuffer = requires(Runtime rt, Args... args) { rt.buffer(std::forward<Args>(args)...); };

template <class T>
constexpr bool kIsMoveOnly = std::is_nothrow_move_constructible_v<T> && std::is_move_assignable_v<T> &&
                             !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(kIsMoveOnly<Runtime> && kIsMoveOnly<Buffer> && kIsMoveOnly<TaskHandle> && kIsMoveOnly<Recording>);
static_assert(!std::is_copy_constructible_v<TaskGroup> && std::is_move_constructible_v<TaskGroup>);
static_assert(!std::is_copy_constructible_v<Scope> && !std::is_move_constructible_v<Scope>);
static_assert(sizeof(TaskHandle) == 16 && sizeof(Buffer) == 16);
static_assert(CanMakeBuffer<std::vector<int>&> && CanMakeBuffer<std::span<int>>);
static_assert(!CanMakeBuffer<std::vector<int>&&>, "a temporary would be gone before its tasks");

}  // namespace

CASE("a runtime opens with default and given sizes, rejects invalid ones, and moves") {
  {
    Runtime rt;
  }
  EXPECT_EQ(status_of([] { Runtime rt({.window = 3}); }, "window"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([] { Runtime rt({.num_workers = 2, .worker_types = {1}}); }, "every worker"), PTO_BAD_ARGUMENT);
  Runtime one({.num_workers = PTO_NO_WORKERS,
               .window = 16,
               .max_submitters = 2,
               .max_handles = 64,
               .max_regions = 64,
               .max_events = 1,
               .heap_bytes = 1 << 20,
               .is_pinned = true,
               .peer_timeout_s = 1});
  PTORuntime* raw = one.get();
  pto_stats stats{};
  EXPECT_EQ(pto_get_stats(raw, &stats), 0);
  EXPECT_EQ(stats.window, uint64_t{16});
  EXPECT_EQ(one.event().value(), uint64_t{0});
  EXPECT_EQ(status_of([&] { one.event(); }, "max_events"), PTO_NO_MEMORY);
  Runtime two = std::move(one);
  EXPECT(two.get() == raw && one.get() == nullptr);
  EXPECT_EQ(status_of([&] { one.submit(Kernel{}); }, "must be open"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { one.wait_all(); }), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { one.kernel("copy"); }), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { Scope scope(one); }), PTO_BAD_ARGUMENT);
  one = std::move(two);
  EXPECT(one.get() == raw && two.get() == nullptr);
  {
    Runtime same = Runtime::borrow(raw);
  }
  one.submit(Kernel{}).wait();  // it is still open
}

CASE("kernels: function pointers, lambdas that return a status or void, by name, and rejections") {
  Runtime rt({.num_workers = 1});
  int64_t x = 0;
  const Buffer b = rt.buffer(&x, sizeof(x));
  const Kernel pointer = rt.kernel("pointer", &set_kernel);
  const Kernel nothing =
      rt.kernel("nothing", [](void* const* buffers, const uint64_t*) { value_of(buffers[0]) += 10; });
  const Kernel status = rt.kernel("status", [](void* const* buffers, const uint64_t*) {
    value_of(buffers[0]) += 100;
    return PTO_OK;
  });
  const Kernel number = rt.kernel("number", [](void* const*, const uint64_t*) { return 3; });
  const Kernel throws =
      rt.kernel("throws", [](void* const*, const uint64_t*) { throw std::runtime_error("no such tile"); });
  rt.submit(pointer, {output(b)}, {1});
  rt.submit(nothing, {inout(b)});
  rt.submit(status, {inout(b)});
  EXPECT_EQ(b.read<int64_t>()[0], int64_t{111});
  EXPECT_EQ(rt.kernel("nothing").id, nothing.id);
  EXPECT(rt.kernel("sum_f32").id >= 0);
  EXPECT_EQ(status_of([&] { rt.submit(number).wait(); }, "returned 3"), PTO_TASK_FAILED);
  EXPECT_EQ(status_of([&] { rt.submit(throws).wait(); }, "no such tile"), PTO_TASK_FAILED);
  EXPECT_EQ(status_of([&] { rt.kernel("missing"); }, "missing"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { rt.kernel("", &set_kernel); }, "name"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { rt.load_library("/no/such/library.so"); }, "library must load"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { rt.submit(Kernel{999}); }), PTO_BAD_ARGUMENT);
}

CASE("buffers: of vectors, arrays, spans and addresses; size, address, reading and writing in place") {
  Bench bench;
  Runtime& rt = bench.rt;
  std::vector<int64_t> vector(3, 1);
  int64_t array[2] = {2, 2};
  std::array<int64_t, 4> other = {3, 3, 3, 3};
  const Buffer v = rt.buffer(vector), a = rt.buffer(array), s = rt.buffer(std::span(other).first(2));
  EXPECT_EQ(v.num_bytes(), uint64_t{24});
  EXPECT_EQ(a.num_bytes(), uint64_t{16});
  EXPECT_EQ(s.num_bytes(), uint64_t{16});
  EXPECT(v.address() == vector.data() && v.runtime() == rt.get());
  EXPECT_EQ(rt.at(a.handle()).address(), static_cast<void*>(array));
  rt.submit(bench.add, {inout(a), input(v)});
  EXPECT_EQ(a.read<int64_t>().size(), size_t{2});
  EXPECT_EQ(a.read<int64_t>()[0], int64_t{3});
  EXPECT_EQ(a.read().size(), size_t{16});
  s.write<int64_t>()[0] = 40;
  rt.submit(bench.add, {inout(s), input(a)});
  EXPECT_EQ(s.read<int64_t>()[0], int64_t{43});
  EXPECT_EQ(status_of([&] { rt.buffer(nullptr, 8); }, "address"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { rt.buffer(array, 0); }), PTO_BAD_ARGUMENT);
}

CASE("constant elements are frozen: tasks may only read them until they are thawed") {
  Bench bench;
  const std::vector<int64_t> weights(1, 5);
  int64_t x = 0;
  const Buffer w = bench.rt.buffer(weights), b = bench.rt.buffer(&x, sizeof(x));
  EXPECT_EQ(status_of([&] { bench.rt.submit(bench.set, {output(w)}, {1}); }, "frozen"), PTO_BAD_ARGUMENT);
  bench.rt.submit(bench.copy, {output(b), input(w)});
  EXPECT_EQ(b.read<int64_t>()[0], int64_t{5});
  b.freeze();
  EXPECT_EQ(status_of([&] { bench.rt.submit(bench.set, {output(b)}, {1}); }, "frozen"), PTO_BAD_ARGUMENT);
  b.freeze(false);
  bench.rt.submit(bench.set, {output(b)}, {6}).wait();
  EXPECT_EQ(x, int64_t{6});
}

CASE("the end of a buffer waits for its tasks; unregistering may time out, and then it stays registered") {
  Bench bench;
  int64_t x = 0;
  std::thread later;
  {
    const Buffer b = bench.rt.buffer(&x, sizeof(x));
    const Event start = bench.rt.event();
    bench.rt.submit(bench.set, {output(b)}, {7}, {}, {.wait_for = {start.at_least(1)}});
    later = std::thread([start] { start.post(); });
  }
  EXPECT_EQ(x, int64_t{7});
  later.join();
  Buffer b = bench.rt.buffer(&x, sizeof(x));
  bench.rt.submit(bench.set, {output(b)}, {8}, {}, bench.behind_event());
  EXPECT_EQ(status_of([&] { b.unregister(kShort); }, "within the time"), PTO_TIMEOUT);
  EXPECT(b.address() == &x);
  bench.start.post();
  b.unregister();
  EXPECT_EQ(x, int64_t{8});
  EXPECT_EQ(status_of([&] { b.unregister(); }, "unregistered"), PTO_BAD_ARGUMENT);
  Buffer failed = bench.rt.buffer(&x, sizeof(x));
  bench.rt.submit(bench.fail, {output(failed)});
  failed.unregister();  // also after a failure
}

CASE("moved-from buffers are rejected with a reason, and their successors unregister once") {
  Bench bench;
  int64_t x = 0, y = 0;
  Buffer one = bench.rt.buffer(&x, sizeof(x)), two = bench.rt.buffer(&y, sizeof(y));
  const pto_handle handle = one.handle(), old = two.handle();
  Buffer three = std::move(one);
  EXPECT_EQ(three.handle(), handle);
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { bench.rt.submit(bench.set, {output(one)}, {1}); }, [&] { input(one, range(0, 1)); },
           [&] { no_dep(one); }, [&] { one.read(); }, [&] { one.write(); }, [&] { one.freeze(); },
           [&] { one.address(); }, [&] { one.num_bytes(); }, [&] { one.unregister(); }, [&] { one.handle(); }}) {
    EXPECT_EQ(status_of(use, "moved from"), PTO_BAD_ARGUMENT);
  }
  two = std::move(three);  // unregisters y
  EXPECT_EQ(two.handle(), handle);
  EXPECT_EQ(status_of([&] { bench.rt.at(old).address(); }, "unregistered"), PTO_BAD_ARGUMENT);
  Buffer& same = two;
  two = std::move(same);
  EXPECT_EQ(two.handle(), handle);
  bench.rt.submit(bench.set, {output(two)}, {4});
  EXPECT_EQ(two.read<int64_t>()[0], int64_t{4});
}

CASE("scalars reach the kernel unchanged") {
  Runtime rt({.num_workers = 1});
  static std::atomic<int> num_right;
  num_right = 0;
  int64_t x = 0;
  const Kernel check = rt.kernel("check", [](void* const* buffers, const uint64_t* s) {
    num_right += buffers[0] == scalar<int64_t*>(s[0]);
    num_right += scalar<int>(s[1]) == -3;
    num_right += scalar<int64_t>(s[1]) == -3;
    num_right += scalar<double>(s[2]) == -0.125;
    num_right += scalar<float>(s[3]) == 1.5f;
    num_right += scalar<bool>(s[4]);
    num_right += s[5] == UINT64_MAX;
  });
  rt.submit(check, {no_dep(&x)}, {&x, -3, -0.125, 1.5f, true, UINT64_MAX}).wait();
  EXPECT_EQ(num_right.load(), 7);
  const std::vector<Scalar> many(17, 0);
  EXPECT_EQ(status_of([&] { rt.submit(check, {}, many); }, "at most"), PTO_BAD_ARGUMENT);
}

CASE("access modes order tasks: readers after writers, commuting in any order, reductions in order of submission") {
  for (const uint32_t workers : {uint32_t{PTO_NO_WORKERS}, 1u, 3u}) {
    Bench bench(workers);
    Runtime& rt = bench.rt;
    int64_t x = 0, y = 0, sum = 0;
    const Buffer a = rt.buffer(&x, sizeof(x)), b = rt.buffer(&y, sizeof(y)), total = rt.buffer(&sum, sizeof(sum));
    for (int i = 0; i < 10; ++i) {
      rt.submit(bench.step, {inout(a)}, {i});
      rt.submit(bench.add, {commute(b), input(a)});
    }
    int64_t expected_x = 0, expected_y = 0;
    for (int i = 0; i < 10; ++i) expected_y += expected_x = expected_x * 3 + i;
    EXPECT_EQ(b.read<int64_t>()[0], expected_y);
    const Kernel combine = rt.kernel("sum_i64");
    {
      const Scope scope(rt);
      for (int i = 0; i < 10; ++i) rt.submit(bench.set, {reduce(total, combine)}, {i});
    }
    EXPECT_EQ(total.read<int64_t>()[0], int64_t{45});
    const TaskHandle writer = rt.submit(bench.set, {output(a)}, {1}, {}, bench.behind_event());
    rt.submit(bench.set, {no_dep(a)}, {2}).wait();  // does not wait for the writer
    rt.submit(bench.set, {no_dep(&x)}, {3}).wait();
    EXPECT_EQ(x, int64_t{3});
    EXPECT(!writer.is_complete());
    bench.start.post();
    writer.wait();
    EXPECT_EQ(x, int64_t{1});
    EXPECT_EQ(status_of([&] { rt.submit(bench.set, {reduce(total, Kernel{})}, {1}); }, "combine"), PTO_BAD_ARGUMENT);
  }
}

CASE("boxes: disjoint ones are not ordered, stored parameters keep theirs, and kernels get their first byte") {
  Bench bench;
  Runtime& rt = bench.rt;
  std::vector<int64_t> grid(16, 0);  // 4 x 4
  const Buffer g = rt.buffer(grid);
  const TaskHandle left = rt.submit(bench.set, {output(g, tile(0, 0, 4, 2, 4, 8))}, {1}, {}, bench.behind_event());
  rt.submit(bench.set, {output(g, tile(2, 2, 1, 1, 4, 8))}, {2}).wait();  // not ordered after the left half
  EXPECT_EQ(grid[10], int64_t{2});
  std::vector<Param> stored;
  for (uint64_t i = 0; i < 4; ++i) stored.push_back(inout(g, range(i * 32, 8)));  // growing copies them
  Param last = input(g);
  last = stored[3];
  stored[2] = last;
  const TaskHandle third = rt.submit(bench.set, {stored[2]}, {5});
  EXPECT(!third.is_complete());  // its box meets the left half
  bench.start.post();
  third.wait();
  EXPECT_EQ(grid[12], int64_t{5});
  EXPECT_EQ(grid[8], int64_t{0});
  rt.submit(bench.add, {commute(g, range(0, 8)), input(g, range(96, 8))});
  rt.submit(bench.add, {no_dep(g, range(8, 8)), input(g, range(0, 8))}).wait();
  EXPECT_EQ(grid[0], int64_t{6});
  EXPECT_EQ(grid[1], int64_t{6});
  EXPECT_EQ(status_of([&] { rt.submit(bench.set, {output(g, range(128, 1))}, {0}); }, "lie inside"), PTO_BAD_ARGUMENT);
}

CASE("runtime-owned outputs: named by their task, used by others, valid until their scope ends") {
  Bench bench;
  Runtime& rt = bench.rt;
  int64_t x = 0;
  const Buffer b = rt.buffer(&x, sizeof(x));
  Output one(8), two(16), none(0);
  {
    const Scope scope(rt);
    EXPECT_EQ(status_of([&] { input(one); }, "no task has written"), PTO_BAD_ARGUMENT);
    EXPECT_EQ(status_of([&] { rt.submit(bench.set, {output(none)}, {1}); }), PTO_BAD_ARGUMENT);
    rt.submit(bench.set, {output(one)}, {20});
    rt.submit(bench.add, {output(two), input(one), output(b)});  // two of three named
    rt.submit(bench.copy, {output(two), input(one)});            // the same buffer again
    rt.submit(bench.add, {inout(one), input(two)});
    rt.submit(bench.copy, {output(b), input(one)});
    EXPECT_EQ(two.num_bytes(), uint64_t{16});
    EXPECT(one.runtime() == rt.get());
    EXPECT_EQ(one.read<int64_t>()[0], int64_t{40});
    const BufferRef mine = rt.alloc(64);
    mine.write<int64_t>()[7] = 2;
    rt.submit(bench.add, {inout(b), input(mine, range(56, 8))});
  }
  EXPECT_EQ(b.read<int64_t>()[0], int64_t{42});
  EXPECT_EQ(status_of([&] { rt.submit(bench.set, {inout(one)}, {1}); }, "scope has ended"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { one.read(); }, "scope has ended"), PTO_BAD_ARGUMENT);
  EXPECT_EQ(status_of([&] { rt.alloc(0); }), PTO_BAD_ARGUMENT);
}

CASE("invalid submissions have no effect: too many parameters, another runtime's buffers") {
  Bench bench, other;
  int64_t x = 0;
  const Buffer b = bench.rt.buffer(&x, sizeof(x)), theirs = other.rt.buffer(&x, sizeof(x));
  EXPECT_EQ(status_of([&] { bench.rt.submit(bench.add, {inout(b), input(theirs)}); }, "another"), PTO_BAD_ARGUMENT);
  const std::vector<Param> many(PTO_MAX_PARAMS + 1, input(b));
  EXPECT_EQ(status_of([&] { bench.rt.submit({}, many); }, "at most"), PTO_BAD_ARGUMENT);
  bench.rt.submit({}, std::span(many).first(PTO_MAX_PARAMS)).wait();
  EXPECT_EQ(x, int64_t{0});
}

TILEWISE_TEST_MAIN
