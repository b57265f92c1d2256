// See wire.h.
#include "comm/wire.h"

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
constexpr int64_t kAtOnce = 64;  // letters taken before anything else is looked at
constexpr int64_t kKeenNs = 1'000'000;  // a waiting thread looks all the time for so long, then now and then
constexpr int64_t kLeaveNs = 10'000'000'000;
constexpr std::chrono::microseconds kPause{200};

}  // namespace

Wire::Wire(const TilewiseMpi& mpi) : courier_(mpi, failure_) {}

void Wire::join(int64_t team, Receiver& receiver) {
  std::lock_guard guard(mutex_);
  check<ArgumentError>(receivers_.emplace(team, &receiver).second,
                       "[comm.Wire] a team has one receiver in a process; got a second one for team ", team,
                       "; count teams");
}

bool Wire::is_under_way(int64_t team) {
  std::lock_guard guard(outbox_mutex_);
  const auto found = under_way_.find(team);
  return found != under_way_.end() && found->second > 0;
}

void Wire::leave(int64_t team) {
  if (!wait(kLeaveNs, [&] { return !is_under_way(team); })) fail("what is under way must end; got nothing for 10 s");
  std::lock_guard guard(mutex_);
  receivers_.erase(team);
}

void Wire::check_bytes(int64_t peer, int64_t bytes) const {
  check<ArgumentError>(peer >= 0 && peer < size() && peer != rank() && bytes >= 0 && bytes <= kMostPayload,
                       "[comm.Wire] a message goes to another of ", size(), " processes and has at most ", kMostPayload,
                       " bytes; got process ", peer, " and ", bytes, " bytes; divide it");
}

// Between two processes one counts those that it gives, the other those that it asks for, so the two must differ.
int32_t Wire::new_tag(bool is_asked) {
  std::lock_guard guard(outbox_mutex_);
  last_tag_ = (last_tag_ + 1) % ((courier_.tag_max() - 1) / 2);
  return 1 + 2 * last_tag_ + (is_asked ? 1 : 0);
}

void Wire::queue(std::vector<Operation::Owned> operations) {
  std::lock_guard guard(outbox_mutex_);
  for (Operation::Owned& operation : operations) {
    ++under_way_[operation->team];
    outbox_.push_back(std::move(operation));
  }
  has_mail_.store(true, std::memory_order_release);
}

void Wire::post(int64_t to, const Letter& letter, const std::string& text) {
  check_bytes(to, std::ssize(text));
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::letter(to, letter, text));
  queue(std::move(operations));
}

void Wire::give(int64_t to, const Letter& letter, const std::byte* data, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  Letter announced = letter;
  announced.tag = new_tag(false);
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::letter(to, announced, {}));
  operations.push_back(Operation::send(to, letter.team, announced.tag, data, bytes, std::move(done)));
  queue(std::move(operations));
}

void Wire::ask(int64_t to, const Letter& letter, std::byte* into, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  Letter asking = letter;
  asking.tag = new_tag(true);
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::receive(to, letter.team, asking.tag, into, bytes, std::move(done)));
  operations.push_back(Operation::letter(to, asking, {}));
  queue(std::move(operations));
}

// The other's own: one of this process's would bring its bytes where others are awaited.
bool Wire::has_payload(int64_t from, const Letter& letter, bool is_asked) {
  if (letter.tag > 0 && (letter.tag % 2 == 0) == is_asked) return true;
  fail("a letter of a payload must have a tag of its sender; got " + std::to_string(letter.tag) + " from process " +
       std::to_string(from));
  return false;
}

void Wire::receive(int64_t from, const Letter& letter, std::byte* into, int64_t bytes, Done done) {
  check_bytes(from, bytes);
  if (!has_payload(from, letter, false)) return;
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::receive(from, letter.team, letter.tag, into, bytes, std::move(done)));
  queue(std::move(operations));
}

void Wire::reply(int64_t to, const Letter& letter, const std::byte* data, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  if (!has_payload(to, letter, true)) return;
  std::vector<Operation::Owned> operations;
  operations.push_back(Operation::send(to, letter.team, letter.tag, data, bytes, std::move(done)));
  queue(std::move(operations));
}

// ---- progress ----------------------------------------------------------------------------------------------------

// Who finds another thread inside leaves its mail there; that one looks once more when it is out.
bool Wire::progress() {
  bool has_moved = false;
  do {
    const std::unique_lock guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock() || has_failed()) return has_moved;
    try {
      has_moved = step() || has_moved;
    } catch (const std::exception& error) {  // of who takes letters, as where memory runs out
      fail(error.what());
      return true;
    }
  } while (has_mail_.load(std::memory_order_acquire));
  return has_moved;
}

void Wire::progress_if_due() {
  const int64_t now = now_ns();
  if (now - last_progress_ns_.load(std::memory_order_relaxed) < kDueNs) return;
  last_progress_ns_.store(now, std::memory_order_relaxed);
  progress();
}

bool Wire::step() {
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
      if (!courier_.start(std::move(operation))) return true;
    }
  }
  const auto deliver = [this](int64_t from, const Letter& letter, const std::string& text) {
    const auto found = receivers_.find(letter.team);  // none: it tells of something that no longer matters
    if (found != receivers_.end()) found->second->take(from, letter, text);
  };
  for (int64_t taken = 0; taken < kAtOnce && courier_.take_letter(deliver); ++taken) has_moved = true;
  const bool has_ended = courier_.end_some([this](const Operation& ended) {
    std::lock_guard guard(outbox_mutex_);
    --under_way_[ended.team];
  });
  return has_ended || has_moved;
}

void Wire::finish() {
  const auto is_empty = [this] {
    std::lock_guard guard(outbox_mutex_);
    return std::all_of(under_way_.begin(), under_way_.end(), [](const auto& of) { return of.second == 0; });
  };
  if (!wait(kLeaveNs, is_empty)) fail("what is under way must end; got nothing for 10 s");
  const std::unique_lock guard(mutex_);
  courier_.finish();
}

bool Wire::wait(int64_t limit_ns, const std::function<bool()>& holds) {
  const int64_t begun = now_ns();
  int64_t keen_until = begun + kKeenNs;
  while (true) {
    const bool has_moved = progress();
    if (holds()) return true;
    const int64_t now = now_ns();
    if (has_failed() || now - begun > limit_ns) return false;
    if (has_moved) keen_until = now + kKeenNs;
    if (now < keen_until) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
}

}  // namespace tilewise::comm
