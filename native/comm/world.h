// The processes that a launcher started together: the connection between them, and its traffic besides the runs of
// device groups: frames, heartbeats, probes.
//
// Purpose: `Frames` are ordered bytes between a leader and its workers. `Heartbeat` reports now and then that this
// process is alive, and makes progress if no other thread does; so a silent process has ended or is stopped. `Probes`
// measure a link over the path that tiles take. Who may call: any thread. Blocks: send, receive and measure up to their
// limits; leave() for all other processes. Trusts nothing: an impossible message fails the connection.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/connection.h"

namespace tilewise::comm {

inline constexpr int64_t kMostProbe = int64_t{1} << 26;
inline constexpr int64_t kMostFrame = int64_t{1} << 28;

class Frames final : private Receiver {
 public:
  explicit Frames(Connection& connection);
  ~Frames() override;
  Frames(const Frames&) = delete;
  Frames& operator=(const Frames&) = delete;

  /// False: it was not taken for so long.
  bool send(int64_t to, std::string bytes, int64_t limit_ns);
  /// None: nothing came for so long, or the connection has failed.
  std::optional<std::string> receive(int64_t from, int64_t limit_ns);

 private:
  struct Frame {
    std::string bytes;
    bool is_whole = false;
  };

  void take(int64_t from, const Message& message, const std::string& text) override;
  bool has_frame(int64_t from);

  Connection& connection_;
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Frame>>> frames_;  // per sender, as they were announced
};

class Heartbeat final : private Receiver {
 public:
  explicit Heartbeat(Connection& connection);
  ~Heartbeat() override;
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// Says to all that nothing more will come from here, and waits for the same of them. False: one has not said so in
  /// time, or nothing was heard of it for so long.
  bool end(int64_t limit_ns, int64_t quiet_limit_ns);
  /// For how long nothing was heard of a process while this one was awake.
  int64_t quiet_ns(int64_t process) const { return quiet_ns_[process].load(std::memory_order_relaxed); }

 private:
  void take(int64_t from, const Message& message, const std::string& text) override;
  void beat();
  void stop();
  bool have_ended() const;
  /// Counts the time since the last call as quiet.
  void listen(int64_t& last_ns);

  Connection& connection_;
  std::vector<std::atomic<int64_t>> quiet_ns_;  // per process
  std::vector<std::atomic<bool>> ended_;  // the same; itself has
  std::atomic<bool> is_ending_{false};
  std::thread thread_;
};

class Probes final : private Receiver {
 public:
  explicit Probes(Connection& connection);
  ~Probes() override;
  Probes(const Probes&) = delete;
  Probes& operator=(const Probes&) = delete;

  /// How long it takes until so many bytes have come from a process that were asked for; -1: longer than that.
  int64_t measure(int64_t from, int64_t bytes, int64_t limit_ns);

 private:
  void take(int64_t from, const Message& message, const std::string& text) override;

  Connection& connection_;
  std::vector<std::byte> zeros_;  // once they were asked for
};

class World {
 public:
  /// mpi: already started; it outlives this.
  explicit World(const TilewiseMpi& mpi)
      : connection_(std::make_shared<Connection>(mpi)),
        frames_(*connection_),
        probes_(*connection_),
        heartbeat_(*connection_) {}

  const std::shared_ptr<Connection>& connection() const { return connection_; }
  Frames& frames() { return frames_; }
  Probes& probes() { return probes_; }
  const Heartbeat& heartbeat() const { return heartbeat_; }
  /// Sends what is left, and ends MPI with all other processes.
  void leave();

 private:
  std::shared_ptr<Connection> connection_;
  Frames frames_;
  Probes probes_;
  Heartbeat heartbeat_;
};

}  // namespace tilewise::comm
