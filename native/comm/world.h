// The processes that a launcher started together: the connection between them, and its messages outside the runs of
// device groups: frames, heartbeats, probes.
//
// Purpose: `Frames` are ordered bytes between a leader and its workers. `Heartbeat` regularly reports that this
// process is alive, and makes progress if no other thread does; so a silent process has ended or is stopped. `Probes`
// measure a link over the path that tiles take. Who may call: any thread. Blocks: send, receive and measure up to their
// limits; leave() for all other processes. Trusts nothing: an invalid message fails the connection.
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

  /// Returns false if it was not sent in time.
  bool send(int64_t to, std::string bytes, int64_t limit_ns);
  /// nullopt: nothing arrived in time, or the connection has failed.
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
  std::vector<std::deque<std::shared_ptr<Frame>>> frames_;  // per sender, in the order of announcement
};

class Heartbeat final : private Receiver {
 public:
  explicit Heartbeat(Connection& connection);
  ~Heartbeat() override;
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// Reports to all that this process will send nothing more, and waits for the same report from all. Returns false if
  /// one has not arrived in time, or if a process was silent for quiet_limit_ns.
  bool end(int64_t limit_ns, int64_t quiet_limit_ns);
  /// How long a process has been silent while this one was awake.
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
  std::vector<std::atomic<bool>> ended_;  // per process; true for this one
  std::atomic<bool> is_ending_{false};
  std::thread thread_;
};

class Probes final : private Receiver {
 public:
  explicit Probes(Connection& connection);
  ~Probes() override;
  Probes(const Probes&) = delete;
  Probes& operator=(const Probes&) = delete;

  /// The time in ns to request and receive `bytes` bytes from a process; -1: more than limit_ns.
  int64_t measure(int64_t from, int64_t bytes, int64_t limit_ns);

 private:
  void take(int64_t from, const Message& message, const std::string& text) override;

  Connection& connection_;
  std::vector<std::byte> zeros_;  // allocated by the first request
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
  /// Sends pending messages, and ends MPI together with all other processes.
  void leave();

 private:
  std::shared_ptr<Connection> connection_;
  Frames frames_;
  Probes probes_;
  Heartbeat heartbeat_;
};

}  // namespace tilewise::comm
