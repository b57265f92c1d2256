// Messages between processes that share no memory, over MPI (mpi/tilewise_mpi.h).
//
// Purpose: letters, which are short and tell something, and payloads, which are bytes from memory to memory. A payload
// is announced by a letter, that of its sender (give) or that of its receiver (ask), and travels under the letter's
// tag. MPI makes no progress by itself, so progress() must be called again and again: by idle workers, and by one
// thread of every executor while all of them compute (comm/peers.cc).
//
// A thread of the wire's own says now and then that this process is alive, and makes progress where no other does; so a
// process that is heard of no more is gone, or stands still.
//
// Who may call: any thread; one at a time is inside MPI, the others leave what they have in the outbox. Blocks:
// nothing but leave(), send_frame, receive_frame and the destructor; a receiver's take() and what is called at an end
// run inside progress(), and must neither wait nor call leave(). Memory: of a payload it stays its owner's until the
// end was told. Memory order: what happened before a letter was posted is seen by who takes it.
//
// Trusts nothing: a letter's mark, kind, sequence and length are checked before anything of it is used, a payload's
// length before its end is told; what a letter names is checked by who takes it. After the first error nothing is
// handed to MPI any more: cause() says which it was, and no end is told.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/mpi/tilewise_mpi.h"

namespace tilewise::comm {

/// The fixed part of a message. Those who take it fill in nothing but kind, team, tag and numbers.
struct Letter {
  static constexpr int64_t kNumbers = 6;

  uint32_t mark = 0;
  uint16_t kind = 0;
  uint16_t flags = 0;
  uint64_t sequence = 0;  // from this sender to this receiver
  int64_t team = 0;  // whom it is for
  int32_t tag = 0;  // of the payload that it announces; 0: none
  int32_t length = 0;  // of the text that follows
  int64_t numbers[kNumbers] = {};
};

inline constexpr int64_t kMostText = 8192;
inline constexpr int64_t kMostPayload = int64_t{1} << 30;
inline constexpr int64_t kMostProbe = int64_t{1} << 26;
inline constexpr int64_t kMostFrame = int64_t{1} << 28;

/// Takes the letters of a team.
class Receiver {
 public:
  virtual ~Receiver() = default;
  virtual void take(int64_t from, const Letter& letter, const std::string& text) = 0;
};

/// Bytes of payloads, of tasks and of the host alike.
struct WireTraffic {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
};

class Wire {
 public:
  using Done = std::function<void()>;

  /// mpi: already started; it outlives this. beats: with the thread that says that this process is alive.
  explicit Wire(const TilewiseMpi& mpi, bool beats = false);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  /// Letters of that team go to the receiver, until leave(): then nothing of the team is under way.
  void join(int64_t team, Receiver& receiver);
  void leave(int64_t team);

  void post(int64_t to, const Letter& letter, std::string text = {});
  /// A letter, and these bytes.
  void give(int64_t to, const Letter& letter, const std::byte* data, int64_t bytes, Done done);
  /// A letter that asks for bytes.
  void ask(int64_t to, const Letter& letter, std::byte* into, int64_t bytes, Done done);
  /// The payload of a letter that has come: of one that gives, or for one that asks.
  void receive(int64_t from, const Letter& letter, std::byte* into, int64_t bytes, Done done);
  void reply(int64_t to, const Letter& letter, const std::byte* data, int64_t bytes, Done done);

  /// Whether anything has moved. Does nothing while another thread is at it.
  bool progress();
  /// The same if the last one was a while ago: for threads that have something better to do.
  void progress_if_due();
  /// Makes progress until something holds. False: it did not for so long, or this has failed.
  bool wait(int64_t limit_ns, const std::function<bool()>& holds);
  /// Sends what is left, and ends MPI, which waits for all other processes.
  void finish();
  /// Why it has ended; empty while it goes well. fail: the first cause stands.
  std::string cause() const;
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  void fail(const std::string& cause);
  WireTraffic traffic() const;
  /// For how long nothing was heard of a process while this one was awake.
  int64_t quiet_ns(int64_t process) const { return quiet_ns_[process].load(std::memory_order_relaxed); }

  /// How long it takes until so many bytes have come from a process that were asked for; -1: longer than that.
  int64_t probe(int64_t from, int64_t bytes, int64_t limit_ns);

  // Frames: bytes for the process itself, in order.

  /// False: it was not taken for so long.
  bool send_frame(int64_t to, std::string bytes, int64_t limit_ns);
  /// None: nothing came for so long, or this has failed.
  std::optional<std::string> receive_frame(int64_t from, int64_t limit_ns);

 private:
  struct Operation;
  using Owned = std::unique_ptr<Operation>;

  void check_bytes(int64_t peer, int64_t bytes) const;
  bool has_payload(int64_t from, const Letter& letter);
  int32_t new_tag(bool is_asked);
  void queue(std::vector<Owned> operations);
  bool step();
  bool start(Owned operation);
  bool take_letter();
  void deliver(int64_t from, const Letter& letter, const std::string& text);
  void answer_probe(int64_t from, const Letter& letter);
  void begin_frame(int64_t from, const Letter& letter);
  bool has_frame(int64_t from);
  bool end_done();
  bool is_under_way(int64_t team);
  bool check_error(int32_t error, const char* what);
  void beat();
  void stop_beating();

  const TilewiseMpi& mpi_;
  int64_t rank_;
  int64_t size_;
  int32_t tag_max_;

  std::mutex outbox_mutex_;
  std::deque<Owned> outbox_;
  std::atomic<bool> has_mail_{false};
  std::map<int64_t, int64_t> under_way_;  // per team, operations that have not ended
  int32_t last_tag_ = 0;

  std::mutex mutex_;  // of all below, and of MPI
  std::vector<Owned> running_;
  size_t next_tested_ = 0;  // of them
  std::vector<uint64_t> num_sent_;  // letters, per receiver
  std::vector<uint64_t> num_received_;  // per sender
  std::map<int64_t, Receiver*> receivers_;
  std::vector<std::byte> letter_;
  std::vector<std::byte> probed_;  // zeros

  struct Frame {
    std::string bytes;
    bool is_whole = false;
  };
  std::mutex frames_mutex_;
  std::vector<std::deque<std::shared_ptr<Frame>>> frames_;  // per sender, as they were announced

  std::atomic<bool> has_failed_{false};
  mutable std::mutex cause_mutex_;
  std::string cause_;
  std::atomic<int64_t> bytes_sent_{0};
  std::atomic<int64_t> bytes_received_{0};

  std::vector<std::atomic<int64_t>> quiet_ns_;  // per process
  std::atomic<int64_t> last_progress_ns_{0};
  std::atomic<bool> is_ending_{false};
  std::thread beats_;
};

}  // namespace tilewise::comm
