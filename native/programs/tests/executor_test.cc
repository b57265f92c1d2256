// Executors end to end: results, tiny windows, signals and acknowledgements between devices, timeline, transfers.
#include "programs/run/executor.h"

#include <sched.h>

#include "programs/tests/testing_group.h"

using namespace tilewise;
using namespace tilewise::programs;
using namespace tilewise::programs::testing;

namespace {

/// Increments every tile of one tensor in place, `calls` times.
std::shared_ptr<Program> counting_program(int64_t calls, int64_t rows = 8, int64_t tile_rows = 2) {
  auto program = program_of(1);
  program->add_tensor(0, tensor(0, rows, 1, tile_rows, 0));
  const int64_t plan = program->add_template(0, "t");
  program->add_instr(0, plan, instr("increment", rows, tile_rows, {by_row(0, kInOut)}), "count");
  for (int64_t c = 0; c < calls; ++c) program->add_call(0, {plan, {0}});
  program->finish({}, resolve);
  return program;
}

/// A ring of devices: each epoch a device hashes its own tile with its left neighbour's of the same epoch (double
/// buffered by parity), with acknowledgement before a tile that the neighbour reads is overwritten.
std::shared_ptr<Program> ring_program(int64_t num_devices, int64_t epochs, int64_t delay) {
  auto program = program_of(num_devices);
  constexpr int64_t kRows = 6;
  for (int64_t d = 0; d < num_devices; ++d) {
    const int64_t left = (d + num_devices - 1) % num_devices;
    const int64_t right = (d + 1) % num_devices;
    program->add_tensor(d, tensor(0, kRows, 4, 2, 0));      // 0: read by the right neighbour
    program->add_tensor(d, tensor(1024, kRows, 4, 2, 3));   // 1: own
    const int64_t plan = program->add_template(d, "epoch");
    // Signals 0..2: the left neighbour's tile is ready. Signals 3..5: the right neighbour has read this device's tile.
    program->add_instr(
        d, plan, instr("hash", kRows, 2, {by_row(0, kInOut), by_row(1, kIn)}, {1, d, delay}, {}, {{0, right, 0, true}}),
        "show");
    program->add_instr(d, plan,
                       instr("hash", kRows, 2, {by_row(1, kInOut), peer_row(0, left)}, {1, d + 50, delay},
                             {{0, true, 1}}, {{0, left, 3, true}}),
                       "look");
    program->add_instr(d, plan, instr("", kRows, 2, {by_row(0, kIn)}, {}, {{3, true, 1}}), "acknowledged");
    for (int64_t e = 0; e < epochs; ++e) program->add_call(d, {plan, {0, 1}, {}});
  }
  program->finish({}, resolve);
  return program;
}

void expect_ring(int64_t devices, int64_t workers, int64_t window, int64_t epochs, int64_t delay) {
  auto program = ring_program(devices, epochs, delay);
  auto executor = executor_for(*program, workers, window);
  Oracle oracle(*program);
  for (int round = 0; round < 3; ++round) {
    executor->run(program, {});
    oracle.run();
    EXPECT(same_memory(*executor, oracle, devices));
  }
}

}  // namespace

CASE("every task runs once, in dependency order") {
  auto program = counting_program(100);
  auto executor = executor_for(*program, 2);
  executor->run(program, {});
  for (int64_t r = 0; r < 8; ++r) EXPECT_EQ(words(*executor, 0)[r], 100u);
  EXPECT_EQ(executor->stats().num_tasks, 400);
}

CASE("windows of 1 to 8 wrap thousands of times (mistakes: arrays by raw id, exactly-full ring, stuck window)") {
  for (int64_t window : {1, 2, 3, 5, 8}) {
    auto program = counting_program(1000);
    auto executor = executor_for(*program, 2, window);
    executor->run(program, {});
    for (int64_t r = 0; r < 8; ++r) EXPECT_EQ(words(*executor, 0)[r], 1000u);
    const int64_t high = executor->stats().window_high_water;
    EXPECT(high >= 1 && high <= window);
  }
}

CASE("several workers of one device run independent tasks at once") {
  auto program = program_of(1);
  const int64_t plan = program->add_template(0, "t");
  program->add_instr(0, plan, instr("slow", 40, 1, {}), "slow");
  program->add_call(0, {plan, {}});
  program->finish({}, resolve);
  auto executor = executor_for(*program, 4);
  const int64_t start = now_ns();
  executor->run(program, {});
  const double elapsed_ms = static_cast<double>(now_ns() - start) * 1e-6;
  EXPECT(elapsed_ms < 40 * 5);  // one after the other, they sleep longer
}

CASE("two devices ping-pong thousands of epochs, peers' tiles read in place, with acknowledgements") {
  expect_ring(2, 1, 512, 1500, 0);
}

CASE("two devices with tiny windows and delays") { expect_ring(2, 2, 4, 200, 2000); }

CASE("three devices") { expect_ring(3, 1, 16, 400, 500); }

CASE("four devices, more threads than cores") { expect_ring(4, 2, 64, 300, 200); }

CASE("an acknowledgement delays the writer until the reader is done (write-after-read between devices)") {
  // Device 1 reads slowly; without the acknowledgement device 0 would overwrite 40 times meanwhile.
  auto program = program_of(2);
  for (int64_t d = 0; d < 2; ++d) {
    program->add_tensor(d, tensor(0, 1, 1, 1, 0));
    const int64_t plan = program->add_template(d, "t");
    if (d == 0) {
      program->add_instr(0, plan, instr("increment", 1, 1, {by_row(0, kInOut)}, {}, {}, {{0, 1, 0, false}}), "write");
      program->add_instr(0, plan, instr("", 1, 1, {by_row(0, kIn)}, {}, {{0, false, 1}}), "acknowledged");
    } else {
      program->add_instr(
          1, plan,
          instr("hash", 1, 1, {by_row(0, kInOut), peer_row(0, 0)}, {1, 9, 20000}, {{0, false, 1}}, {{0, 0, 0, false}}),
          "read");
    }
    for (int c = 0; c < 200; ++c) program->add_call(d, {plan, {0}});
  }
  program->finish({}, resolve);
  auto executor = executor_for(*program, 2);
  Oracle oracle(*program);
  executor->run(program, {});
  oracle.run();
  EXPECT(same_memory(*executor, oracle, 2));
}

CASE("a waiting task occupies no worker: independent tasks run") {
  // Device 0 waits for device 1, whose post depends on device 0's LAST task; one worker each.
  auto program = program_of(2);
  const int64_t here = program->add_template(0, "t");
  program->add_tensor(0, tensor(0, 4, 1, 1, 0));
  program->add_instr(0, here, instr("increment", 4, 1, {by_row(0, kInOut)}, {}, {}, {{0, 1, 0, false}}), "go");
  program->add_instr(0, here, instr("", 1, 1, {}, {}, {{0, false, 1}}), "wait");
  program->add_instr(0, here, instr("increment", 4, 1, {by_row(0, kInOut)}), "after");
  program->add_call(0, {here, {0}});
  const int64_t there = program->add_template(1, "t");
  program->add_instr(1, there, instr("slow", 1, 1, {}, {}, {{0, false, 4}}, {{0, 0, 0, false}}), "answer");
  program->add_call(1, {there, {}});
  program->finish({}, resolve);
  auto executor = executor_for(*program);
  executor->trace(true);
  executor->run(program, {});
  int64_t after_end = 0;
  int64_t wait_start = 0;
  for (const TimelineEntry& entry : executor->timeline()) {
    const std::string& label = executor->timeline_labels()[entry.record.label];
    if (label == "after") after_end = std::max(after_end, entry.record.end_ns);
    if (label == "wait") wait_start = entry.record.start_ns;
  }
  EXPECT(after_end > 0 && after_end < wait_start);
}

CASE("tensors that share bytes take turns: reuse waits for readers of the old contents") {
  // Tensors 0 and 1 share bytes with different tiles; 2 collects what was read.
  auto program = program_of(1);
  Tensor second = tensor(0, 4, 2, 4, 4);
  second.aliases = {0};
  program->add_tensor(0, tensor(0, 8, 1, 2, 0));
  program->add_tensor(0, second);
  program->add_tensor(0, tensor(256, 8, 1, 2, 5));
  program->add_tensor(0, tensor(512, 4, 2, 4, 9));
  const int64_t plan = program->add_template(0, "t");
  program->add_instr(0, plan, instr("hash", 8, 2, {by_row(0, kOut), by_row(2, kIn)}, {1, 1, 500}), "write first");
  program->add_instr(0, plan, instr("hash", 8, 2, {by_row(2, kInOut), by_row(0, kIn)}, {1, 2, 5000}), "read first");
  program->add_instr(0, plan, instr("hash", 4, 4, {by_row(1, kOut), by_row(3, kIn)}, {1, 3, 500}), "write second");
  program->add_instr(0, plan, instr("hash", 4, 4, {by_row(3, kInOut), by_row(1, kIn)}, {1, 4, 5000}), "read second");
  for (int c = 0; c < 300; ++c) program->add_call(0, {plan, {0, 1, 2, 3}});
  program->finish({}, resolve);
  auto executor = executor_for(*program, 4);
  Oracle oracle(*program);
  executor->run(program, {});
  oracle.run();
  EXPECT(same_memory(*executor, oracle, 1));
}

CASE("hints: tasks run on the workers of their op, else of their call; a program needs these workers") {
  auto program = program_of(1);
  program->add_tensor(0, tensor(0, 8, 1, 2, 0));
  const int64_t plan = program->add_template(0, "t");
  Instr own = instr("increment", 8, 2, {by_row(0, kInOut)});
  own.hints = {.workers = {2, 0}, .priority = 5};
  program->add_instr(0, plan, own, "of the op");
  program->add_instr(0, plan, instr("increment", 8, 2, {by_row(0, kInOut)}), "of the call");
  program->add_call(0, {plan, {0}, {}, {.workers = {1}, .priority = 3}});
  program->add_call(0, {plan, {0}});
  program->finish({}, resolve);
  EXPECT_EQ(program->needs(0).num_workers, 3);
  EXPECT(contains(message_of<ArgumentError>([&] { executor_for(*program, 2)->run(program, {}); }), "got worker 2"));
  auto executor = executor_for(*program, 3);
  executor->trace(true);
  executor->run(program, {});
  int64_t num_checked = 0;
  for (const TimelineEntry& entry : executor->timeline()) {
    const tasks::TimelineRecord& record = entry.record;
    if (executor->timeline_labels()[record.label] == "of the op") {
      const int64_t worker = record.row_begin < 4 ? 2 : 0;
      EXPECT(record.worker == worker && record.target == worker + 1 && record.priority == 5);
      ++num_checked;
    } else if (record.target != 0) {
      EXPECT(record.worker == 1 && record.target == 2 && record.priority == 3);
      ++num_checked;
    }
  }
  EXPECT_EQ(num_checked, 2 * 4 + 4);
}

CASE("hints: workers out of range are rejected") {
  for (const int64_t worker : {int64_t{-1}, int64_t{255}}) {
    auto program = program_of(1);
    program->add_tensor(0, tensor(0, 8, 1, 2, 0));
    const int64_t plan = program->add_template(0, "t");
    program->add_call(0, {plan, {0}, {}, {.workers = {worker}}});
    EXPECT(contains(message_of<ArgumentError>([&] { program->finish({}, resolve); }), "a worker must lie in"));
  }
}

CASE("cores: every worker is bound to its own; too few, repeated and missing cores are rejected") {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  int64_t core = 0;
  while (!CPU_ISSET(core, &allowed)) ++core;
  auto program = counting_program(3);
  ExecutorOptions options = options_of(*program, 1);
  options.cores = {core};
  Executor(options).run(program, {});
  const auto message = [&](int64_t workers, std::vector<int64_t> cores) {
    options.workers_per_device = workers;
    options.cores = std::move(cores);
    return message_of<ArgumentError>([&] { const Executor executor(options); });
  };
  EXPECT(contains(message(2, {core}), "1 cores for 2 workers"));
  EXPECT(contains(message(2, {core, core}), "twice"));
  EXPECT(contains(message(1, {CPU_SETSIZE}), "may use"));
  EXPECT(contains(message(1, {-1}), "may use"));
}

CASE("priority: the most urgent ready task starts first") {
  auto program = program_of(1);
  const int64_t plan = program->add_template(0, "t");
  program->add_tensor(0, tensor(0, 1, 1, 1, 0));
  program->add_instr(0, plan, instr("slow", 1, 1, {by_row(0, kOut)}), "gate");
  Instr late = instr("recording", 3, 1, {whole(0, kIn)}, {});
  late.priority = 1;
  Instr urgent = instr("recording", 2, 1, {whole(0, kIn)}, {});
  urgent.extent = 100;
  urgent.step = 99;
  urgent.priority = 5;
  program->add_instr(0, plan, late, "late");
  program->add_instr(0, plan, urgent, "urgent");
  program->add_call(0, {plan, {0}});
  program->finish({}, resolve);
  recorded.clear();
  executor_for(*program)->run(program, {});
  EXPECT_EQ(recorded.size(), 5u);
  EXPECT_EQ(recorded[1].row_begin, 99);
  EXPECT_EQ(recorded[2].row_begin, 0);
  EXPECT_EQ(recorded[4].row_begin, 2);
}

CASE("transfers count every element read from another device, per label and device") {
  auto program = ring_program(2, 10, 0);
  auto executor = executor_for(*program);
  executor->run(program, {});
  executor->run(program, {});
  EXPECT_EQ(executor->transfers().size(), 1u);
  EXPECT(executor->transfers().at("look") == (std::vector<int64_t>{480, 480}));
  executor->reset_transfers();
  EXPECT(executor->transfers().empty());
}

CASE("tiles written in a peer's memory are seen after the post, and count as transfers of the writer") {
  for (const Put put : kPuts) {
    for (const bool posts_to_third : {false, true}) {
      auto program = puts(3, put, posts_to_third, 20);
      auto executor = executor_for(*program, 2, 16);
      Oracle oracle(*program);
      const auto different = puts(3, put, posts_to_third, 20, 1);
      Oracle other(*different);
      for (int run = 0; run < 2; ++run) {
        executor->run(program, {});
        oracle.run();
        other.run();
        EXPECT(same_memory(*executor, oracle, 3));
        EXPECT(!same_memory(*executor, other, 3));
      }
      const int64_t columns = put == Put::kColumns || put == Put::kIntoColumns ? 4 : 6;
      const int64_t times = put == Put::kFromPeer ? 3 : put == Put::kInOut ? 2 : 1;
      EXPECT_EQ(executor->transfers().at("put")[1], times * 2 * 20 * 12 * columns);
    }
  }
}

CASE("a kernel of the user gets the arguments of its task, and its status fails the task") {
  auto program = program_of(1);
  program->add_tensor(0, tensor(0, 6, 4, 2, 0));
  // Adds its first integer, its float and the row to each element; fails at the row of its second integer.
  program->add_kernel("add", [](const tilewise_kernel_args* args) -> int {
    if (args->num_tiles != 2 || args->tiles[1].data != nullptr || args->num_ints != 2 || args->num_floats != 1)
      return 1;
    if (args->scratch_bytes < 64 || reinterpret_cast<uintptr_t>(args->scratch) % 64 != 0) return 2;
    const tilewise_tile& tile = args->tiles[0];
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < tile.cols; ++c) {
        auto& value = static_cast<uint64_t*>(tile.data)[r * tile.stride + c];
        value += static_cast<uint64_t>(args->ints[0] + args->row_begin + r) + static_cast<uint64_t>(args->floats[0]);
      }
    }
    return args->row_begin == args->ints[1] ? -7 : 0;
  });
  Instr add = instr("add", 6, 2, {{0, Mode::kRowCols, kInOut, -1, 0, 1, 1, 2}, {.null = true}});
  add.ints = {100, {0, 1, Source::kCall, 0}};
  add.floats = {0.5 + 1000};
  program->add_instr(0, program->add_template(0, "t"), add, "adds");
  program->add_call(0, {0, {0}, {-1}});
  program->add_call(0, {0, {0}, {4}}, "fails");
  program->finish({}, resolve);
  auto executor = executor_for(*program);
  executor->run(program, {});
  for (int64_t r = 0; r < 6; ++r) {
    for (int64_t c = 0; c < 4; ++c) EXPECT_EQ(words(*executor, 0)[r * 4 + c], c == 0 || c == 3 ? 0u : 1100u + r);
  }
  const std::string message = message_of<TaskFailed>([&] { executor->run(program, {}, "fails"); });
  EXPECT(contains(message, "got 'status -7' from kernel 'add' in 'adds'[2] on device 0, worker 0"));
  executor->run(program, {});
}

CASE("the timeline has every task of the last run, with its times in order") {
  auto program = counting_program(10);
  auto executor = executor_for(*program, 2);
  executor->run(program, {});
  EXPECT(executor->timeline().empty());
  executor->trace(true);
  executor->run(program, {});
  executor->run(program, {});
  const auto timeline = executor->timeline();
  EXPECT_EQ(timeline.size(), 40u);
  for (const TimelineEntry& entry : timeline) {
    const tilewise::tasks::TimelineRecord& r = entry.record;
    EXPECT(r.submit_ns <= r.ready_ns && r.ready_ns <= r.start_ns && r.start_ns <= r.end_ns);
  }
}

CASE("memory over the limit is rejected before anything is mapped") {
  ExecutorOptions options{2, 1, {600, 600}, 3, 5};
  options.scratch_bytes = 100;
  const DeviceBytes own = programs::bytes_needed({.num_signals = 3, .num_handles = 5, .scratch_bytes = 100});
  EXPECT(own.scratch == 100 && own.signals == 3 * 128 && own.engine > 0);
  const int64_t need = 2 * (600 + own.total());
  options.memory_limit_bytes = need - 1;
  const std::string message = message_of<ResourceError>([&] { Executor executor(options); });
  EXPECT(contains(message, "must stay within the limit; got ") && contains(message, "iB against "));
  options.memory_limit_bytes = need;
  const Executor executor(options);
  EXPECT(executor.allocated_bytes() == std::vector<int64_t>(2, need / 2));
}

CASE("a memory view outlives the executor; views outside the arena are rejected") {
  std::shared_ptr<memory::Arena> arena;
  {
    Executor executor({1, 1, {4096}, 0, 0});
    arena = executor.arena(0);
    EXPECT(contains(message_of<ArgumentError>([&] { executor.memory(0, 4090, 7); }), "inside"));
    EXPECT(contains(message_of<ArgumentError>([&] { executor.memory(1, 0, 1); }), "device"));
  }
  arena->data()[4095] = std::byte{1};
}

CASE("meanwhile() is called once, before run() waits") {
  auto program = counting_program(100);
  auto executor = executor_for(*program, 2);
  int calls = 0;
  std::string refused;
  executor->run(program, {}, "", {}, [&] {
    ++calls;
    refused = message_of<ArgumentError>([&] { executor->run(program, {}); });
  });
  EXPECT_EQ(calls, 1);
  EXPECT(contains(refused, "one run at a time"));
  for (int64_t r = 0; r < 8; ++r) EXPECT_EQ(words(*executor, 0)[r], 100u);
}

CASE("a closed executor rejects runs; closing twice is allowed") {
  auto program = counting_program(1);
  auto executor = executor_for(*program);
  executor->close();
  executor->close();
  EXPECT(contains(message_of<ArgumentError>([&] { executor->run(program, {}); }), "closed"));
}

TILEWISE_TEST_MAIN
