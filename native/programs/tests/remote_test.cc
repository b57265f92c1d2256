// Programs with devices on several hosts: the same memory as the sequential oracle's, with an MPI that delays and
// reorders messages; memory of other hosts; failures that reach every process.
#include <random>

#include "programs/tests/testing_remote.h"

using namespace tilewise;
using namespace tilewise::programs;
using namespace tilewise::programs::testing;

namespace {

void expect_ring(int64_t devices, const std::vector<int64_t>& hosts, int64_t workers, int64_t window, int64_t epochs) {
  auto program = ring(devices, epochs);
  RemoteGroup group(program, hosts, workers, window, 11);
  Oracle oracle(*program);
  for (int run = 0; run < 3; ++run) {
    group.leader().run(program, {});
    oracle.run();
    EXPECT(same_memory(group, oracle, devices));
  }
  for (const std::string& failure : group.end()) EXPECT_EQ(failure, std::string());
  for (auto& connection : group.connections) EXPECT_EQ(connection->cause(), std::string());
}

/// Every device posts 12 rows of 6 to the next, which copies them, two pieces per task: whole rows, or some columns.
std::shared_ptr<Program> copies(int64_t devices, bool is_dense, int64_t num_calls) {
  auto program = program_of(devices);
  for (int64_t d = 0; d < devices; ++d) {
    const int64_t next = (d + 1) % devices;
    const int64_t before = (d + devices - 1) % devices;
    for (int64_t t = 0; t < 4; ++t) program->add_tensor(d, tensor(t * 1024, 12, 6, 3, 4 * t));
    const int64_t plan = program->add_template(d, "call");
    program->add_instr(
        d, plan, instr("hash", 12, 3, {by_row(0, kInOut), by_row(1, kInOut)}, {2, d, 0}, {}, {{0, next, 0, true}}),
        "show");
    const auto columns = [&](Operand operand) {
      if (!is_dense) operand.mode = Mode::kRowCols, operand.part = 1, operand.parts = 4;
      return operand;
    };
    program->add_instr(d, plan,
                       instr("copy_pairs", 12, 3,
                             {columns(by_row(2, kOut)), columns(peer_row(0, before)), columns(by_row(3, kOut)),
                              columns(peer_row(1, before))},
                             {}, {{0, true, 1}}, {{0, before, 4, true}}),
                       "copy");
    program->add_instr(d, plan, instr("", 12, 3, {by_row(0, kIn), by_row(1, kIn)}, {}, {{4, true, 1}}), "acknowledged");
    for (int64_t c = 0; c < num_calls; ++c) program->add_call(d, {plan, {0, 1, 2, 3}, {}});
  }
  program->finish({}, resolve);
  return program;
}

/// Whether runs of puts() on hosts give the oracle's memory, which may be that of another seed.
bool agrees(Put put, const std::vector<int64_t>& hosts, bool posts_to_third, int64_t seed = 0) {
  const auto devices = std::ssize(hosts);
  auto program = puts(devices, put, posts_to_third, 10);
  RemoteGroup group(program, hosts, 2, 16, 40 + static_cast<uint64_t>(devices));
  const auto reference = puts(devices, put, posts_to_third, 10, seed);
  Oracle oracle(*reference);
  bool is_same = true;
  for (int run = 0; run < 2 && is_same; ++run) {
    group.leader().run(program, {});
    oracle.run();
    is_same = same_memory(group, oracle, devices);
  }
  for (const std::string& failure : group.end()) EXPECT_EQ(failure, std::string());
  return is_same;
}

}  // namespace

CASE("tiles written in another host's memory have landed when a post of their task is seen") {
  for (const Put put : kPuts) {
    EXPECT(agrees(put, {0, 1}, false));
    EXPECT(agrees(put, {0, 1, 2}, false));
    EXPECT(agrees(put, {0, 1, 2}, true));
    EXPECT(agrees(put, {0, 0, 1, 1}, true));
    EXPECT(!agrees(put, {0, 1}, false, 1));
  }
}

CASE("elements written in another host's memory count as transfers of the writer; what it also reads counts twice") {
  for (const Put put : kPuts) {
    auto program = puts(2, put, false, 1);
    RemoteGroup group(program, {0, 1});
    group.leader().run(program, {});
    const int64_t columns = put == Put::kColumns || put == Put::kIntoColumns ? 4 : 6;
    const int64_t times = put == Put::kFromPeer ? 3 : put == Put::kInOut ? 2 : 1;
    EXPECT_EQ(group.leader().transfers().at("put")[0], times * 12 * columns);
    const bool is_hash = put == Put::kInOut || put == Put::kFromPeer;
    EXPECT_EQ(group.leader().stats().bytes_fetched, is_hash ? (times - 1) * 12 * 6 * 8 : 0);
  }
}

CASE("contiguous tiles that a task only copies to another host are sent from where they are, without its kernel") {
  for (const Put put : {Put::kRows, Put::kIntoColumns, Put::kColumns}) {
    auto program = puts(2, put, false, 1);
    RemoteGroup group(program, {0, 1});
    const std::byte* const memory = group.leader().memory(0, 0, 0);
    std::atomic<int64_t> num_direct = 0;
    group.world.watch([&](const std::byte* data) { num_direct += data >= memory && data < memory + 8192 ? 1 : 0; });
    group.leader().run(program, {});
    group.world.watch({});
    EXPECT(put == Put::kColumns ? num_direct == 0 : num_direct >= 4);
  }
}

CASE("a task that fails before it has written another host's memory fails the run, and the next run is right") {
  for (const Put put : kPuts) {
    auto program = puts(2, put, false, 4);
    RemoteGroup group(program, {0, 1}, 1, 64, 3, {{Injected::kThrow, 1, "put", 0}});
    bool has_failed = false;
    try {
      group.leader().run(program, {});
    } catch (const TaskFailed& failed) {
      has_failed = failed.device == 1 && failed.op == "put";
    }
    EXPECT(has_failed);
    for (int64_t d = 0; d < 2; ++d) std::memset(group.owner(d).memory(d, 0, 0), 0, program->needs(d).arena_bytes);
    Oracle oracle(*program);
    group.leader().run(program, {});
    oracle.run();
    EXPECT(same_memory(group, oracle, 2));
    for (auto& connection : group.connections) EXPECT_EQ(connection->cause(), std::string());
  }
}

CASE("copies of another host's tiles arrive at their destination, with and without gaps between rows") {
  for (const bool is_dense : {true, false}) {
    auto program = copies(2, is_dense, 20);
    RemoteGroup group(program, {0, 1}, 2, 16, 21);
    Oracle oracle(*program);
    for (int run = 0; run < 2; ++run) {
      group.leader().run(program, {});
      oracle.run();
      EXPECT(same_memory(group, oracle, 2));
    }
    const int64_t columns = is_dense ? 6 : 4;
    EXPECT_EQ(group.leader().stats().bytes_fetched, int64_t{2} * 20 * 2 * 12 * columns * 8);
  }
}

CASE("two hosts of one device each compute the same as one process, run after run") {
  expect_ring(2, {0, 1}, 1, 512, 100);
}

CASE("several processes on a host, several devices in a process, small windows") {
  expect_ring(4, {0, 0, 1, 1}, 2, 4, 30);
  expect_ring(5, {0, 1, 1}, 1, 16, 30);
  expect_ring(3, {0, 1, 2}, 1, 8, 30);
}

CASE("the leader reads and writes memory and files of another host, and no other bytes") {
  auto program = ring(2, 1);
  ExecutorOptions options = options_of(*program, 1, 8);
  options.file_bytes = 3 * 4096;
  options.file_directory = "/tmp";
  RemoteGroup group(program, {0, 1}, options);
  using Way = memory::SpillFile::Way;
  const int64_t size = options.arena_bytes[1];
  std::vector<std::byte> written(size), read(size);
  for (int64_t i = 0; i < size; ++i) written[i] = static_cast<std::byte>(i * 7);
  group.leader().move(Way::kWrite, 1, 0, written.data(), size);
  EXPECT(std::memcmp(group.owner(1).memory(1, 0, size), written.data(), size) == 0);
  group.leader().move(Way::kRead, 1, 0, read.data(), size);
  EXPECT(read == written);
  const int64_t file = memory::Arena::file_begin(size);
  std::vector<std::byte> page(4096, std::byte{9}), page_read(4096);
  group.leader().move(Way::kWrite, 1, file + 4096, page.data(), 4096);
  group.owner(1).move(Way::kRead, 1, file + 4096, page_read.data(), 4096);
  EXPECT(page_read == page);
  std::fill(page_read.begin(), page_read.end(), std::byte{0});
  group.leader().move(Way::kRead, 1, file + 4096, page_read.data(), 4096);
  EXPECT(page_read == page);
}

CASE("the owner rejects requests for memory that does not exist") {
  using Way = memory::SpillFile::Way;
  const auto is_lost = [](auto&& body) {
    try {
      body();
    } catch (const PeerLost&) {
      return true;
    }
    return false;
  };
  for (const auto& [offset, bytes] : {std::pair<int64_t, int64_t>{1 << 20, 8}, {-8, 8}, {0, 1 << 20}}) {
    for (const Way way : {Way::kRead, Way::kWrite}) {
      auto program = ring(2, 1);
      auto group = std::make_unique<RemoteGroup>(program, std::vector<int64_t>{0, 1});
      std::vector<std::byte> memory(bytes);
      std::thread other([&] {  // the rejecting process sends nothing more, and the other would wait long
        while (!group->connections[1]->has_failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        group->connections[0]->fail("the other has ended");
      });
      EXPECT(is_lost([&] { group->leader().move(way, 1, offset, memory.data(), bytes); }));
      other.join();
      EXPECT(group->connections[1]->cause().find("must name memory of this process") != std::string::npos);
    }
  }
}

CASE("a process that does not lead writes memory of another host, but no file") {
  auto program = ring(2, 1);
  ExecutorOptions options = options_of(*program, 1, 8);
  options.file_bytes = 4096;
  options.file_directory = "/tmp";
  RemoteGroup group(program, {0, 1}, options);
  using Way = memory::SpillFile::Way;
  std::vector<std::byte> memory(64, std::byte{5});
  group.end();
  group.owner(1).move(Way::kWrite, 0, 64, memory.data(), 64);
  EXPECT(std::memcmp(group.owner(0).memory(0, 64, 64), memory.data(), 64) == 0);
  std::thread other([&] {
    while (!group.connections[0]->has_failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    group.connections[1]->fail("the other has ended");
  });
  const int64_t file = memory::Arena::file_begin(options.arena_bytes[0]);
  const std::string message =
      message_of<PeerLost>([&] { group.owner(1).move(Way::kWrite, 0, file, memory.data(), 64); });
  other.join();
  EXPECT(contains(message, "the other has ended"));
  EXPECT(contains(group.connections[0]->cause(), "must name memory of this process"));
}

CASE("MPI never gets the memory of move()'s caller, who may free it when a process is lost") {
  auto program = ring(2, 1);
  const int64_t size = program->needs(1).arena_bytes;
  std::vector<std::byte> memory(size);
  std::atomic<int64_t> num_seen = 0;
  std::atomic<int64_t> num_of_host = 0;
  RemoteGroup group(program, {0, 1});
  group.world.watch([&](const std::byte* data) {
    ++num_seen;
    if (data >= memory.data() && data < memory.data() + size) ++num_of_host;
  });
  for (const auto way : {memory::SpillFile::Way::kWrite, memory::SpillFile::Way::kRead})
    group.leader().move(way, 1, 0, memory.data(), size);
  group.end();
  EXPECT(num_seen > 0 && num_of_host == 0);
}

CASE("arbitrary messages are accepted or end the connection, and change no memory") {
  std::mt19937_64 random(31);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const int64_t odd[] = {0, 1, 2, 7, 8, 64, 255, 4096, 1 << 20, int64_t{1} << 40, INT64_MAX, INT64_MIN, -1, -8};
  auto program = ring(2, 1);
  int64_t num_refused = 0;
  int64_t num_taken = 0;
  for (int trial = 0; trial < 60; ++trial) {
    RemoteGroup group(program, {0, 1}, 1, 8, trial);
    std::byte* const memory = group.leader().memory(0, 0, 0);
    const auto size = static_cast<size_t>(program->needs(0).arena_bytes);
    std::memset(memory, 0x5a, size);
    const std::vector<std::byte> before(memory, memory + size);
    for (int n = 0; n < 40 && !group.connections[0]->has_failed(); ++n) {
      comm::Message message;
      message.kind = static_cast<uint16_t>(draw(0, 9));
      message.flags = static_cast<uint16_t>(draw(0, 2));
      message.group = draw(0, 9) == 0 ? odd[draw(0, 13)] : 5;
      message.tag = static_cast<int32_t>(draw(0, 3));
      for (int64_t& number : message.numbers) number = draw(0, 3) == 0 ? draw(0, 300) : odd[draw(0, 13)];
      group.connections[1]->send(0, message, std::string(draw(0, 1) * draw(0, 100), '\xff'));
      num_taken += 1;
    }
    for (int looks = 0; looks < 2000 && !group.connections[0]->has_failed(); ++looks)
      group.connections[1]->progress(), group.connections[0]->progress();
    EXPECT(std::memcmp(memory, before.data(), size) == 0);
    num_refused += group.connections[0]->has_failed() ? 1 : 0;
    group.connections[0]->fail("the trial is over");
    group.connections[1]->fail("the trial is over");
  }
  EXPECT(num_refused > 30 && num_taken > 600);
}

CASE("a kernel that throws on any host is reported by the leader, and the next run is right") {
  for (const int64_t device : {1, 0}) {
    auto program = ring(2, 20);
    RemoteGroup group(program, {0, 1}, 1, 64, 3, {{Injected::kThrow, device, "show", 5}});
    bool has_failed = false;
    try {
      group.leader().run(program, {});
    } catch (const TaskFailed& failed) {
      has_failed = failed.device == device;
    }
    EXPECT(has_failed);
    group.leader().run(program, {});
    for (auto& connection : group.connections) EXPECT_EQ(connection->cause(), std::string());
  }
}

CASE("a process whose connection breaks is named by each of the others") {
  auto program = ring(3, 100'000, "slow", {1});
  RemoteGroup group(program, {0, 1, 2}, 1, 64, 4);
  std::thread breaker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    group.world.break_rank(2);
  });
  std::string message;
  try {
    group.leader().run(program, {});
  } catch (const PeerLost& lost) {
    message = lost.what();
  }
  breaker.join();
  EXPECT(message.find("process 2") != std::string::npos && message.find("has not responded") != std::string::npos);
  const std::vector<std::string>& failures = group.end();
  EXPECT(failures[1].find("every process must stay") != std::string::npos);
  EXPECT(failures[2].find("connection reset") != std::string::npos);
}

TILEWISE_TEST_MAIN
