// See world.h.
#include "comm/world.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/quiet_thread.h"

namespace tilewise::comm {

namespace {

// Device groups of these messages; those of executors count from 1.
constexpr int64_t kFrames = -1;
constexpr int64_t kAlive = -2;
constexpr int64_t kProbes = -3;

constexpr int64_t kIsLast = 1;  // marks the last heartbeat
constexpr int64_t kBeatNs = 200'000'000;
constexpr int64_t kEndNs = 30'000'000'000;
constexpr int64_t kGoneNs = 10'000'000'000;
constexpr std::chrono::milliseconds kPause{5};

Message message_for(int64_t group, int64_t number) {
  Message message;
  message.group = group;
  message.numbers[0] = number;
  return message;
}

/// Whether a message's size is valid; otherwise the connection fails.
bool is_bounded(Connection& connection, int64_t from, int64_t bytes, int64_t most) {
  if (bytes >= 0 && bytes <= most) return true;
  connection.fail("a message must have at most " + std::to_string(most) + " bytes; got " + std::to_string(bytes) +
                  " from process " + std::to_string(from));
  return false;
}

}  // namespace

// ---- frames ------------------------------------------------------------------------------------------------------

Frames::Frames(Connection& connection) : connection_(connection), frames_(connection.size()) {
  connection_.join(kFrames, *this);
}

Frames::~Frames() { connection_.leave(kFrames); }

void Frames::take(int64_t from, const Message& message, const std::string& /*text*/) {
  const int64_t bytes = message.numbers[0];
  if (!is_bounded(connection_, from, bytes, kMostFrame)) return;
  const auto frame = std::make_shared<Frame>();
  frame->bytes.resize(bytes);
  {
    std::lock_guard guard(mutex_);
    frames_[from].push_back(frame);
  }
  connection_.receive(from, message, reinterpret_cast<std::byte*>(frame->bytes.data()), bytes, [this, frame] {
    std::lock_guard guard(mutex_);
    frame->is_whole = true;
  });
}

bool Frames::has_frame(int64_t from) {
  std::lock_guard guard(mutex_);
  return !frames_[from].empty() && frames_[from].front()->is_whole;
}

bool Frames::send(int64_t to, std::string bytes, int64_t limit_ns) {
  check<ArgumentError>(std::ssize(bytes) <= kMostFrame, "[comm.Frames.send] a frame must have at most ", kMostFrame,
                       " bytes; got ", bytes.size(), "; divide it");
  const auto frame = std::make_shared<std::string>(std::move(bytes));
  const auto is_gone = std::make_shared<std::atomic<bool>>(false);
  connection_.put(to, message_for(kFrames, std::ssize(*frame)), reinterpret_cast<const std::byte*>(frame->data()),
                  std::ssize(*frame), [frame, is_gone] { is_gone->store(true, std::memory_order_release); });
  return connection_.wait(limit_ns, [&] { return is_gone->load(std::memory_order_acquire); });
}

std::optional<std::string> Frames::receive(int64_t from, int64_t limit_ns) {
  check<ArgumentError>(from >= 0 && from < connection_.size() && from != connection_.rank(),
                       "[comm.Frames.receive] frames must come from another of ", connection_.size(),
                       " processes; got ", from, "; correct the argument");
  if (!connection_.wait(limit_ns, [&] { return has_frame(from); })) return std::nullopt;
  std::lock_guard guard(mutex_);
  std::string bytes = std::move(frames_[from].front()->bytes);
  frames_[from].pop_front();
  return bytes;
}

// ---- heartbeat ---------------------------------------------------------------------------------------------------

Heartbeat::Heartbeat(Connection& connection)
    : connection_(connection), quiet_ns_(connection.size()), ended_(connection.size()) {
  ended_[connection.rank()].store(true, std::memory_order_relaxed);
  connection_.join(kAlive, *this);
  thread_ = quiet_thread([this] { beat(); });
}

Heartbeat::~Heartbeat() {
  stop();
  connection_.leave(kAlive);
}

void Heartbeat::stop() {
  is_ending_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
}

void Heartbeat::take(int64_t from, const Message& message, const std::string& /*text*/) {
  quiet_ns_[from].store(0, std::memory_order_relaxed);
  if (message.numbers[0] == kIsLast) ended_[from].store(true, std::memory_order_release);
}

// Messages of one process keep their order, so none that MPI's end would have to wait for follows its last one.
bool Heartbeat::end(int64_t limit_ns, int64_t quiet_limit_ns) {
  stop();
  for (int64_t p = 0; p < connection_.size(); ++p) {
    if (p != connection_.rank()) connection_.send(p, message_for(kAlive, kIsLast));
  }
  for (auto& quiet : quiet_ns_) quiet.store(0, std::memory_order_relaxed);
  const int64_t until = now_ns() + limit_ns;
  int64_t last_ns = now_ns();
  while (!connection_.wait(kBeatNs, [this] { return have_ended(); })) {
    listen(last_ns);
    if (connection_.has_failed() || last_ns > until) return false;
    for (int64_t p = 0; p < connection_.size(); ++p) {
      const bool has_ended = ended_[p].load(std::memory_order_relaxed);
      if (!has_ended && quiet_ns(p) > quiet_limit_ns) return false;
    }
  }
  return true;
}

bool Heartbeat::have_ended() const {
  return std::all_of(ended_.begin(), ended_.end(),
                     [](const auto& has_ended) { return has_ended.load(std::memory_order_acquire); });
}

// Only time in which this thread was awake counts, so that no process is lost while the machine is suspended.
void Heartbeat::listen(int64_t& last_ns) {
  const int64_t now = now_ns();
  const int64_t passed = std::min(now - last_ns, 2 * kBeatNs);
  last_ns = now;
  for (auto& quiet : quiet_ns_) quiet.fetch_add(passed, std::memory_order_relaxed);
}

void Heartbeat::beat() {
  pthread_setname_np(pthread_self(), "tw-connection");
  int64_t last_ns = now_ns();
  int64_t sent_ns = 0;
  while (!is_ending_.load(std::memory_order_relaxed) && !connection_.has_failed()) {
    connection_.progress();
    std::this_thread::sleep_for(kPause);
    listen(last_ns);
    if (last_ns - sent_ns <= kBeatNs) continue;
    sent_ns = last_ns;
    for (int64_t p = 0; p < connection_.size(); ++p) {
      if (p != connection_.rank()) connection_.send(p, message_for(kAlive, 0));
    }
  }
}

// ---- probes ------------------------------------------------------------------------------------------------------

Probes::Probes(Connection& connection) : connection_(connection) { connection_.join(kProbes, *this); }

Probes::~Probes() { connection_.leave(kProbes); }

void Probes::take(int64_t from, const Message& message, const std::string& /*text*/) {
  const int64_t bytes = message.numbers[0];
  if (!is_bounded(connection_, from, bytes, kMostProbe)) return;
  if (zeros_.empty()) zeros_.resize(kMostProbe);
  connection_.reply(from, message, zeros_.data(), bytes, {});
}

int64_t Probes::measure(int64_t from, int64_t bytes, int64_t limit_ns) {
  check<ArgumentError>(bytes >= 0 && bytes <= kMostProbe, "[comm.Probes.measure] a probe must have 0 to ", kMostProbe,
                       " bytes; got ", bytes, "; request fewer");
  const auto into = std::make_shared<std::vector<std::byte>>(bytes);
  const auto has_come = std::make_shared<std::atomic<bool>>(false);
  const int64_t begun = now_ns();
  connection_.get(from, message_for(kProbes, bytes), into->data(), bytes, [into, has_come] { has_come->store(true); });
  return connection_.wait(limit_ns, [&] { return has_come->load(); }) ? now_ns() - begun : -1;
}

// ---- world -------------------------------------------------------------------------------------------------------

void World::leave() {
  if (heartbeat_.end(kEndNs, kGoneNs)) {
    connection_->finish();
  } else {
    connection_->fail("a process has not ended in time");
  }
}

}  // namespace tilewise::comm
