// The processes of a device group on other hosts: messages to them (connection.h), and a copy of the block of each
// (peer_block.h), which the receiver of its messages writes.
//
// Purpose: the other half of comm/peers.h, which alone calls this. Who may call, and what blocks: as there; listen()
// also makes progress for the connection. Trusts nothing: an impossible message fails the connection, and nothing of it
// is used.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/connection.h"
#include "comm/peer_messages.h"

namespace tilewise::comm {

/// What messages of a device group are about. Those from kRead on are handed on.
enum class MessageKind : uint16_t { kPost = 1, kOrder, kAnswer, kState, kEnd, kRead, kWrite, kWritten };

struct RemoteOptions {
  std::shared_ptr<Connection> connection = nullptr;  // processes have the same numbers there; none: all share memory
  int64_t group = 0;  // this device group's number there
  std::vector<bool> is_remote = {};  // per process
  /// Takes messages that are about memory. Called inside Connection::progress().
  std::function<void(int64_t from, const Message& message, const std::string& text)> take = {};
};

struct PeerBlock;

class RemotePeers final : private Receiver {
 public:
  /// own: the block of this process, which is number `process`. take: as a mailbox takes messages.
  RemotePeers(RemoteOptions options, int64_t process, PeerBlock& own, std::function<bool(const Post&)> take);
  ~RemotePeers() override;
  RemotePeers(const RemotePeers&) = delete;
  RemotePeers& operator=(const RemotePeers&) = delete;

  bool has(int64_t process) const { return options_.is_remote[process]; }
  PeerBlock& block(int64_t process) const { return *blocks_[process]; }
  Connection& connection() const { return *options_.connection; }
  /// No message is taken any more.
  void leave() { options_.connection->leave(options_.group); }

  void post(int64_t process, const Post& post);
  void give(int64_t process, const Order& order, uint64_t number);
  void answer(const Answer& answer, uint64_t number);
  /// To all: how this process is, as its own block says.
  void tell();
  /// To all: no post of that run will follow; and whether all have said so.
  void end_posts(uint64_t run);
  bool have_ended(uint64_t run) const;

  /// Until is_over(): takes messages of all kinds, tells how this process is, makes progress.
  void listen(const std::function<bool()>& is_over);

 private:
  struct Undelivered {
    Post post;
    int64_t from = 0;
    bool is_end = false;  // the sender's last post of post.run was before this
  };

  void take(int64_t from, const Message& message, const std::string& text) override;
  void take_post(int64_t from, const Message& message);
  void take_state(int64_t from, const Message& message);
  void take_order(int64_t from, const Message& message, const std::string& text);
  void take_answer(int64_t from, const Message& message, const std::string& text);
  void refuse(int64_t from, const Message& message);
  void deliver();
  Message message_of(MessageKind kind) const;
  void send(int64_t process, const Message& message, const std::string& text = {});
  void send_to_all(const Message& message);

  RemoteOptions options_;
  int64_t process_;
  PeerBlock& own_;
  std::function<bool(const Post&)> take_;
  std::vector<std::unique_ptr<PeerBlock>> blocks_;  // per process; none of those that share memory
  std::deque<Undelivered> undelivered_;  // while the mailbox is full; of who is inside progress()
};

}  // namespace tilewise::comm
