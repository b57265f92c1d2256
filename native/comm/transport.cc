// See transport.h.
#include "comm/transport.h"

#include <cstring>
#include <utility>

namespace tilewise::comm {

namespace {

constexpr uint32_t kMark = 0x31525754;  // "TWR1"
constexpr int32_t kMessages = 0;        // tag of messages
constexpr int64_t kTested = 32;         // operations per call: each test is a system call on some networks

std::vector<Operation::Owned>& left_behind() {
  static auto& operations = *new std::vector<Operation::Owned>;
  return operations;
}

}  // namespace

std::string Failure::cause() const {
  std::lock_guard guard(mutex_);
  return cause_;
}

void Failure::set(const std::string& cause) {
  std::lock_guard guard(mutex_);
  if (cause_.empty()) cause_ = cause;
  is_set_.store(true, std::memory_order_release);
}

Transport::Transport(const TilewiseMpi& mpi, Failure& failure)
    : mpi_(mpi),
      failure_(failure),
      rank_(mpi.rank(mpi.self)),
      size_(mpi.size(mpi.self)),
      tag_max_(mpi.tag_max(mpi.self)),
      num_sent_(size_),
      num_received_(size_),
      message_(sizeof(Message) + kMostText) {}

// Operations that are still pending belong to a lost peer. MPI may still write into their memory, so it is never freed.
Transport::~Transport() {
  static std::mutex mutex;
  std::lock_guard guard(mutex);
  for (Owned& operation : running_) left_behind().push_back(std::move(operation));
}

ConnectionTraffic Transport::traffic() const {
  return {bytes_sent_.load(std::memory_order_relaxed), bytes_received_.load(std::memory_order_relaxed)};
}

bool Transport::check_error(int32_t error, const char* what, int64_t peer) {
  if (error == 0) return true;
  char text[512] = {};
  mpi_.describe(mpi_.self, error, text, sizeof(text));
  const std::string whose = peer < 0 ? "" : " process " + std::to_string(peer);
  failure_.set(std::string("MPI could not ") + what + whose + ": " + text);
  return false;
}

// An operation that failed to start also stays in running_, because MPI may still use it.
bool Transport::start(Owned operation) {
  Operation& begun = *operation;
  const auto peer = static_cast<int32_t>(begun.peer);
  bool is_begun = false;
  switch (begun.kind) {
    case Operation::Kind::kMessage: {
      Message message;
      std::memcpy(&message, begun.text.data(), sizeof(message));
      message.mark = kMark;
      message.sequence = num_sent_[begun.peer]++;
      message.length = static_cast<int32_t>(begun.text.size() - sizeof(message));
      std::memcpy(begun.text.data(), &message, sizeof(message));
      is_begun =
          check_error(mpi_.send(mpi_.self, begun.text.data(), std::ssize(begun.text), peer, kMessages, &begun.request),
                      "send to", peer);
      break;
    }
    case Operation::Kind::kSend:
      is_begun =
          check_error(mpi_.send(mpi_.self, begun.data, begun.bytes, peer, begun.tag, &begun.request), "send to", peer);
      break;
    case Operation::Kind::kReceive:
      is_begun = check_error(mpi_.receive(mpi_.self, begun.into, begun.bytes, peer, begun.tag, &begun.request),
                             "receive from", peer);
      break;
  }
  running_.push_back(std::move(operation));
  return is_begun;
}

bool Transport::take_message(const Deliver& deliver) {
  if (failure_.is_set()) return false;
  int32_t is_found = 0;
  int32_t from = -1;
  int64_t bytes = 0;
  if (!check_error(mpi_.probe(mpi_.self, kMessages, &is_found, &from, &bytes), "look for messages") || is_found == 0)
    return false;
  constexpr auto kHead = static_cast<int64_t>(sizeof(Message));
  if (from < 0 || from >= size_ || from == rank_ || bytes < kHead || bytes > std::ssize(message_)) {
    failure_.set("a message must come from another process and have a valid size; got " + std::to_string(bytes) +
                 " bytes from process " + std::to_string(from));
    return false;
  }
  if (!check_error(mpi_.take(mpi_.self, message_.data(), bytes, from, kMessages), "receive from", from)) return false;
  Message message;
  std::memcpy(&message, message_.data(), sizeof(message));
  if (message.mark != kMark || message.sequence != num_received_[from] || message.length != bytes - kHead ||
      message.tag < 0 || message.tag > tag_max_) {
    failure_.set("a message must be complete and the next one of its sender; got mark " + std::to_string(message.mark) +
                 ", number " + std::to_string(message.sequence) + " instead of " + std::to_string(num_received_[from]) +
                 ", length " + std::to_string(message.length) + " of " + std::to_string(bytes - kHead) + ", tag " +
                 std::to_string(message.tag) + " from process " + std::to_string(from));
    return false;
  }
  ++num_received_[from];
  deliver(from, message, {reinterpret_cast<const char*>(message_.data()) + kHead, static_cast<size_t>(bytes - kHead)});
  return true;
}

bool Transport::end_some(const std::function<void(const Operation&)>& ended) {
  bool has_moved = false;
  for (int64_t tested = 0; tested < kTested && !running_.empty() && !failure_.is_set(); ++tested) {
    if (next_tested_ >= running_.size()) next_tested_ = 0;
    const size_t i = next_tested_;
    Operation& operation = *running_[i];
    int32_t is_done = 0;
    int64_t bytes = 0;
    if (!check_error(mpi_.test(mpi_.self, &operation.request, &is_done, &bytes), "make progress with", operation.peer))
      break;
    if (is_done == 0) {
      ++next_tested_;
      continue;
    }
    if (operation.kind == Operation::Kind::kReceive && bytes != operation.bytes) {
      failure_.set("a payload must have the size that its message has announced; got " + std::to_string(bytes) +
                   " of " + std::to_string(operation.bytes) + " from process " + std::to_string(operation.peer));
      break;
    }
    has_moved = true;
    const Owned done = std::move(running_[i]);
    running_[i] = std::move(running_.back());
    running_.pop_back();
    if (done->kind == Operation::Kind::kReceive) bytes_received_.fetch_add(done->bytes, std::memory_order_relaxed);
    if (done->kind == Operation::Kind::kSend) bytes_sent_.fetch_add(done->bytes, std::memory_order_relaxed);
    if (done->done) done->done();
    ended(*done);
  }
  return has_moved;
}

void Transport::finish() {
  if (failure_.is_set()) return;
  check_error(mpi_.finish(mpi_.self), "end");
  failure_.set("the connection has ended");
}

}  // namespace tilewise::comm
