// The rule of ordering alone, with a scripted pool: which tasks an access waits for and what it leaves behind.
#include "tasks/dependencies.h"
#include "tasks/engine.h"
#include "tasks/testing_runtime.h"

#include <deque>
#include <set>

#include "base/testing.h"

using namespace tilewise::tasks;

namespace {

/// Chunks from a list that counts them; the test says who has completed and who has failed.
struct ScriptedPool {
  std::deque<Chunk> chunks;
  std::vector<uint32_t> free;
  std::set<TaskRef> done;
  std::set<TaskRef> failed;
  uint32_t take() {
    if (free.empty()) {
      chunks.emplace_back();
      return static_cast<uint32_t>(chunks.size());
    }
    const uint32_t index = free.back();
    free.pop_back();
    return index;
  }
  void give(uint32_t index) { free.push_back(index); }
  Chunk& chunk(uint32_t index) { return chunks[index - 1]; }
  bool is_settled(TaskRef ref) const {
    const TaskRef task = without_flags(ref);
    return done.count(task) != 0 && ((ref & kCarriesPoison) == 0 || failed.count(task) == 0);
  }
  size_t num_used() const { return chunks.size() - free.size(); }
};

struct Buffer {
  AccessState state;
  ScriptedPool pool;
  uint32_t next = 1;

  static TaskRef name(uint32_t task) { return make_ref(1, task); }
  /// Submits the next task with this access; returns the tasks it waits for ("3" or "3!" when it inherits failure).
  std::set<std::string> access(int mode) {
    std::set<std::string> producers;
    collect(state, pool, mode, [&](TaskRef ref) {
      producers.insert(std::to_string(slot_of(ref)) + ((ref & kCarriesPoison) != 0 ? "!" : ""));
    });
    record(state, pool, mode, name(next++));
    return producers;
  }
  void complete(uint32_t task, bool fails = false) {
    pool.done.insert(name(task));
    if (fails) pool.failed.insert(name(task));
  }
};

using Set = std::set<std::string>;

}  // namespace

CASE("read after write, several readers side by side, write after read") {
  Buffer b;
  EXPECT(b.access(PTO_OUTPUT) == Set{});
  EXPECT(b.access(PTO_INPUT) == Set{"1!"});
  EXPECT(b.access(PTO_INPUT) == Set{"1!"});
  EXPECT(b.access(PTO_INPUT) == Set{"1!"});
  EXPECT(b.access(PTO_OUTPUT) == (Set{"2", "3", "4"}));
  EXPECT(b.access(PTO_INPUT) == Set{"5!"});
  EXPECT_EQ(b.pool.num_used(), size_t{0});
}

CASE("write after write carries the failure only to those who read") {
  Buffer b;
  b.access(PTO_OUTPUT);
  EXPECT(b.access(PTO_OUTPUT) == Set{"1"});
  EXPECT(b.access(PTO_INOUT) == Set{"2!"});
  EXPECT(b.access(PTO_INOUT) == Set{"3!"});
}

CASE("a reader-writer behind readers waits for them and still hears of the writer's failure") {
  Buffer b;
  b.access(PTO_OUTPUT);
  b.access(PTO_INPUT);
  b.access(PTO_INPUT);
  EXPECT(b.access(PTO_INOUT) == (Set{"1!", "2", "3"}));
}

CASE("commuting tasks wait for what was before, not for each other; who follows waits for all") {
  Buffer b;
  b.access(PTO_OUTPUT);
  b.access(PTO_INPUT);
  EXPECT(b.access(PTO_COMMUTE) == (Set{"1!", "2"}));
  EXPECT(b.access(PTO_COMMUTE) == (Set{"1!", "2"}));
  EXPECT(b.access(PTO_COMMUTE) == (Set{"1!", "2"}));
  EXPECT(b.access(PTO_INPUT) == (Set{"3!", "4!", "5!"}));
  EXPECT(b.access(PTO_INPUT) == (Set{"3!", "4!", "5!"}));
  EXPECT(b.access(PTO_OUTPUT) == (Set{"6", "7"}));
}

CASE("a buffer read for ever stays bounded, and so does one that only commutes") {
  for (const int mode : {PTO_INPUT, PTO_COMMUTE}) {
    Buffer b;
    b.access(PTO_OUTPUT);
    b.complete(1);
    for (uint32_t t = 2; t < 20'000; ++t) {
      b.access(mode);
      if (t > 10) b.complete(t - 10);
    }
    EXPECT(b.pool.chunks.size() < 16);
    b.access(PTO_OUTPUT);
    EXPECT_EQ(b.pool.num_used(), size_t{0});
  }
}

CASE("pruning keeps every reader that still runs") {
  Buffer b;
  b.access(PTO_OUTPUT);
  std::set<std::string> live;
  for (uint32_t t = 2; t < 2000; ++t) {
    b.access(PTO_INPUT);
    if (t % 100 != 0) {
      b.complete(t);
    } else {
      live.insert(std::to_string(t));
    }
  }
  const Set producers = b.access(PTO_OUTPUT);
  for (const std::string& reader : live) EXPECT(producers.count(reader) == 1);
  EXPECT(producers.size() < 60);
}

CASE("a failed writer behind completed readers is remembered until it is overwritten") {
  Buffer b;
  b.access(PTO_OUTPUT);
  b.complete(1, true);
  for (uint32_t t = 2; t < 500; ++t) {
    EXPECT(b.access(PTO_INPUT) == Set{"1!"});
    b.complete(t);
  }
  EXPECT(b.access(PTO_INOUT).count("1!") == 1);
  b.access(PTO_OUTPUT);
  EXPECT(b.access(PTO_INPUT).count("1!") == 0);
}

CASE("failed commuting tasks are never pruned") {
  Buffer b;
  for (uint32_t t = 1; t < 300; ++t) {
    b.access(PTO_COMMUTE);
    b.complete(t, t == 50);
  }
  EXPECT(b.access(PTO_INPUT).count("50!") == 1);
}

CASE("all modes in all orders: the last writer and every reader since are always waited for") {
  const int modes[] = {PTO_INPUT, PTO_OUTPUT, PTO_INOUT, PTO_COMMUTE};
  for (int code = 0; code < 1024; ++code) {
    Buffer b;
    std::vector<std::set<uint32_t>> before(1);  // all that a task waits for, directly or not
    std::vector<int> kinds{-1};
    for (int t = 0, rest = code; t < 5; ++t, rest /= 4) {
      const int mode = modes[rest % 4];
      std::set<uint32_t> all;
      for (const std::string& producer : b.access(mode)) {
        const auto number = static_cast<uint32_t>(std::stoul(producer));
        all.insert(number);
        all.insert(before[number].begin(), before[number].end());
      }
      for (uint32_t earlier = 1; earlier < kinds.size(); ++earlier) {
        const bool shares = kinds[earlier] == mode && (mode == PTO_INPUT || mode == PTO_COMMUTE);
        bool is_group = shares;
        for (uint32_t between = earlier + 1; between < kinds.size(); ++between) {
          is_group = is_group && kinds[between] == mode;
        }
        EXPECT_EQ(all.count(earlier) != 0, !is_group);
      }
      before.push_back(all);
      kinds.push_back(mode);
    }
  }
}

CASE("more live edges than the tables hold: the task is refused, and those accepted keep their order") {
  using tilewise::tasks::Engine;
  tilewise::tasks::Options options;
  options.window = 512;
  options.max_chunks = 24;  // 168 references
  std::fill_n(options.worker_types, 1, uint8_t{0xF});
  for (const bool is_plain : {false, true}) {
    const auto engine = Engine::open(options);
    using tilewise::tasks::testing::Gate;
    Gate gate;
    const pto_kernel held = engine->add_kernel("held", Gate::kernel, 0);
    const pto_kernel add = engine->add_kernel("add", tilewise::tasks::testing::add_kernel, 0);
    const pto_kernel copy = engine->add_kernel("copy", tilewise::tasks::testing::copy_kernel, 0);
    int64_t x = 1, sum = 0, seen = -1, always = 1;
    const pto_handle hx = engine->register_buffer(&x, 8), hsum = engine->register_buffer(&sum, 8);
    const pto_handle hseen = engine->register_buffer(&seen, 8), halways = engine->register_buffer(&always, 8);
    const auto submit = [&](pto_kernel kernel, std::vector<pto_param> params, std::vector<uint64_t> scalars) {
      pto_task_spec spec{};
      spec.kernel = kernel;
      spec.worker_type = PTO_VECTOR;
      spec.params = params.data();
      spec.num_params = static_cast<uint32_t>(params.size());
      spec.scalars = scalars.data();
      spec.num_scalars = static_cast<uint32_t>(scalars.size());
      spec.predicate = is_plain ? 0 : halways;  // one more than a plain task has: the general way
      return engine->submit(spec);
    };
    const auto param = [](pto_mode mode, pto_handle handle) { return pto_param{mode, 0, handle, 0, nullptr, nullptr}; };
    submit(held, {param(PTO_INOUT, hx)}, {reinterpret_cast<uint64_t>(&gate)});
    gate.await_inside(1);
    // A chain on `sum`, of readers of x: with one of them the references run out, after `sum` has been told of it.
    int64_t accepted = 0;
    bool is_refused = false;
    while (accepted < 400 && !is_refused) {
      try {
        submit(add, {param(PTO_INOUT, hsum), param(PTO_INPUT, hx)}, {});
        ++accepted;
      } catch (const tilewise::tasks::StatusError& error) {
        is_refused = true;
        EXPECT_EQ(error.status, PTO_NO_MEMORY);
      }
    }
    EXPECT(is_refused && accepted > 20);
    const pto_task behind = submit(copy, {param(PTO_OUTPUT, hseen), param(PTO_INPUT, hsum)}, {});
    EXPECT_EQ(engine->wait(behind, 0.01, true), PTO_TIMEOUT);  // behind all that were accepted
    gate.open();
    EXPECT_EQ(engine->wait_all(30, false), PTO_OK);
    EXPECT_EQ(seen, accepted);
    EXPECT_EQ(sum, accepted);
    engine->close();
  }
}

TILEWISE_TEST_MAIN
