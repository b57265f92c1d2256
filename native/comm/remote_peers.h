// The processes of a device group on other hosts: messages to them (connection.h), and a copy of the block of each
// (peer_block.h), which the receiver of its messages writes.
//
// Purpose: the part of comm/peers.h for remote processes; only it calls this. Who may call, and what blocks: as there;
// listen() also makes progress for the connection. Trusts nothing: an invalid message fails the connection, and nothing
// of it is used.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/connection.h"
#include "comm/peer_messages.h"

namespace tilewise::comm {

/// The kinds of messages of a device group. RemoteOptions::take handles those from kRead on.
enum class MessageKind : uint16_t { kPost = 1, kOrder, kAnswer, kState, kEnd, kRead, kWrite, kWritten };

struct RemoteOptions {
  std::shared_ptr<Connection> connection = nullptr;  // with the same process numbers; nullptr: all share memory
  int64_t group = 0;  // this device group's number in the connection
  std::vector<bool> is_remote = {};  // per process
  /// Takes messages about memory. Called inside Connection::progress().
  std::function<void(int64_t from, const Message& message, const std::string& text)> take = {};
};

struct PeerBlock;

class RemotePeers final : private Receiver {
 public:
  /// own: the block of this process, which is number `process`. take: as for a mailbox.
  RemotePeers(RemoteOptions options, int64_t process, PeerBlock& own, std::function<bool(const Post&)> take);
  ~RemotePeers() override;
  RemotePeers(const RemotePeers&) = delete;
  RemotePeers& operator=(const RemotePeers&) = delete;

  bool has(int64_t process) const { return options_.is_remote[process]; }
  PeerBlock& block(int64_t process) const { return *blocks_[process]; }
  Connection& connection() const { return *options_.connection; }
  /// Stops taking messages.
  void leave() { options_.connection->leave(options_.group); }

  void post(int64_t process, const Post& post);
  /// Inside progress(): takes a post that came with a payload, which has landed.
  void take_landed(int64_t from, const Post& post);
  void send_order(int64_t process, const Order& order, uint64_t number);
  void answer(const Answer& answer, uint64_t number);
  /// Sends this process's progress, from its own block, to all.
  void report();
  /// end_posts: reports to all that no post of that run will follow. have_ended: whether all have sent the same.
  void end_posts(uint64_t run);
  bool have_ended(uint64_t run) const;

  /// Until is_over(): takes messages of all kinds, reports this process's progress, makes progress.
  void listen(const std::function<bool()>& is_over);

 private:
  struct Undelivered {
    Post post;
    int64_t from = 0;
    bool is_end = false;  // the sender has posted all signals of post.run
  };

  void take(int64_t from, const Message& message, const std::string& text) override;
  void take_post(int64_t from, const Message& message);
  void take_state(int64_t from, const Message& message);
  void take_order(int64_t from, const Message& message, const std::string& text);
  void take_answer(int64_t from, const Message& message, const std::string& text);
  void reject(int64_t from, const Message& message);
  void deliver();
  Message message_of(MessageKind kind) const;
  void send(int64_t process, const Message& message, const std::string& text = {});
  void send_to_all(const Message& message);

  RemoteOptions options_;
  int64_t process_;
  PeerBlock& own_;
  std::function<bool(const Post&)> take_;
  std::vector<std::unique_ptr<PeerBlock>> blocks_;  // per process; nullptr for those that share memory
  std::deque<Undelivered> undelivered_;  // while the mailbox is full; used inside progress()
};

}  // namespace tilewise::comm
