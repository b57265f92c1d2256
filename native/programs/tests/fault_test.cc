// Faults: kernels that throw, cancelled runs, workers that stop, deadlines.
#include "programs/tests/testing_programs.h"

using namespace tilewise;
using namespace tilewise::programs;
using namespace tilewise::programs::testing;

namespace {

/// Devices exchange `epochs` times: "show" posts to the peer, "look" waits for it and acknowledges.
std::shared_ptr<Program> exchange(int64_t epochs, const std::string& kernel = "increment",
                                  const std::vector<Number>& ints = {}) {
  auto program = program_of(2);
  for (int64_t d = 0; d < 2; ++d) {
    program->add_tensor(d, tensor(0, 4, 1, 1, 0));
    program->add_tensor(d, tensor(256, 4, 1, 1, 4));
    const int64_t plan = program->add_template(d, "epoch");
    program->add_instr(d, plan, instr(kernel, 4, 1, {by_row(0, kInOut)}, ints, {}, {{0, 1 - d, 0, true}}), "show");
    program->add_instr(
        d, plan,
        instr("hash", 4, 1, {by_row(1, kInOut), peer_row(0, 1 - d)}, {1, d, 0}, {{0, true, 1}}, {{0, 1 - d, 4, true}}),
        "look");
    program->add_instr(d, plan, instr("", 4, 1, {by_row(0, kIn)}, {}, {{4, true, 1}}), "acknowledged");
    for (int64_t e = 0; e < epochs; ++e) program->add_call(d, {plan, {0, 1}, {}});
  }
  program->finish({}, resolve);
  return program;
}

}  // namespace

CASE("a kernel that throws raises once, with op, tile, worker and device, and the next run is right") {
  auto program = exchange(20);
  auto executor = executor_for(*program, 2);
  for (int round = 0; round < 50; ++round) {
    executor->inject(Injected::kThrow, round % 2, "look", round);
    bool posted = false;
    try {
      executor->run(program, {});
    } catch (const TaskFailed& error) {
      posted = true;
      EXPECT_EQ(error.op, "look");
      EXPECT_EQ(error.tile, round % 4);
      EXPECT_EQ(error.device, round % 2);
      EXPECT(error.worker == 0 || error.worker == 1);
      EXPECT(contains(error.what(), "injected failure"));
    }
    EXPECT(posted);
    for (int64_t d = 0; d < 2; ++d) std::memset(words(*executor, d), 0, program->needs(d).arena_bytes);
    Oracle oracle(*program);
    executor->run(program, {});
    oracle.run();
    EXPECT(same_memory(*executor, oracle, 2));
  }
}

CASE("a kernel's own exception is the message; later signals are still posted (nothing hangs)") {
  auto program = exchange(50, "throwing", {2});
  auto executor = executor_for(*program);
  const std::string message = message_of<TaskFailed>([&] { executor->run(program, {}); });
  EXPECT(contains(message, "[programs.Executor.run]"));
  EXPECT(contains(message, "'kernel gave up'"));
  EXPECT(contains(message, "'show'[2]"));
}

CASE("cancel: tasks not started are skipped, signals are posted, the next run is complete") {
  auto program = exchange(2000, "slow");
  auto executor = executor_for(*program);
  const int64_t start = now_ns();
  EXPECT(contains(message_of<Interrupted>([&] { executor->run(program, {}, "", [] { return true; }); }), "cancelled"));
  EXPECT(now_ns() - start < 30'000'000'000);  // the tasks of a complete run sleep for 40 s
  auto quick = exchange(10);
  for (int64_t d = 0; d < 2; ++d) std::memset(words(*executor, d), 0, quick->needs(d).arena_bytes);
  Oracle oracle(*quick);
  executor->run(quick, {});
  oracle.run();
  EXPECT(same_memory(*executor, oracle, 2));
}

CASE("a stopped worker: the timeout names wait, signal, values, the late device and its activity") {
  auto program = exchange(10);
  auto executor = executor_for(*program, 1, 512, 0.3);
  executor->inject(Injected::kStall, 1, "show", 6);
  const std::string message = message_of<CommTimeout>([&] { executor->run(program, {}); });
  EXPECT(contains(message, "within 0.3 s"));
  EXPECT(contains(message, "device 0 waits in 'look'["));
  EXPECT(contains(message, "for signal 2 to reach 2 (seen 1)"));
  EXPECT(contains(message, "device 1 (worker 0 has stopped at 'show'[2]"));
  EXPECT(contains(message_of<ArgumentError>([&] { executor->run(program, {}); }), "deadline"));
  executor->close();
}

CASE("a stopped worker whose signals no task waits for is reported as well") {
  auto program = program_of(1);
  const int64_t plan = program->add_template(0, "t");
  program->add_instr(0, plan, instr("slow", 3, 1, {}), "alone");
  program->add_call(0, {plan, {}});
  program->finish({}, resolve);
  auto executor = executor_for(*program, 1, 512, 0.2);
  executor->inject(Injected::kStall, 0, "alone", 1);
  const std::string message = message_of<CommTimeout>([&] { executor->run(program, {}); });
  EXPECT(contains(message, "worker 0 has stopped at 'alone'[1]"));
}

CASE("a chain of waits is reported at its start") {
  // 2 waits for 1, 1 waits for 0, 0 has stopped.
  auto program = program_of(3);
  for (int64_t d = 0; d < 3; ++d) {
    const int64_t plan = program->add_template(d, "t");
    Instr link = instr("", 1, 1, {});
    if (d > 0) link.waits = {{0, false, 1}};
    if (d < 2) link.notifies = {{0, d + 1, 0, false}};
    program->add_instr(d, plan, link, "link");
    program->add_call(d, {plan, {}});
  }
  program->finish({}, resolve);
  auto executor = executor_for(*program, 1, 512, 0.2);
  executor->inject(Injected::kStall, 0, "link", 0);
  const std::string message = message_of<CommTimeout>([&] { executor->run(program, {}); });
  EXPECT(contains(message, "device 1 waits in 'link'[0]"));
  EXPECT(contains(message, "device 0 (worker 0 has stopped"));
}

CASE("with a second worker a stopped one delays only its own task") {
  auto program = exchange(10);
  auto executor = executor_for(*program, 2, 512, 0.3);
  executor->inject(Injected::kStall, 0, "acknowledged", 39);  // nothing depends on the very last
  const std::string message = message_of<CommTimeout>([&] { executor->run(program, {}); });
  EXPECT(contains(message, "has stopped at 'acknowledged'[3]"));
  EXPECT(contains(message, "worker 1 is idle") || contains(message, "worker 0 is idle"));
}

CASE("a long run with progress within the deadline is no timeout") {
  auto program = program_of(2);
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t plan = program->add_template(d, "t");
    Instr step =
        d == 0 ? instr("slow", 60, 1, {}, {}, {}, {{0, 1, 0, false}}) : instr("", 1, 0, {}, {}, {{0, false, 60}});
    program->add_instr(d, plan, step, "step");
    program->add_call(d, {plan, {}});
  }
  program->finish({}, resolve);
  executor_for(*program, 1, 512, 0.2)->run(program, {});  // 0.3 s in all, always with progress
}

CASE("a kernel that takes longer than the deadline is no timeout") {
  auto program = program_of(2);
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t plan = program->add_template(d, "t");
    Instr step =
        d == 0 ? instr("slow", 1, 1, {}, {400}, {}, {{0, 1, 0, false}}) : instr("", 1, 0, {}, {}, {{0, false, 1}});
    program->add_instr(d, plan, step, "step");
    program->add_call(d, {plan, {}});
  }
  program->finish({}, resolve);
  executor_for(*program, 1, 512, 0.1)->run(program, {});
}

CASE("faults planted for other labels or later tasks do nothing, and last one run only") {
  auto program = exchange(2);
  auto executor = executor_for(*program);
  executor->inject(Injected::kThrow, 0, "nowhere", 0);
  executor->inject(Injected::kThrow, 0, "show", 1000);
  executor->run(program, {});
  executor->run(program, {});
}

CASE("two runs at once: the second is rejected, and so are queries during a run") {
  auto program = exchange(20, "slow");
  auto executor = executor_for(*program);
  std::atomic<bool> entered{false};
  std::thread first([&] {
    executor->run(program, {}, "", [&] {
      entered = true;
      return false;
    });
  });
  while (!entered) std::this_thread::yield();
  EXPECT(contains(message_of<ArgumentError>([&] { executor->run(program, {}); }), "one run at a time"));
  EXPECT(contains(message_of<ArgumentError>([&] { executor->stats(); }), "no run may be in progress"));
  first.join();
}

TILEWISE_TEST_MAIN
