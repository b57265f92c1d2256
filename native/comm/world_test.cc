// Frames, heartbeats and probes between processes, over a test MPI of threads that delays them.
#include "comm/world.h"

#include <thread>

#include "base/clock.h"
#include "base/testing.h"
#include "comm/testing_mpi.h"

using namespace tilewise;
using namespace tilewise::comm;
using tilewise::comm::testing::FakeWorld;

namespace {

constexpr int64_t kPatience = 20'000'000'000;

}  // namespace

CASE("frames arrive in order between threads, and a missing one is reported in time") {
  FakeWorld world(2, 3);
  World one(world.rank(0));
  World other(world.rank(1));
  std::thread echo([&] {
    for (int64_t n = 0; n < 60; ++n) {
      const auto frame = other.frames().receive(0, kPatience);
      EXPECT(frame.has_value() && other.frames().send(0, *frame + "!", kPatience));
    }
  });
  for (int64_t n = 0; n < 60; ++n) {
    EXPECT(one.frames().send(1, std::string(n * 999, static_cast<char>('a' + n % 26)), kPatience));
  }
  for (int64_t n = 0; n < 60; ++n) {
    EXPECT(one.frames().receive(1, kPatience) == std::string(n * 999, static_cast<char>('a' + n % 26)) + "!");
  }
  echo.join();
  EXPECT(!one.frames().receive(1, 1'000'000).has_value());
  EXPECT(!one.connection()->has_failed());
}

CASE("a probe measures its bytes, and both sides reject an invalid one") {
  FakeWorld world(2, 9);
  World one(world.rank(0));
  World other(world.rank(1));
  EXPECT(one.probes().measure(1, 100'000, kPatience) > 0);
  EXPECT(one.probes().measure(1, 0, kPatience) > 0);
  EXPECT_EQ(one.connection()->traffic().bytes_received, int64_t{100'000});
  Message message;
  message.group = -3;
  message.numbers[0] = kMostProbe + 1;
  std::byte into{};
  one.connection()->get(1, message, &into, 1, {});
  EXPECT(one.connection()->wait(kPatience, [&] { return other.connection()->has_failed(); }));
  EXPECT(other.connection()->cause().find("at most") != std::string::npos);
  one.connection()->fail("the other process has ended");
}

CASE("a stopped process is silent, an idle one is not") {
  FakeWorld world(3, 8);
  World one(world.rank(0));
  World idle(world.rank(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  EXPECT(one.heartbeat().quiet_ns(1) < 600'000'000 && one.heartbeat().quiet_ns(2) > 600'000'000);
}

CASE("processes end together, and none before the reports of all") {
  FakeWorld world(3, 10, 9);
  std::vector<std::unique_ptr<World>> worlds;
  for (int32_t r = 0; r < 3; ++r) worlds.push_back(std::make_unique<World>(world.rank(r)));
  std::vector<std::thread> leaving;
  std::atomic<int> num_left{0};
  for (int r = 0; r < 2; ++r) leaving.emplace_back([&, r] { worlds[r]->leave(), num_left.fetch_add(1); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(num_left.load(), 0);
  worlds[2]->leave();
  for (std::thread& thread : leaving) thread.join();
  for (auto& of : worlds) EXPECT_EQ(of->connection()->cause(), std::string("the connection has ended"));
}

CASE("an end waits for a busy process, but not for a lost one") {
  FakeWorld world(3, 11);
  Connection one(world.rank(0));
  Heartbeat beats(one);
  const World busy(world.rank(1));
  const int64_t begun = now_ns();
  EXPECT(!beats.end(kPatience, 1'000'000'000));  // the third process is silent
  EXPECT(now_ns() - begun < 10'000'000'000);
  EXPECT(beats.quiet_ns(1) < 1'000'000'000 && beats.quiet_ns(2) > 1'000'000'000);
  one.fail("the test is over");
  busy.connection()->fail("the test is over");
}

TILEWISE_TEST_MAIN
