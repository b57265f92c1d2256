// The ordering rule alone, with a scripted pool: which tasks an access waits for, and what it records.
#include "tasks/order/dependencies.h"

#include <deque>
#include <set>

#include "base/testing.h"

using namespace tilewise::tasks;

namespace {

/// A pool that counts its chunks; the test sets which tasks have completed and failed.
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
  /// Submits the next task with this access; returns the tasks it waits for ("3", or "3!" if it inherits failure).
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

CASE("read after write, several readers at once, write after read") {
  Buffer b;
  EXPECT(b.access(PTO_OUTPUT) == Set{});
  EXPECT(b.access(PTO_INPUT) == Set{"1!"});
  EXPECT(b.access(PTO_INPUT) == Set{"1!"});
  EXPECT(b.access(PTO_INPUT) == Set{"1!"});
  EXPECT(b.access(PTO_OUTPUT) == (Set{"2", "3", "4"}));
  EXPECT(b.access(PTO_INPUT) == Set{"5!"});
  EXPECT_EQ(b.pool.num_used(), size_t{0});
}

CASE("write after write passes failures on only to readers") {
  Buffer b;
  b.access(PTO_OUTPUT);
  EXPECT(b.access(PTO_OUTPUT) == Set{"1"});
  EXPECT(b.access(PTO_INOUT) == Set{"2!"});
  EXPECT(b.access(PTO_INOUT) == Set{"3!"});
}

CASE("a reader-writer after readers waits for them and still gets the writer's failure") {
  Buffer b;
  b.access(PTO_OUTPUT);
  b.access(PTO_INPUT);
  b.access(PTO_INPUT);
  EXPECT(b.access(PTO_INOUT) == (Set{"1!", "2", "3"}));
}

CASE("commuting tasks wait for earlier ones, not for each other; later tasks wait for all") {
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

CASE("the state of a buffer that is only read stays bounded, and so does one that only commutes") {
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

CASE("a failed writer before completed readers is remembered until it is overwritten") {
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
    std::vector<std::set<uint32_t>> before(1);  // all that a task waits for, directly or indirectly
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

TILEWISE_TEST_MAIN
