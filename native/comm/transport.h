// The operations inside MPI: messages and payloads in progress, and arriving messages.
//
// Purpose: the part of comm/connection.h that one thread at a time executes. It turns operations into MPI requests and
// reports their ends. Who may call: the thread that has the connection's lock. Blocks: never. Trusts nothing: a
// message's mark, sequence and length are checked before any of it is used, a payload's length before its end is
// reported. After the first error nothing is passed to MPI any more.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "comm/mpi/tilewise_mpi.h"

namespace tilewise::comm {

/// The fixed part of a message. Senders set kind, flags, device group, tag and numbers; Transport sets the rest.
struct Message {
  static constexpr int64_t kNumbers = 8;

  uint32_t mark = 0;
  uint16_t kind = 0;
  uint16_t flags = 0;
  uint64_t sequence = 0;  // from this sender to this receiver
  int64_t group = 0;      // the receiving device group
  int32_t tag = 0;        // of the payload that it announces; 0: none
  int32_t length = 0;     // of the text that follows
  int64_t numbers[kNumbers] = {};
};

inline constexpr int64_t kMostText = 8192;
inline constexpr int64_t kMostPayload = int64_t{1} << 30;

/// Bytes of payloads, for tasks and the host.
struct ConnectionTraffic {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
};

/// The first cause of failure.
class Failure {
 public:
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }
  std::string cause() const;
  void set(const std::string& cause);

 private:
  std::atomic<bool> is_set_{false};
  mutable std::mutex mutex_;
  std::string cause_;
};

/// A message or a payload, from its request until its end.
struct Operation {
  using Owned = std::unique_ptr<Operation>;
  using Done = std::function<void()>;

  enum class Kind : uint8_t { kMessage, kSend, kReceive };

  Kind kind = Kind::kMessage;
  int64_t peer = 0;
  int64_t group = 0;
  int32_t tag = 0;                  // for a payload
  const std::byte* data = nullptr;  // for kSend
  std::byte* into = nullptr;        // for kReceive
  int64_t bytes = 0;
  Done done;
  std::string text = {};  // for kMessage: the whole message
  TilewiseMpiRequest request = {};

  static Owned message(int64_t to, const Message& message, std::string_view text) {
    std::string whole(sizeof(Message) + text.size(), '\0');
    std::memcpy(whole.data(), &message, sizeof(Message));
    text.copy(whole.data() + sizeof(Message), text.size());
    return std::make_unique<Operation>(
        Operation{.kind = Kind::kMessage, .peer = to, .group = message.group, .done = {}, .text = std::move(whole)});
  }
  static Owned send(int64_t to, int64_t group, int32_t tag, const std::byte* data, int64_t bytes, Done done) {
    return std::make_unique<Operation>(Operation{.kind = Kind::kSend,
                                                 .peer = to,
                                                 .group = group,
                                                 .tag = tag,
                                                 .data = data,
                                                 .bytes = bytes,
                                                 .done = std::move(done)});
  }
  static Owned receive(int64_t from, int64_t group, int32_t tag, std::byte* into, int64_t bytes, Done done) {
    return std::make_unique<Operation>(Operation{.kind = Kind::kReceive,
                                                 .peer = from,
                                                 .group = group,
                                                 .tag = tag,
                                                 .into = into,
                                                 .bytes = bytes,
                                                 .done = std::move(done)});
  }
};

class Transport {
 public:
  using Owned = Operation::Owned;
  using Deliver = std::function<void(int64_t from, const Message& message, const std::string& text)>;

  Transport(const TilewiseMpi& mpi, Failure& failure);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  int32_t tag_max() const { return tag_max_; }
  ConnectionTraffic traffic() const;

  /// Returns false if it failed.
  bool start(Owned operation);
  /// Returns whether a message has arrived.
  bool take_message(const Deliver& deliver);
  /// Calls `ended` for each operation that has ended; returns whether any has.
  bool end_some(const std::function<void(const Operation&)>& ended);
  void finish();

 private:
  bool check_error(int32_t error, const char* what, int64_t peer = -1);

  const TilewiseMpi& mpi_;
  Failure& failure_;
  int64_t rank_;
  int64_t size_;
  int32_t tag_max_;
  std::vector<Owned> running_;
  size_t next_tested_ = 0;              // index in running_
  std::vector<uint64_t> num_sent_;      // messages per receiver
  std::vector<uint64_t> num_received_;  // messages per sender
  std::vector<std::byte> message_;
  std::atomic<int64_t> bytes_sent_{0};
  std::atomic<int64_t> bytes_received_{0};
};

}  // namespace tilewise::comm
