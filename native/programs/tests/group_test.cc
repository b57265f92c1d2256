// Programs with devices in several processes: the same memory as the sequential oracle's, failures that reach every
// process, processes that are killed or stopped.
#include "programs/tests/testing_group.h"

using namespace tilewise;
using namespace tilewise::programs;
using namespace tilewise::programs::testing;

namespace {

void clear(Executor& executor, const Program& program) {
  for (int64_t d = 0; d < program.num_devices(); ++d) {
    std::memset(words(executor, d), 0, program.needs(d).arena_bytes);
  }
}

void expect_ring(int64_t devices, int64_t processes, int64_t workers, int64_t window, int64_t epochs) {
  auto program = ring(devices, epochs);
  ForkedGroup group(program, processes, workers, window);
  Oracle oracle(*program);
  for (int run = 0; run < 3; ++run) {
    group.leader().run(program, {});
    oracle.run();
    EXPECT(same_memory(group.leader(), oracle, devices));
  }
  group.leader().call_peers();
  for (int status : group.end_children()) EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == ForkedGroup::kCalled);
}

}  // namespace

CASE("two processes of one device each compute the same as one process, run after run") {
  expect_ring(2, 2, 1, 512, 500);
}

CASE("small windows, several workers, more threads than cores") {
  expect_ring(2, 2, 2, 4, 200);
  expect_ring(4, 4, 2, 16, 200);
}

CASE("several devices in a process, and blocks of unequal size") {
  expect_ring(4, 2, 1, 64, 200);
  expect_ring(3, 2, 1, 64, 200);
  expect_ring(5, 3, 1, 64, 100);
}

CASE("tiles written in the memory of another process are seen after the post, also by a third process") {
  for (const Put put : kPuts) {
    auto program = puts(3, put, true, 50);
    ForkedGroup group(program, 3, 1, 8);
    Oracle oracle(*program);
    group.leader().run(program, {});
    oracle.run();
    EXPECT(same_memory(group.leader(), oracle, 3));
  }
}

CASE("litmus shapes between processes: message passing and reuse in a ring, ISA2 through a third process") {
  expect_ring(2, 2, 1, 8, 4000);
  auto program = program_of(3);  // 0 writes, 1 forwards the signal, 2 reads and acknowledges
  for (int64_t d = 0; d < 3; ++d) {
    program->add_tensor(d, tensor(0, 1, 48, 1, 0));
    program->add_template(d, "epoch");
  }
  program->add_instr(0, 0, instr("increment", 1, 1, {by_row(0, kInOut)}, {}, {}, {{0, 1, 0}}), "write");
  program->add_instr(0, 0, instr("", 1, 1, {by_row(0, kIn)}, {}, {{0, false, 1}}), "acknowledged");
  program->add_instr(1, 0, instr("", 1, 1, {by_row(0, kInOut)}, {}, {{0, false, 1}}, {{0, 2, 0}}), "pass on");
  program->add_instr(
      2, 0, instr("hash", 1, 1, {by_row(0, kInOut), peer_row(0, 0)}, {1, 7, 0}, {{0, false, 1}}, {{0, 0, 0}}), "read");
  for (int64_t e = 0; e < 4000; ++e) {
    for (int64_t d = 0; d < 3; ++d) program->add_call(d, {0, {0}, {}});
  }
  program->finish({}, resolve);
  ForkedGroup group(program, 3);
  Oracle oracle(*program);
  group.leader().run(program, {});
  oracle.run();
  EXPECT(same_memory(group.leader(), oracle, 3));
}

CASE("a full mailbox blocks its sender and loses nothing") {
  constexpr int64_t kPosts = 10'000;  // while the receiver's worker is busy
  auto program = program_of(2);
  for (int64_t d = 0; d < 2; ++d) {
    program->add_tensor(d, tensor(0, kPosts, 1, 1, 0));
    program->add_template(d, "all");
  }
  program->add_instr(0, 0, instr("increment", kPosts, 1, {by_row(0, kInOut)}, {}, {}, {{0, 1, 0}}), "post");
  program->add_instr(1, 0, instr("slow", 1, 0, {by_row(0, kInOut)}, {300}), "busy");
  program->add_instr(1, 0, instr("increment", 1, 0, {by_row(0, kInOut)}, {}, {{0, false, kPosts}}), "all arrived");
  for (int64_t d = 0; d < 2; ++d) program->add_call(d, {0, {0}, {}});
  program->finish({}, resolve);
  ForkedGroup group(program, 2);
  for (int run = 1; run <= 3; ++run) {
    group.leader().run(program, {});
    EXPECT_EQ(words(group.leader(), 0)[kPosts - 1], static_cast<uint64_t>(run));
    EXPECT_EQ(words(group.leader(), 1)[0], static_cast<uint64_t>(run));
  }
}

CASE("a kernel that throws in another process is reported by the leader, and the next run is right") {
  auto program = ring(2, 20, "throwing", {2});
  ForkedGroup group(program, 2);
  for (int round = 0; round < 3; ++round) {
    bool is_raised = false;
    try {
      group.leader().run(program, {});
    } catch (const TaskFailed& failed) {
      is_raised = true;
      EXPECT_EQ(failed.op, "show");
      EXPECT_EQ(failed.tile, 2);
      EXPECT(failed.device == 0 || failed.device == 1);
      EXPECT(contains(failed.what(), "kernel gave up"));
    }
    EXPECT(is_raised);
  }
}

CASE("a fault planted in the leader stops all processes, and later runs are right") {
  auto program = ring(4, 30);
  ForkedGroup group(program, 4);
  for (int round = 0; round < 5; ++round) {
    group.leader().inject(Injected::kThrow, 0, "look", round);
    EXPECT(!message_of<TaskFailed>([&] { group.leader().run(program, {}); }).empty());
    clear(group.leader(), *program);
    Oracle oracle(*program);
    group.leader().run(program, {});
    oracle.run();
    EXPECT(same_memory(group.leader(), oracle, 4));
  }
}

CASE("a cancelled run ends in every process, and the next one is complete") {
  auto program = ring(2, 1000, "slow", {1});
  ForkedGroup group(program, 2);
  const int64_t start = now_ns();
  int polls = 0;
  const auto cancel = [&polls] { return ++polls == 3; };
  EXPECT(contains(message_of<Interrupted>([&] { group.leader().run(program, {}, "", cancel); }), "cancelled"));
  EXPECT(now_ns() - start < 5'000'000'000);  // the tasks of a complete run sleep longer
  EXPECT(message_of<std::exception>([&] { group.leader().run(program, {}); }).empty());
}

CASE("a killed process is named long before the run's end, with a task that waits for it") {
  auto program = ring(2, 100'000, "slow", {1});
  ForkedGroup group(program, 2);
  int64_t killed_ns = 0;
  int polls = 0;
  const auto kill_one = [&] {
    if (++polls == 3) {
      kill(group.child(1), SIGKILL);
      killed_ns = now_ns();
    }
    return false;
  };
  const std::string message = message_of<PeerLost>([&] { group.leader().run(program, {}, "", kill_one); });
  EXPECT(now_ns() - killed_ns < 30'000'000'000);  // the tasks of a complete run sleep for 500 s
  EXPECT(contains(message, "process 1 (pid " + std::to_string(group.child(1)) + "), which has ended"));
  EXPECT(contains(message, "device 0 waits in '"));
  EXPECT(contains(message_of<ArgumentError>([&] { group.leader().run(program, {}); }), "cannot be used"));
}

CASE("a stopped process is reported as lost after some seconds") {
  auto program = ring(2, 100'000, "slow", {1});
  ForkedGroup group(program, 2);
  const auto stop_one = [&] {
    kill(group.child(1), SIGSTOP);
    return false;
  };
  const std::string message = message_of<PeerLost>([&] { group.leader().run(program, {}, "", stop_one); });
  EXPECT(contains(message, "which has not responded for 5 s"));
}

CASE("when one of three processes is lost, the others leave independently") {
  auto program = ring(3, 100'000, "slow", {1});
  ForkedGroup group(program, 3);
  const auto kill_one = [&] {
    kill(group.child(1), SIGKILL);
    return false;
  };
  EXPECT(contains(message_of<PeerLost>([&] { group.leader().run(program, {}, "", kill_one); }), "process 1"));
  const std::vector<int> statuses = group.end_children();
  EXPECT(WIFSIGNALED(statuses[0]));
  EXPECT(WIFEXITED(statuses[1]) && WEXITSTATUS(statuses[1]) == ForkedGroup::kLost);
}

CASE("messages with invalid names fail the run and change nothing") {
  auto program = ring(2, 10);
  auto executor = executor_for(*program);
  executor->run(program, {});
  for (const auto& [device, signal, run] : std::vector<std::array<int64_t, 3>>{
           {-1, 0, 1}, {2, 0, 1}, {0, -1, 1}, {0, 8, 1}, {1, 0, 1}, {0, 0, 0}, {INT32_MAX, INT32_MIN, 1}}) {
    const int file = sealed_file(comm::Peers::bytes(2));
    DeviceGroup group;
    group.state->peers = std::make_unique<comm::Peers>(comm::PeersOptions{
        .process = 0, .num_processes = 2, .file = file, .ends = {-1, -1}, .take = [&group](const comm::Post& post) {
          take_post(group, post);
        }});
    DeviceOptions options;
    options.num_signals = 8;
    group.devices.push_back(std::make_unique<Device>(group.state, options));
    group.devices.push_back(nullptr);
    group.peers()->settle(0);
    group.peers()->open_run(1);
    group.peers()->post(0, {.run = 1, .device = 0, .signal = 3});
    group.peers()->settle(0);
    EXPECT_EQ(group.devices[0]->signals()[3].value(), 1u);
    EXPECT(group.state->first_error() == nullptr);
    group.peers()->post(0, {.run = static_cast<uint64_t>(run),
                            .device = static_cast<int32_t>(device),
                            .signal = static_cast<int32_t>(signal)});
    group.peers()->settle(0);
    EXPECT(group.state->first_error() != nullptr);
    for (int64_t s = 0; s < 8; ++s) EXPECT_EQ(group.devices[0]->signals()[s].value(), s == 3 ? 1u : 0u);
    close(file);
  }
}

CASE("a message of a run that has not begun waits until it has") {
  const int file = sealed_file(comm::Peers::bytes(2));
  std::vector<uint64_t> taken;
  comm::Peers peers({.process = 0, .num_processes = 2, .file = file, .ends = {-1, -1}, .take = [&](const auto& post) {
                       taken.push_back(post.run);
                     }});
  peers.open_run(1);
  for (uint64_t run : {1, 2, 1}) peers.post(0, {.run = run, .device = 0, .signal = 0});
  peers.settle(0);
  EXPECT_EQ(taken.size(), 1u);
  peers.open_run(2);
  peers.settle(0);
  EXPECT_EQ(taken.size(), 3u);
  close(file);
}

CASE("files other than sealed memory of the right size are rejected") {
  const int loose = memfd_create("loose", MFD_CLOEXEC);
  EXPECT_EQ(ftruncate(loose, 4096), 0);
  const auto refusal = [](int file, int64_t bytes) {
    return message_of<ArgumentError>([&] { memory::SharedFile shared(file, bytes); });
  };
  EXPECT(contains(refusal(loose, 4096), "sealed"));
  EXPECT(contains(refusal(-1, 4096), "sealed"));
  const int file = sealed_file(8192);
  EXPECT(contains(refusal(file, 8193), "size"));
  EXPECT(contains(refusal(file, 0), "size"));
  EXPECT(refusal(file, 8192).empty());
  close(loose);
  close(file);
}

TILEWISE_TEST_MAIN
