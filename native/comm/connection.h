// Messages between processes without shared memory, over MPI (mpi/tilewise_mpi.h).
//
// Purpose: short messages, and payloads, which are bytes copied from memory to memory. A message announces a payload,
// of the sender (put) or of the receiver (get), and the payload uses the message's tag. MPI makes no progress by
// itself, so progress() must be called repeatedly: by idle workers, and by one thread of every executor while all
// workers compute (remote_peers.h).
//
// Who may call: any thread. One thread at a time is inside MPI; the others put their operations into the outbox.
// Blocks: only leave(), wait() and finish(). A receiver's take() and completion callbacks run inside progress(); they
// must neither wait nor call leave(). Memory: the owner of a payload keeps it until its end is reported. Memory order:
// the receiver of a message sees what happened before it was posted.
//
// Trusts nothing: a message is checked before any of it is used (transport.h), and the receiver checks what it names.
// After the first error nothing is passed to MPI any more; cause() returns the error, and ends are no longer reported.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace tilewise::comm {

/// Takes the messages of a device group.
class Receiver {
 public:
  virtual ~Receiver() = default;
  virtual void take(int64_t from, const Message& message, const std::string& text) = 0;
};

class Connection {
 public:
  using Done = Operation::Done;

  /// mpi: already started; it outlives this.
  explicit Connection(const TilewiseMpi& mpi);

  int64_t rank() const { return transport_.rank(); }
  int64_t size() const { return transport_.size(); }

  /// Delivers messages of that device group to the receiver until leave(), after which no operation of the device group
  /// is pending.
  void join(int64_t group, Receiver& receiver);
  void leave(int64_t group);

  void send(int64_t to, const Message& message, const std::string& text = {});
  /// Sends a message and a payload.
  void put(int64_t to, const Message& message, const std::byte* data, int64_t bytes, Done done);
  /// Sends a message that requests a payload.
  void get(int64_t to, const Message& message, std::byte* into, int64_t bytes, Done done);
  /// Receives the payload of the other's put(), or sends the payload for its get().
  void receive(int64_t from, const Message& message, std::byte* into, int64_t bytes, Done done);
  void reply(int64_t to, const Message& message, const std::byte* data, int64_t bytes, Done done);

  /// Returns whether anything has moved. Does nothing while another thread is inside.
  bool progress();
  /// The same, but only if the last call was some time ago: for threads with other work.
  void progress_if_due();
  /// Makes progress until the condition is true. Returns false after limit_ns or if the connection has failed.
  bool wait(int64_t limit_ns, const std::function<bool()>& condition);
  /// Ends MPI, which waits for all other processes, once no operation is pending.
  void finish();
  /// Why the connection has failed; empty if it has not. fail() has no effect after the first failure.
  std::string cause() const { return failure_.cause(); }
  bool has_failed() const { return failure_.is_set(); }
  void fail(const std::string& cause) { failure_.set(cause); }
  ConnectionTraffic traffic() const { return transport_.traffic(); }

 private:
  void check_bytes(int64_t peer, int64_t bytes) const;
  bool has_payload(int64_t from, const Message& message, bool is_get);
  int32_t new_tag(bool is_get);
  void queue(std::vector<Operation::Owned> operations);
  bool step();
  bool is_pending(int64_t group);

  Failure failure_;

  std::mutex outbox_mutex_;
  std::deque<Operation::Owned> outbox_;
  std::atomic<bool> has_mail_{false};
  std::map<int64_t, int64_t> num_pending_;  // operations per device group
  int32_t last_tag_ = 0;

  std::mutex mutex_;  // guards all members below
  Transport transport_;
  std::map<int64_t, Receiver*> receivers_;

  std::atomic<int64_t> last_progress_ns_{0};
};

}  // namespace tilewise::comm
