// See wire.h.
#include "comm/wire.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/quiet_thread.h"

namespace tilewise::comm {

namespace {

constexpr uint32_t kMark = 0x31525754;  // "TWR1"
constexpr uint16_t kFrame = UINT16_MAX;
constexpr int64_t kFrames = -1;  // the team of frames
constexpr int32_t kLetters = 0;  // their tag
constexpr int64_t kTested = 32;  // operations at once: each look costs a system call on some networks
constexpr int64_t kDueNs = 20'000;
constexpr int64_t kAtOnce = 64;  // letters taken before anything else is looked at
constexpr int64_t kKeenNs = 1'000'000;  // a waiting thread looks all the time for so long, then now and then
constexpr int64_t kLeaveNs = 10'000'000'000;
constexpr int64_t kProbes = -3;  // the team of letters that ask for zeros
constexpr int64_t kAlive = -2;  // the team of letters that say nothing else
constexpr int64_t kBeatNs = 200'000'000;
constexpr std::chrono::microseconds kPause{200};
constexpr std::chrono::milliseconds kSlowPause{5};

}  // namespace

struct Wire::Operation {
  enum class Kind : uint8_t { kLetter, kSend, kReceive };

  Kind kind = Kind::kLetter;
  int64_t peer = 0;
  int64_t team = 0;
  int32_t tag = kLetters;
  const std::byte* data = nullptr;  // of kSend
  std::byte* into = nullptr;        // of kReceive
  int64_t bytes = 0;
  Done done;
  std::string text = {};  // of kLetter: all of it
  TilewiseMpiRequest request = {};

  static Owned letter(int64_t to, const Letter& letter, std::string_view text) {
    std::string whole(sizeof(Letter) + text.size(), '\0');
    std::memcpy(whole.data(), &letter, sizeof(Letter));
    text.copy(whole.data() + sizeof(Letter), text.size());
    return std::make_unique<Operation>(
        Operation{.kind = Kind::kLetter, .peer = to, .team = letter.team, .done = {}, .text = std::move(whole)});
  }
  static Owned send(int64_t to, int64_t team, int32_t tag, const std::byte* data, int64_t bytes, Done done) {
    return std::make_unique<Operation>(Operation{.kind = Kind::kSend,
                                                 .peer = to,
                                                 .team = team,
                                                 .tag = tag,
                                                 .data = data,
                                                 .bytes = bytes,
                                                 .done = std::move(done)});
  }
  static Owned receive(int64_t from, int64_t team, int32_t tag, std::byte* into, int64_t bytes, Done done) {
    return std::make_unique<Operation>(Operation{.kind = Kind::kReceive,
                                                 .peer = from,
                                                 .team = team,
                                                 .tag = tag,
                                                 .into = into,
                                                 .bytes = bytes,
                                                 .done = std::move(done)});
  }
};

Wire::Wire(const TilewiseMpi& mpi, bool beats)
    : mpi_(mpi),
      rank_(mpi.rank(mpi.self)),
      size_(mpi.size(mpi.self)),
      tag_max_(mpi.tag_max(mpi.self)),
      num_sent_(size_),
      num_received_(size_),
      letter_(sizeof(Letter) + kMostText),
      frames_(size_),
      quiet_ns_(size_) {
  if (beats) beats_ = quiet_thread([this] { beat(); });
}

// What is still under way when this ends belongs to a peer that is lost: MPI may write into it, so it stays.
Wire::~Wire() {
  stop_beating();
  for (Owned& operation : running_) static_cast<void>(operation.release());
}

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
  check<ArgumentError>(peer >= 0 && peer < size_ && peer != rank_ && bytes >= 0 && bytes <= kMostPayload,
                       "[comm.Wire] a message goes to another of ", size_, " processes and has at most ", kMostPayload,
                       " bytes; got process ", peer, " and ", bytes, " bytes; divide it");
}

// Between two processes one counts those that it gives, the other those that it asks for, so the two must differ.
int32_t Wire::new_tag(bool is_asked) {
  std::lock_guard guard(outbox_mutex_);
  last_tag_ = (last_tag_ + 1) % ((tag_max_ - 1) / 2);
  return 1 + 2 * last_tag_ + (is_asked ? 1 : 0);
}

void Wire::queue(std::vector<Owned> operations) {
  std::lock_guard guard(outbox_mutex_);
  for (Owned& operation : operations) {
    ++under_way_[operation->team];
    outbox_.push_back(std::move(operation));
  }
  has_mail_.store(true, std::memory_order_release);
}

void Wire::post(int64_t to, const Letter& letter, std::string text) {
  check_bytes(to, std::ssize(text));
  std::vector<Owned> operations;
  operations.push_back(Operation::letter(to, letter, text));
  queue(std::move(operations));
}

void Wire::give(int64_t to, const Letter& letter, const std::byte* data, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  Letter announced = letter;
  announced.tag = new_tag(false);
  std::vector<Owned> operations;
  operations.push_back(Operation::letter(to, announced, {}));
  operations.push_back(Operation::send(to, letter.team, announced.tag, data, bytes, std::move(done)));
  queue(std::move(operations));
}

void Wire::ask(int64_t to, const Letter& letter, std::byte* into, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  Letter asking = letter;
  asking.tag = new_tag(true);
  std::vector<Owned> operations;
  operations.push_back(Operation::receive(to, letter.team, asking.tag, into, bytes, std::move(done)));
  operations.push_back(Operation::letter(to, asking, {}));
  queue(std::move(operations));
}

bool Wire::has_payload(int64_t from, const Letter& letter) {
  if (letter.tag > 0) return true;
  fail("a letter of a payload must have its tag; got none from process " + std::to_string(from));
  return false;
}

void Wire::receive(int64_t from, const Letter& letter, std::byte* into, int64_t bytes, Done done) {
  check_bytes(from, bytes);
  if (!has_payload(from, letter)) return;
  std::vector<Owned> operations;
  operations.push_back(Operation::receive(from, letter.team, letter.tag, into, bytes, std::move(done)));
  queue(std::move(operations));
}

void Wire::reply(int64_t to, const Letter& letter, const std::byte* data, int64_t bytes, Done done) {
  check_bytes(to, bytes);
  if (!has_payload(to, letter)) return;
  std::vector<Owned> operations;
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
    has_moved = step() || has_moved;
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
    std::deque<Owned> mail;
    {
      std::lock_guard guard(outbox_mutex_);
      mail.swap(outbox_);
      has_mail_.store(false, std::memory_order_relaxed);
    }
    has_moved = true;
    for (Owned& operation : mail) {
      if (!start(std::move(operation))) return true;
    }
  }
  for (int64_t taken = 0; taken < kAtOnce && take_letter(); ++taken) has_moved = true;
  return end_done() || has_moved;
}

bool Wire::check_error(int32_t error, const char* what) {
  if (error == 0) return true;
  char text[512] = {};
  mpi_.describe(mpi_.self, error, text, sizeof(text));
  fail(std::string("MPI could not ") + what + ": " + text);
  return false;
}

// False: it has failed; what was begun stays as it is, since MPI may still use it.
bool Wire::start(Owned operation) {
  Operation& begun = *operation;
  const auto peer = static_cast<int32_t>(begun.peer);
  bool is_begun = false;
  switch (begun.kind) {
    case Operation::Kind::kLetter: {
      Letter letter;
      std::memcpy(&letter, begun.text.data(), sizeof(letter));
      letter.mark = kMark;
      letter.sequence = num_sent_[begun.peer]++;
      letter.length = static_cast<int32_t>(begun.text.size() - sizeof(letter));
      std::memcpy(begun.text.data(), &letter, sizeof(letter));
      is_begun = check_error(
          mpi_.send(mpi_.self, begun.text.data(), std::ssize(begun.text), peer, kLetters, &begun.request), "send");
      break;
    }
    case Operation::Kind::kSend:
      is_begun = check_error(mpi_.send(mpi_.self, begun.data, begun.bytes, peer, begun.tag, &begun.request), "send");
      break;
    case Operation::Kind::kReceive:
      is_begun =
          check_error(mpi_.receive(mpi_.self, begun.into, begun.bytes, peer, begun.tag, &begun.request), "receive");
      break;
  }
  running_.push_back(std::move(operation));
  return is_begun;
}

bool Wire::take_letter() {
  if (has_failed()) return false;
  int32_t is_found = 0;
  int32_t from = -1;
  int64_t bytes = 0;
  if (!check_error(mpi_.probe(mpi_.self, kLetters, &is_found, &from, &bytes), "look for messages") || is_found == 0)
    return false;
  constexpr auto kHead = static_cast<int64_t>(sizeof(Letter));
  if (from < 0 || from >= size_ || from == rank_ || bytes < kHead || bytes > std::ssize(letter_)) {
    fail("a message must be a letter of another process; got " + std::to_string(bytes) + " bytes from process " +
         std::to_string(from));
    return false;
  }
  if (!check_error(mpi_.take(mpi_.self, letter_.data(), bytes, from, kLetters), "receive")) return false;
  Letter letter;
  std::memcpy(&letter, letter_.data(), sizeof(letter));
  if (letter.mark != kMark || letter.sequence != num_received_[from] || letter.length != bytes - kHead ||
      letter.tag < 0 || letter.tag > tag_max_) {
    fail("a letter must be whole and the next one of its sender; got mark " + std::to_string(letter.mark) +
         ", number " + std::to_string(letter.sequence) + " instead of " + std::to_string(num_received_[from]) +
         ", length " + std::to_string(letter.length) + " of " + std::to_string(bytes - kHead) + ", tag " +
         std::to_string(letter.tag) + " from process " + std::to_string(from));
    return false;
  }
  ++num_received_[from];
  quiet_ns_[from].store(0, std::memory_order_relaxed);
  deliver(from, letter, {reinterpret_cast<const char*>(letter_.data()) + kHead, static_cast<size_t>(bytes - kHead)});
  return true;
}

// Letters of a team that is not here, or no more, tell of something that no longer matters.
void Wire::deliver(int64_t from, const Letter& letter, const std::string& text) {
  if (letter.team == kFrames) {
    begin_frame(from, letter);
    return;
  }
  if (letter.team == kProbes) {
    answer_probe(from, letter);
    return;
  }
  const auto found = receivers_.find(letter.team);
  if (found != receivers_.end()) found->second->take(from, letter, text);
}

bool Wire::end_done() {
  bool has_moved = false;
  for (int64_t tested = 0; tested < kTested && !running_.empty() && !has_failed(); ++tested) {
    if (next_tested_ >= running_.size()) next_tested_ = 0;
    const size_t i = next_tested_;
    Operation& operation = *running_[i];
    int32_t is_done = 0;
    int64_t bytes = 0;
    if (!check_error(mpi_.test(mpi_.self, &operation.request, &is_done, &bytes), "go on")) break;
    if (is_done == 0) {
      ++next_tested_;
      continue;
    }
    if (operation.kind == Operation::Kind::kReceive && bytes != operation.bytes) {
      fail("a payload must have the bytes that its letter has announced; got " + std::to_string(bytes) + " of " +
           std::to_string(operation.bytes) + " from process " + std::to_string(operation.peer));
      break;
    }
    has_moved = true;
    const Owned ended = std::move(running_[i]);
    running_[i] = std::move(running_.back());
    running_.pop_back();
    if (ended->kind == Operation::Kind::kReceive) bytes_received_.fetch_add(ended->bytes, std::memory_order_relaxed);
    if (ended->kind == Operation::Kind::kSend) bytes_sent_.fetch_add(ended->bytes, std::memory_order_relaxed);
    if (ended->done) ended->done();
    std::lock_guard guard(outbox_mutex_);
    --under_way_[ended->team];
  }
  return has_moved;
}

void Wire::fail(const std::string& cause) {
  std::lock_guard guard(cause_mutex_);
  if (cause_.empty()) cause_ = cause;
  has_failed_.store(true, std::memory_order_release);
}

std::string Wire::cause() const {
  std::lock_guard guard(cause_mutex_);
  return cause_;
}

void Wire::beat() {
  pthread_setname_np(pthread_self(), "tw-wire");
  int64_t last_ns = now_ns();
  int64_t told_ns = 0;
  while (!is_ending_.load(std::memory_order_relaxed) && !has_failed()) {
    progress();
    std::this_thread::sleep_for(kSlowPause);
    const int64_t now = now_ns();
    const int64_t passed = std::min(now - last_ns, kBeatNs);
    last_ns = now;
    const bool tells = now - told_ns > kBeatNs;
    if (tells) told_ns = now;
    for (int64_t p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      quiet_ns_[p].fetch_add(passed, std::memory_order_relaxed);
      if (!tells) continue;
      Letter letter;
      letter.team = kAlive;
      post(p, letter);
    }
  }
}

void Wire::stop_beating() {
  is_ending_.store(true, std::memory_order_relaxed);
  if (beats_.joinable()) beats_.join();
}

void Wire::finish() {
  stop_beating();
  while (progress()) {
  }
  const std::unique_lock guard(mutex_);
  if (has_failed()) return;
  check_error(mpi_.finish(mpi_.self), "end");
  fail("it has ended");
}

WireTraffic Wire::traffic() const {
  return {bytes_sent_.load(std::memory_order_relaxed), bytes_received_.load(std::memory_order_relaxed)};
}

void Wire::answer_probe(int64_t from, const Letter& letter) {
  const int64_t bytes = letter.numbers[0];
  if (bytes < 0 || bytes > kMostProbe) {
    fail("a probe has at most " + std::to_string(kMostProbe) + " bytes; got " + std::to_string(bytes) +
         " from process " + std::to_string(from));
    return;
  }
  if (probed_.empty()) probed_.resize(kMostProbe);
  reply(from, letter, probed_.data(), bytes, {});
}

int64_t Wire::probe(int64_t from, int64_t bytes, int64_t limit_ns) {
  check<ArgumentError>(bytes >= 0 && bytes <= kMostProbe, "[comm.Wire.probe] a probe has 0 to ", kMostProbe,
                       " bytes; got ", bytes, "; ask for fewer");
  const auto into = std::make_shared<std::vector<std::byte>>(bytes);
  const auto has_come = std::make_shared<std::atomic<bool>>(false);
  Letter letter;
  letter.team = kProbes;
  letter.numbers[0] = bytes;
  const int64_t begun = now_ns();
  ask(from, letter, into->data(), bytes, [into, has_come] { has_come->store(true); });
  return wait(limit_ns, [&] { return has_come->load(); }) ? now_ns() - begun : -1;
}

// ---- frames ------------------------------------------------------------------------------------------------------

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

void Wire::begin_frame(int64_t from, const Letter& letter) {
  const int64_t bytes = letter.numbers[0];
  if (letter.kind != kFrame || bytes < 0 || bytes > kMostFrame) {
    fail("a frame must have at most " + std::to_string(kMostFrame) + " bytes; got " + std::to_string(bytes) +
         " from process " + std::to_string(from));
    return;
  }
  const auto frame = std::make_shared<Frame>();
  frame->bytes.resize(bytes);
  {
    std::lock_guard guard(frames_mutex_);
    frames_[from].push_back(frame);
  }
  receive(from, letter, reinterpret_cast<std::byte*>(frame->bytes.data()), bytes, [this, frame] {
    std::lock_guard guard(frames_mutex_);
    frame->is_whole = true;
  });
}

bool Wire::has_frame(int64_t from) {
  std::lock_guard guard(frames_mutex_);
  return !frames_[from].empty() && frames_[from].front()->is_whole;
}

bool Wire::send_frame(int64_t to, std::string bytes, int64_t limit_ns) {
  check<ArgumentError>(std::ssize(bytes) <= kMostFrame, "[comm.Wire] a frame has at most ", kMostFrame, " bytes; got ",
                       bytes.size(), "; divide it");
  const auto frame = std::make_shared<std::string>(std::move(bytes));
  const auto is_gone = std::make_shared<std::atomic<bool>>(false);
  Letter letter;
  letter.kind = kFrame;
  letter.team = kFrames;
  letter.numbers[0] = std::ssize(*frame);
  give(to, letter, reinterpret_cast<const std::byte*>(frame->data()), std::ssize(*frame),
       [frame, is_gone] { is_gone->store(true, std::memory_order_release); });
  return wait(limit_ns, [&] { return is_gone->load(std::memory_order_acquire); });
}

std::optional<std::string> Wire::receive_frame(int64_t from, int64_t limit_ns) {
  check_bytes(from, 0);
  if (!wait(limit_ns, [&] { return has_frame(from); })) return std::nullopt;
  std::lock_guard guard(frames_mutex_);
  std::string frame = std::move(frames_[from].front()->bytes);
  frames_[from].pop_front();
  return frame;
}

}  // namespace tilewise::comm
