// Messages between processes without shared memory, over MPI (mpi/tilewise_mpi.h).
//
// Purpose: short messages, and payloads, which are bytes copied from memory to memory. A message announces a payload,
// either the sender's (give) or the receiver's (ask), and the payload uses the message's tag. MPI makes no progress by
// itself, so progress() must be called again and again: by idle workers, and by one thread of every executor while all
// of them compute (remote_peers.h).
//
// Who may call: any thread. One thread at a time is inside MPI; the others put their operations into the outbox.
// Blocks: only leave(), wait() and finish(). A receiver's take(), and callbacks at an end, run inside progress(); they
// must neither wait nor call leave(). Memory: the owner of a payload keeps it until its end was reported. Memory order:
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

  /// Messages of that device group go to the receiver, until leave(): then nothing of the device group is under way.
  void join(int64_t group, Receiver& receiver);
  void leave(int64_t group);

  void send(int64_t to, const Message& message, const std::string& text = {});
  /// A message, and these bytes.
  void give(int64_t to, const Message& message, const std::byte* data, int64_t bytes, Done done);
  /// A message that asks for bytes.
  void ask(int64_t to, const Message& message, std::byte* into, int64_t bytes, Done done);
  /// The payload of a message that has come: of one that gives, or for one that asks.
  void receive(int64_t from, const Message& message, std::byte* into, int64_t bytes, Done done);
  void reply(int64_t to, const Message& message, const std::byte* data, int64_t bytes, Done done);

  /// Whether anything has moved. Does nothing while another thread is at it.
  bool progress();
  /// The same if the last one was a while ago: for threads that have something better to do.
  void progress_if_due();
  /// Makes progress until something holds. False: it did not for so long, or this has failed.
  bool wait(int64_t limit_ns, const std::function<bool()>& holds);
  /// Ends MPI, which waits for all other processes, once nothing is under way.
  void finish();
  /// Why it has ended; empty while it goes well. fail: the first cause stands.
  std::string cause() const { return failure_.cause(); }
  bool has_failed() const { return failure_.has_come(); }
  void fail(const std::string& cause) { failure_.set(cause); }
  ConnectionTraffic traffic() const { return transport_.traffic(); }

 private:
  void check_bytes(int64_t peer, int64_t bytes) const;
  bool has_payload(int64_t from, const Message& message, bool is_asked);
  int32_t new_tag(bool is_asked);
  void queue(std::vector<Operation::Owned> operations);
  bool step();
  bool is_under_way(int64_t group);

  Failure failure_;

  std::mutex outbox_mutex_;
  std::deque<Operation::Owned> outbox_;
  std::atomic<bool> has_mail_{false};
  std::map<int64_t, int64_t> under_way_;  // per device group, operations that have not ended
  int32_t last_tag_ = 0;

  std::mutex mutex_;  // of all below
  Transport transport_;
  std::map<int64_t, Receiver*> receivers_;

  std::atomic<int64_t> last_progress_ns_{0};
};

}  // namespace tilewise::comm
