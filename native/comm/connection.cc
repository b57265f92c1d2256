// See connection.h.
#include "comm/connection.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/clock.h"

namespace tilewise::comm {

namespace {

constexpr int64_t kDueNs = 20'000;
constexpr int64_t kMessagesPerStep = 64;  // taken before other operations are checked
constexpr int64_t kPollNs = 1'000'000;    // a waiting thread polls without pauses for this long after progress
constexpr int64_t kLeaveNs = 10'000'000'000;
constexpr std::chrono::microseconds kPause{200};

}  // namespace

Connection::Connection(const TilewiseMpi& mpi) : transport_(mpi, failure_) {}

void Connection::join(int64_t group, Receiver& receiver) {
  std::lock_guard guard(mutex_);
  check<ArgumentError>(
      receivers_.emplace(group, &receiver).second,
      "[comm.Connection] a device group must have one receiver per process; got a second one for device group ", group,
      "; give each device group its own number");
}

bool Connection::is_pending(int64_t group) {
  std::lock_guard guard(outbox_mutex_);
  const auto count = num_pending_.find(group);
  return count != num_pending_.end() && count->second > 0;
}

void Connection::leave(int64_t group) {
  if (!wait(kLeaveNs, [&] { return !is_pending(group); }))
    fail("pending operations must end; got no progress for 10 s");
  std::lock_guard guard(mutex_);
  receivers_.erase(group);
}

void Connection::check_bytes(int64_t peer, int64_t bytes) const {
  check<ArgumentError>(peer >= 0 && peer < size() && peer != rank() && bytes >= 0 && bytes <= kMostPayload,
                       "[comm.Connection] a message must go to another of ", size(), " processes and have at most ",
                       kMostPayload, " bytes; got process ", peer, " and ", bytes, " bytes; divide it");
}

// Both processes of a pair number their own put() and get() payloads, so the tags of both kinds must differ.
int32_t Connection::new_tag(bool is_get) {
  std::lock_guard guard(outbox_mutex_);
  last_tag_ = (last_tag_ + 1) % ((transport_.tag_max() - 1) / 2);
  return 1 + 2 * last_tag_ + (is_get ? 1 : 0);
}

void Connection::queue(std::vector<Operation::Owned> operations) {
  std::lock_guard guard(outbox_mutex_);
  for (Operation::Owned& operation : operations) {
    ++num_pending_[operation->group];
    outbox_.push_back(std::move(operation));
  }
  has_mail_.store(true, std::memory_order_release);
}

void Connection::send(int64_t to, const Message& message, const std::string& text) {
  check_bytes(to, std::ssize(text));
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::message(to, message, text));
  queue(std::move(operations));
}

void Connection::put(int64_t to, const Message& message, const std::byte* data, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  Message announced = message;
  announced.tag = new_tag(false);
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::message(to, announced, {}));
  operations.push_back(Operation::send(to, message.group, announced.tag, data, bytes, std::move(done)));
  queue(std::move(operations));
}

void Connection::get(int64_t to, const Message& message, std::byte* into, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  Message request = message;
  request.tag = new_tag(true);
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::receive(to, message.group, request.tag, into, bytes, std::move(done)));
  operations.push_back(Operation::message(to, request, {}));
  queue(std::move(operations));
}

// The tag must be the other process's own: with a tag of this process the payload could match another receive.
bool Connection::has_payload(int64_t from, const Message& message, bool is_get) {
  if (message.tag > 0 && (message.tag % 2 == 0) == is_get) return true;
  fail("a message of a payload must have a tag of its sender; got " + std::to_string(message.tag) + " from process " +
       std::to_string(from));
  return false;
}

void Connection::receive(int64_t from, const Message& message, std::byte* into, int64_t bytes, Done done) {
  check_bytes(from, bytes);
  if (!has_payload(from, message, false)) return;
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::receive(from, message.group, message.tag, into, bytes, std::move(done)));
  queue(std::move(operations));
}

void Connection::reply(int64_t to, const Message& message, const std::byte* data, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  if (!has_payload(to, message, true)) return;
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::send(to, message.group, message.tag, data, bytes, std::move(done)));
  queue(std::move(operations));
}

// ---- progress ----------------------------------------------------------------------------------------------------

// A thread that finds another one inside leaves its operations in the outbox; the other checks it again after leaving.
bool Connection::progress() {
  bool has_moved = false;
  do {
    const std::unique_lock guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock() || has_failed()) return has_moved;
    try {
      has_moved = step() || has_moved;
    } catch (const std::exception& error) {  // from a receiver, for example out of memory
      fail(error.what());
      return true;
    }
  } while (has_mail_.load(std::memory_order_acquire));
  return has_moved;
}

void Connection::progress_if_due() {
  const int64_t now = now_ns();
  if (now - last_progress_ns_.load(std::memory_order_relaxed) < kDueNs) return;
  last_progress_ns_.store(now, std::memory_order_relaxed);
  progress();
}

bool Connection::step() {
  bool has_moved = false;
  while (has_mail_.load(std::memory_order_acquire) && !has_failed()) {
    std::deque<Operation::Owned> mail;
    {
      std::lock_guard guard(outbox_mutex_);
      mail.swap(outbox_);
      has_mail_.store(false, std::memory_order_relaxed);
    }
    has_moved = true;
    for (Operation::Owned& operation : mail) {
      if (!transport_.start(std::move(operation))) return true;
    }
  }
  const auto deliver = [this](int64_t from, const Message& message, const std::string& text) {
    const auto receiver = receivers_.find(message.group);  // without a receiver the message is dropped
    if (receiver != receivers_.end()) receiver->second->take(from, message, text);
  };
  for (int64_t taken = 0; taken < kMessagesPerStep && transport_.take_message(deliver); ++taken) has_moved = true;
  const bool has_ended = transport_.end_some([this](const Operation& ended) {
    std::lock_guard guard(outbox_mutex_);
    --num_pending_[ended.group];
  });
  return has_ended || has_moved;
}

void Connection::finish() {
  const auto is_empty = [this] {
    std::lock_guard guard(outbox_mutex_);
    return std::all_of(num_pending_.begin(), num_pending_.end(), [](const auto& of) { return of.second == 0; });
  };
  if (!wait(kLeaveNs, is_empty)) fail("pending operations must end; got no progress for 10 s");
  const std::unique_lock guard(mutex_);
  transport_.finish();
}

bool Connection::wait(int64_t limit_ns, const std::function<bool()>& condition) {
  const int64_t begun = now_ns();
  int64_t poll_until = begun + kPollNs;
  while (true) {
    const bool has_moved = progress();
    if (condition()) return true;
    const int64_t now = now_ns();
    if (has_failed() || now - begun > limit_ns) return false;
    if (has_moved) poll_until = now + kPollNs;
    if (now < poll_until) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
}

}  // namespace tilewise::comm
