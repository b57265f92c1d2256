// The processes that run one program, and their communication: by shared memory on one host, by messages (connection.h)
// to processes on other hosts, which are called remote.
//
// Purpose: one process is the leader. It orders runs, and all others answer when a run has ended. During a run, each
// process posts signals of the others' devices by messages (protocols/mailbox.h) and reports its progress. The signals
// themselves are in their owner's memory. Memory order: the receiver of a post sees what happened before it was sent;
// the receiver of an order or an answer, what happened before that.
//
// A message carries the number of its run, which is that of its order. Devices count signals from the beginning of a
// run. So a message of a run that has not begun here waits until it has, and all messages of earlier runs are received
// before the next one begins. On one host they were sent before the leader learned of their end. Messages of remote
// processes may still be in flight, so each process reports when it has posted its last one of a run, and settle()
// waits for that.
//
// Who may call: post, look, stay, leave: any worker of the process; listen: one thread that does nothing else; the
// rest: the thread that leads or serves. Blocks: post while the other's mailbox is full (it receives its own messages
// meanwhile); await_order and await_answers up to their limits. Trusts nothing: the receiver of a message checks what
// it names. Rejects sizes that do not fit (ArgumentError), and mappings that the system rejects (ResourceError).
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/peer_messages.h"
#include "comm/remote_peers.h"
#include "memory/shared_file.h"
#include "protocols/mailbox.h"
#include "protocols/sleepers.h"

namespace tilewise::comm {

struct PeersOptions {
  int64_t process = 0;  // this process; 0 is the leader
  int64_t num_processes = 1;
  int file = -1;  // of bytes(num_processes) bytes; all processes of this host map it
  std::vector<int> ends;  // per process: a descriptor that is readable after its end; -1: not watched
  /// Takes a message of a run that has begun. Called by one thread at a time.
  std::function<void(const Post&)> take;
  RemoteOptions remote = {};
};

struct PeerBlock;

class Peers {
 public:
  explicit Peers(PeersOptions options);
  ~Peers();
  static int64_t bytes(int64_t num_processes);

  int64_t process() const { return options_.process; }
  int64_t num_processes() const { return options_.num_processes; }
  bool leads() const { return options_.process == 0; }
  bool is_remote(int64_t process) const { return remote_ != nullptr && remote_->has(process); }

  // Posts of signals.

  void post(int64_t process, const Post& post);
  /// See RemotePeers.
  void take_landed(int64_t from, const Post& post) { remote_->take_landed(from, post); }
  void look();
  void stay();
  bool leave();
  /// Until close(): takes messages while no worker does, and reports that this process is alive.
  void listen();
  void close();
  /// After the devices have ended: no post of this run will be sent.
  void end_posts();
  /// Before devices begin: waits until no message of an earlier run is left. Returns false if remote processes have not
  /// confirmed that in time.
  bool settle(int64_t limit_ns);
  /// After devices have begun: accepts messages of this run from now on.
  void open_run(uint64_t number) { run_.store(number, std::memory_order_seq_cst); }
  uint64_t run() const { return run_.load(std::memory_order_relaxed); }

  // Orders and answers.

  /// Sends an order to all; returns its number.
  uint64_t send_order(const Order& order);
  /// Returns false if none has arrived in time.
  bool await_order(int64_t limit_ns, Order* order, uint64_t* number);
  void answer(const Answer& answer);
  /// Waits until all others have answered the last order. Returns false if they have not in time.
  bool await_answers(int64_t limit_ns);
  const Answer& answer_of(int64_t process) const;

  // Progress and failures.

  void report(uint64_t num_completed, bool is_at_work);
  Progress progress(int64_t process) const;
  /// Reports that the run has failed in this process and every process must stop.
  void report_stopped();
  bool is_stopped() const;
  /// A process that has ended, or has not responded for limit_ns while this one was awake; -1: none.
  int64_t find_lost(int64_t limit_ns, std::string* how);
  bool has_ended(int64_t process) const;

 private:
  PeerBlock& block(int64_t process) const;
  bool take(const Post& post);
  bool have_answered() const;

  PeersOptions options_;
  memory::SharedFile memory_;
  std::unique_ptr<RemotePeers> remote_;  // nullptr: all processes share memory
  uint64_t num_ordered_ = 0;  // orders sent, or received
  std::atomic<uint64_t> run_{0};
  std::atomic<bool> is_closed_{false};
  struct Life {
    uint64_t beats = 0;
    int64_t quiet_ns = 0;
  };
  std::vector<Life> lives_;
  int64_t looked_ns_ = 0;
};

}  // namespace tilewise::comm
