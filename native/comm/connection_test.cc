// Messages and payloads between processes, over a test MPI of threads that delays them; and rejected messages.
#include "comm/connection.h"

#include <thread>

#include "base/check.h"
#include "base/testing.h"
#include "comm/testing_mpi.h"

using namespace tilewise;
using namespace tilewise::comm;
using tilewise::comm::testing::FakeWorld;

namespace {

constexpr int64_t kPatience = 20'000'000'000;
constexpr int64_t kGroup = 7;

struct Taken {
  int64_t from;
  Message message;
  std::string text;
};

class Collector final : public Receiver {
 public:
  std::vector<Taken> taken;
  std::function<void(int64_t, const Message&)> also;

 private:
  void take(int64_t from, const Message& message, const std::string& text) override {
    taken.push_back({from, message, text});
    if (also) also(from, message);
  }
};

Message message_of(uint16_t kind, int64_t number = 0) {
  Message message;
  message.kind = kind;
  message.group = kGroup;
  message.numbers[0] = number;
  return message;
}

/// Makes progress for both until the condition is true.
bool until(Connection& one, Connection& other, const std::function<bool()>& condition) {
  for (int64_t looks = 0; looks < 100'000; ++looks) {
    one.progress();
    other.progress();
    if (condition()) return true;
  }
  return false;
}

}  // namespace

CASE("messages arrive complete and in order from any thread") {
  FakeWorld world(2, 1);
  Connection one(world.rank(0));
  Connection other(world.rank(1));
  Collector collector;
  other.join(kGroup, collector);
  for (int64_t n = 0; n < 500; ++n) one.send(1, message_of(3, n), std::string(n % 70, 'x'));
  EXPECT(until(one, other, [&] { return collector.taken.size() == 500; }));
  for (int64_t n = 0; n < 500; ++n) {
    EXPECT(collector.taken[n].from == 0 && collector.taken[n].message.numbers[0] == n);
    EXPECT(collector.taken[n].message.kind == 3 && std::ssize(collector.taken[n].text) == n % 70);
  }
  other.leave(kGroup);
  one.send(1, message_of(3));
  EXPECT(until(one, other, [&] { return !one.progress() && !other.progress(); }));
  EXPECT(collector.taken.size() == 500);
}

CASE("hundreds of concurrent put() and get() payloads reach their memory") {
  FakeWorld world(2, 2, 9);
  Connection one(world.rank(0));
  Connection other(world.rank(1));
  Collector collector;
  Collector requester;
  constexpr int64_t kCount = 400;
  std::vector<std::vector<std::byte>> sent, put(kCount), got(kCount);
  for (int64_t n = 0; n < kCount; ++n) {
    sent.emplace_back(n * 17 % 3000, static_cast<std::byte>(n));
    put[n].resize(sent[n].size());
    got[n].resize(sent[n].size());
  }
  int64_t num_ended = 0;
  collector.also = [&](int64_t from, const Message& message) {
    const int64_t n = message.numbers[0];
    if (message.kind == 1) other.receive(from, message, put[n].data(), std::ssize(put[n]), [&] { ++num_ended; });
    if (message.kind == 2) other.reply(from, message, sent[n].data(), std::ssize(sent[n]), [&] { ++num_ended; });
  };
  one.join(kGroup, requester);
  other.join(kGroup, collector);
  for (int64_t n = 0; n < kCount; ++n) {
    one.put(1, message_of(1, n), sent[n].data(), std::ssize(sent[n]), [&] { ++num_ended; });
    one.get(1, message_of(2, n), got[n].data(), std::ssize(got[n]), [&] { ++num_ended; });
  }
  EXPECT(until(one, other, [&] { return num_ended == 4 * kCount; }));
  EXPECT(put == sent && got == sent);
  const int64_t bytes = one.traffic().bytes_sent;
  EXPECT(bytes > 0 && one.traffic().bytes_received == bytes && other.traffic().bytes_sent == bytes);
}

CASE("an invalid or out-of-order message ends the connection and is not delivered") {
  struct Fault {
    const char* name;
    std::function<void(std::vector<std::byte>&)> spoil;
  };
  const auto set = [](size_t place, uint8_t value) {
    return [=](std::vector<std::byte>& message) { message[place] = std::byte{value}; };
  };
  const Fault faults[] = {
      {"mark", set(0, 0)},
      {"number", set(8, 99)},
      {"length", set(28, 1)},
      {"tag", set(27, 0x80)},
      {"short", [](std::vector<std::byte>& message) { message.resize(10); }},
      {"long", [](std::vector<std::byte>& message) { message.resize(100'000); }},
      {"nothing", [](std::vector<std::byte>& message) { message.clear(); }},
  };
  for (const Fault& fault : faults) {
    FakeWorld world(2, 4, 0);
    Connection one(world.rank(0));
    Connection other(world.rank(1));
    Collector collector;
    other.join(kGroup, collector);
    world.spoil = [&](std::vector<std::byte>& message, int32_t tag) {
      if (tag == 0) fault.spoil(message);
    };
    one.send(1, message_of(3));
    EXPECT(until(one, other, [&] { return other.has_failed(); }));
    EXPECT(collector.taken.empty() && !other.cause().empty());
    if (!other.has_failed()) std::fprintf(stderr, "%s\n", fault.name);
  }
}

CASE("a payload of another size than announced is not reported as arrived") {
  for (const int64_t difference : {-1, 1}) {
    FakeWorld world(2, 5, 0);
    Connection one(world.rank(0));
    Connection other(world.rank(1));
    Collector collector;
    std::vector<std::byte> data(100), into(100);
    bool has_ended = false;
    collector.also = [&](int64_t from, const Message& message) {
      other.receive(from, message, into.data(), std::ssize(into), [&] { has_ended = true; });
    };
    other.join(kGroup, collector);
    world.spoil = [&](std::vector<std::byte>& message, int32_t tag) {
      if (tag != 0) message.resize(message.size() + difference);
    };
    one.put(1, message_of(1), data.data(), std::ssize(data), {});
    EXPECT(until(one, other, [&] { return other.has_failed(); }));
    EXPECT(!has_ended);
  }
}

CASE("a message with a tag of its receiver ends the connection, and no payload starts") {
  for (const uint16_t kind : {1, 2}) {
    for (const int32_t tag : {0, 5, 6}) {
      FakeWorld world(2, 8, 0);
      Connection one(world.rank(0));
      Connection other(world.rank(1));
      Collector collector;
      std::vector<std::byte> data(100);
      bool is_right = false;
      collector.also = [&](int64_t from, const Message& message) {
        if (kind == 1) other.receive(from, message, data.data(), std::ssize(data), {});
        if (kind == 2) other.reply(from, message, data.data(), std::ssize(data), {});
        is_right = tag == (kind == 1 ? 5 : 6);
      };
      other.join(kGroup, collector);
      Message message = message_of(kind);
      message.tag = tag;
      one.send(1, message);
      EXPECT(until(one, other, [&] { return !collector.taken.empty(); }));
      EXPECT(other.has_failed() != is_right);
      other.fail("the test is over");
    }
  }
}

CASE("an exception of a receiver ends the connection and is its cause") {
  FakeWorld world(2, 9);
  Connection one(world.rank(0));
  Connection other(world.rank(1));
  Collector collector;
  collector.also = [](int64_t, const Message&) { throw std::runtime_error("no memory is left"); };
  other.join(kGroup, collector);
  one.send(1, message_of(3));
  EXPECT(until(one, other, [&] { return other.has_failed(); }));
  EXPECT_EQ(other.cause(), std::string("no memory is left"));
  other.leave(kGroup);
}

CASE("after an error nothing is sent, and waiting ends") {
  FakeWorld world(2, 6);
  Connection one(world.rank(0));
  Collector collector;
  one.join(kGroup, collector);
  std::vector<std::byte> into(10);
  one.get(1, message_of(2), into.data(), std::ssize(into), {});
  world.break_rank(0);
  EXPECT(!one.wait(kPatience, [] { return false; }));
  EXPECT(one.cause().starts_with("MPI could not ") && one.cause().find("connection reset") != std::string::npos);
  one.leave(kGroup);
}

CASE("invalid arguments are rejected") {
  FakeWorld world(2, 7);
  Connection one(world.rank(0));
  const auto is_refused = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const ArgumentError& error) {
      return std::string(error.what()).find("another of 2 processes") != std::string::npos;
    }
    return false;
  };
  EXPECT(is_refused([&] { one.send(0, message_of(1)); }));
  EXPECT(is_refused([&] { one.send(2, message_of(1)); }));
  EXPECT(is_refused([&] { one.receive(-1, message_of(1), nullptr, 0, {}); }));
}

TILEWISE_TEST_MAIN
