// See remote_peers.h.
#include "comm/remote_peers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "comm/peer_block.h"

namespace tilewise::comm {

namespace {

constexpr int64_t kPollNs = 2'000'000;  // polls without pauses this long after a message while no worker is awake
constexpr int64_t kPauseNs = 200'000;

}  // namespace

RemotePeers::RemotePeers(RemoteOptions options, int64_t process, PeerBlock& own, std::function<bool(const Post&)> take)
    : options_(std::move(options)), process_(process), own_(own), take_(std::move(take)) {
  for (const bool is_remote : options_.is_remote)
    blocks_.push_back(is_remote ? std::make_unique<PeerBlock>() : nullptr);
  options_.connection->join(options_.group, *this);
}

RemotePeers::~RemotePeers() { leave(); }

Message RemotePeers::message_of(MessageKind kind) const {
  Message message;
  message.kind = static_cast<uint16_t>(kind);
  message.group = options_.group;
  return message;
}

void RemotePeers::send(int64_t process, const Message& message, const std::string& text) {
  options_.connection->send(process, message, text);
  options_.connection->progress();
}

void RemotePeers::send_to_all(const Message& message) {
  for (int64_t p = 0; p < std::ssize(blocks_); ++p) {
    if (has(p)) options_.connection->send(p, message);
  }
  options_.connection->progress();
}

// ---- sending --------------------------------------------------------------------------------------

void RemotePeers::post(int64_t process, const Post& post) {
  Message message = message_of(MessageKind::kPost);
  message.flags = post.is_poisoned ? 1 : 0;
  message.numbers[0] = static_cast<int64_t>(post.run);
  message.numbers[1] = post.device;
  message.numbers[2] = post.signal;
  send(process, message);
}

void RemotePeers::send_order(int64_t process, const Order& order, uint64_t number) {
  Message message = message_of(MessageKind::kOrder);
  message.flags = order.clears_poison ? 1 : 0;
  message.numbers[0] = static_cast<int64_t>(number);
  message.numbers[1] = static_cast<int64_t>(order.kind);
  message.numbers[2] = order.list;
  message.numbers[3] = order.num_symbols;
  message.numbers[4] = order.program;
  const auto* const symbols = reinterpret_cast<const char*>(order.symbols);
  send(process, message, {symbols, order.num_symbols * sizeof(int64_t)});
}

void RemotePeers::answer(const Answer& answer, uint64_t number) {
  Message message = message_of(MessageKind::kAnswer);
  message.numbers[0] = static_cast<int64_t>(number);
  message.numbers[1] = static_cast<int64_t>(answer.kind);
  message.numbers[2] = answer.tile;
  message.numbers[3] = answer.worker;
  message.numbers[4] = answer.device;
  std::string text(answer.op, strnlen(answer.op, sizeof(answer.op)));
  message.numbers[5] = std::ssize(text);
  text.append(answer.message, strnlen(answer.message, sizeof(answer.message)));
  send(0, message, text);
}

void RemotePeers::report() {
  Message message = message_of(MessageKind::kState);
  message.flags = own_.is_at_work.load(std::memory_order_relaxed) ? 1 : 0;
  message.numbers[0] = own_.pid.load(std::memory_order_relaxed);
  message.numbers[1] = static_cast<int64_t>(own_.beats.load(std::memory_order_relaxed));
  message.numbers[2] = static_cast<int64_t>(own_.num_completed.load(std::memory_order_relaxed));
  message.numbers[3] = static_cast<int64_t>(own_.stopped.load(std::memory_order_relaxed));
  send_to_all(message);
}

void RemotePeers::end_posts(uint64_t run) {
  Message message = message_of(MessageKind::kEnd);
  message.numbers[0] = static_cast<int64_t>(run);
  send_to_all(message);
}

bool RemotePeers::have_ended(uint64_t run) const {
  return std::all_of(blocks_.begin(), blocks_.end(), [run](const auto& of) {
    return of == nullptr || of->ended.load(std::memory_order_acquire) >= run;
  });
}

// ---- receiving -----------------------------------------------------------------------------------------------

// Takes messages of all kinds, reports this process's progress, and drives the connection while all workers compute.
// Polling without pauses costs nothing while no worker is awake.
void RemotePeers::listen(const std::function<bool()>& is_over) {
  int64_t reported_ns = 0;
  int64_t poll_until = 0;
  while (!is_over()) {
    const bool has_moved = options_.connection->progress();
    const int64_t now = now_ns();
    if (now - reported_ns > kBeatNs) {
      own_.beats.fetch_add(1, std::memory_order_relaxed);
      report();
      reported_ns = now;
    }
    if (has_moved) poll_until = now + kPollNs;
    const bool is_polling = now < poll_until && own_.mail.awake.load(std::memory_order_relaxed) == 0;
    if (is_polling) StdMemory::yield();
    own_.mail.listen(take_, [&] { return is_polling || is_over(); }, kPauseNs);
  }
}

void RemotePeers::reject(int64_t from, const Message& message) {
  std::string text = "a message must be of this version and valid; got kind " + std::to_string(message.kind);
  for (const int64_t number : message.numbers) text += ", " + std::to_string(number);
  options_.connection->fail(text + " from process " + std::to_string(from));
}

void RemotePeers::take(int64_t from, const Message& message, const std::string& text) {
  if (from >= std::ssize(blocks_) || !has(from)) {
    reject(from, message);
    return;
  }
  switch (static_cast<MessageKind>(message.kind)) {
    case MessageKind::kPost:
      take_post(from, message);
      return;
    case MessageKind::kOrder:
      take_order(from, message, text);
      return;
    case MessageKind::kAnswer:
      take_answer(from, message, text);
      return;
    case MessageKind::kState:
      take_state(from, message);
      return;
    case MessageKind::kEnd:
      undelivered_.push_back(
          {.post = {.run = static_cast<uint64_t>(message.numbers[0])}, .from = from, .is_end = true});
      deliver();
      return;
    case MessageKind::kRead:
    case MessageKind::kWrite:
    case MessageKind::kWritten:
      options_.take(from, message, text);
      return;
  }
  reject(from, message);
}

void RemotePeers::take_post(int64_t from, const Message& message) {
  const auto device = static_cast<int32_t>(message.numbers[1]);
  const auto signal = static_cast<int32_t>(message.numbers[2]);
  if (message.numbers[1] != device || message.numbers[2] != signal) {
    reject(from, message);
    return;
  }
  undelivered_.push_back({.post = {.run = static_cast<uint64_t>(message.numbers[0]),
                                   .device = device,
                                   .signal = signal,
                                   .is_poisoned = message.flags != 0},
                          .from = from});
  deliver();
}

void RemotePeers::take_landed(int64_t from, const Post& post) {
  undelivered_.push_back({.post = post, .from = from});
  deliver();
}

void RemotePeers::take_state(int64_t from, const Message& message) {
  PeerBlock& other = block(from);
  other.is_at_work.store(message.flags != 0, std::memory_order_relaxed);
  other.pid.store(message.numbers[0], std::memory_order_relaxed);
  other.beats.store(message.numbers[1], std::memory_order_relaxed);
  other.num_completed.store(message.numbers[2], std::memory_order_relaxed);
  other.stopped.store(message.numbers[3], std::memory_order_relaxed);
  deliver();
}

// Delivers remote messages to this process's mailbox, which the processes of its host also use.
void RemotePeers::deliver() {
  for (; !undelivered_.empty(); undelivered_.pop_front()) {
    const Undelivered& next = undelivered_.front();
    if (next.is_end) {
      block(next.from).ended.store(next.post.run, std::memory_order_release);
      own_.sleepers.wake_all_if_any(true, true);
    } else if (!own_.mail.send(next.post)) {
      own_.mail.look(take_);
      if (!own_.mail.send(next.post)) return;
    }
  }
}

void RemotePeers::take_order(int64_t from, const Message& message, const std::string& text) {
  const int64_t count = message.numbers[3];
  const uint64_t number = message.numbers[0];
  const bool is_valid_kind = message.numbers[1] == static_cast<int64_t>(Order::Kind::kRun) ||
                             message.numbers[1] == static_cast<int64_t>(Order::Kind::kTalk);
  if (from != 0 || !is_valid_kind || count < 0 || count > kMaxSymbols ||
      std::ssize(text) != count * static_cast<int64_t>(sizeof(int64_t)) ||
      number != own_.ordered.load(std::memory_order_relaxed) + 1) {
    reject(from, message);
    return;
  }
  own_.order.kind = static_cast<Order::Kind>(message.numbers[1]);
  own_.order.clears_poison = message.flags != 0;
  own_.order.program = message.numbers[4];
  own_.order.list = message.numbers[2];
  own_.order.num_symbols = count;
  if (count > 0) std::memcpy(own_.order.symbols, text.data(), text.size());
  own_.ordered.store(number, std::memory_order_release);
  own_.sleepers.wake_all_if_any(true, true);
}

void RemotePeers::take_answer(int64_t from, const Message& message, const std::string& text) {
  const int64_t length = message.numbers[5];
  PeerBlock& other = block(from);
  const bool is_new =
      static_cast<uint64_t>(message.numbers[0]) >
      other.answered.load(std::memory_order_relaxed);  // an answer may arrive only once, because it may be in use
  if (process_ != 0 || message.numbers[1] < 0 || message.numbers[1] > static_cast<int64_t>(Answer::Kind::kOther) ||
      length < 0 || length > std::ssize(text) || !is_new) {
    reject(from, message);
    return;
  }
  other.answer.kind = static_cast<Answer::Kind>(message.numbers[1]);
  other.answer.tile = message.numbers[2];
  other.answer.worker = message.numbers[3];
  other.answer.device = message.numbers[4];
  Answer::set(other.answer.op, sizeof(other.answer.op), text.substr(0, length));
  Answer::set(other.answer.message, sizeof(other.answer.message), text.substr(length));
  other.answered.store(message.numbers[0], std::memory_order_release);
  own_.sleepers.wake_all_if_any(true, true);
}

}  // namespace tilewise::comm
