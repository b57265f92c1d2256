// See peers.h.
#include "comm/peers.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "comm/peer_block.h"

namespace tilewise::comm {

namespace {

constexpr int64_t kSpinNs = 20'000;  // then a thread that leads or serves sleeps

/// Polls for a short time.
template <class Look>
bool spin(Look&& look) {
  const int64_t until = now_ns() + kSpinNs;
  do {
    if (look()) return true;
    protocols::relax();
  } while (now_ns() < until);
  return false;
}

/// Sleeps until look() is true, at most limit_ns. While awake, makes progress for messages of remote processes, if
/// there are any.
template <class Look>
bool sleep(protocols::Sleepers<StdMemory>& sleepers, RemotePeers* remote, int64_t limit_ns, Look&& look) {
  const auto progress_and_look = [&] {
    if (remote != nullptr) remote->connection().progress();
    return look();
  };
  if (spin(progress_and_look)) return true;
  const int64_t until = now_ns() + limit_ns;
  while (!look()) {
    const int64_t left = until - now_ns();
    if (left <= 0) return false;
    sleepers.sleep(sleepers.look(), true, true, look, [left] { return left; });
  }
  return true;
}

}  // namespace

void Answer::set(char* text, int64_t size, const std::string& value) {
  const auto length = std::min<int64_t>(std::ssize(value), size - 1);
  std::memcpy(text, value.data(), length);
  text[length] = '\0';
}

int64_t Peers::bytes(int64_t num_processes) { return num_processes * static_cast<int64_t>(sizeof(PeerBlock)); }

Peers::Peers(PeersOptions options)
    : options_(std::move(options)), memory_(options_.file, bytes(options_.num_processes)) {
  const int64_t count = options_.num_processes;
  check<ArgumentError>(
      count >= 2 && options_.process >= 0 && options_.process < count && std::ssize(options_.ends) == count,
      "[comm.Peers] a device group must have at least two processes, including this one, and a descriptor per "
      "process; got process ",
      options_.process, " of ", count, " with ", options_.ends.size(), " descriptors; correct the argument");
  lives_.resize(count);
  if (options_.remote.connection != nullptr) {
    remote_ = std::make_unique<RemotePeers>(std::move(options_.remote), options_.process, block(options_.process),
                                            [this](const Post& post) { return take(post); });
  }
  block(options_.process).pid.store(getpid(), std::memory_order_relaxed);
}

Peers::~Peers() { close(); }

PeerBlock& Peers::block(int64_t process) const {
  if (is_remote(process)) return remote_->block(process);
  return reinterpret_cast<PeerBlock*>(memory_.data())[process];
}

bool Peers::take(const Post& post) {
  if (post.run > run_.load(std::memory_order_relaxed)) return false;
  options_.take(post);
  return true;
}

void Peers::post(int64_t process, const Post& post) {
  if (is_remote(process)) {
    remote_->post(process, post);
    return;
  }
  auto& mail = block(process).mail;
  while (!mail.send(post)) {
    look();
    if (is_closed_.load(std::memory_order_relaxed) || has_ended(process)) return;
    protocols::relax();
    StdMemory::yield();
  }
}

void Peers::look() {
  if (remote_ != nullptr) remote_->connection().progress_if_due();
  block(options_.process).mail.look([this](const Post& post) { return take(post); });
}

void Peers::stay() { block(options_.process).mail.stay(); }

bool Peers::leave() {
  return block(options_.process).mail.leave([this](const Post& post) { return take(post); });
}

void Peers::listen() {
  PeerBlock& own = block(options_.process);
  const auto is_over = [this] { return is_closed_.load(std::memory_order_relaxed); };
  if (remote_ != nullptr) remote_->listen(is_over);
  while (!is_over()) {
    own.beats.fetch_add(1, std::memory_order_relaxed);
    own.mail.listen([this](const Post& post) { return take(post); }, is_over, kBeatNs);
  }
}

void Peers::close() {
  is_closed_.store(true, std::memory_order_relaxed);
  block(options_.process).mail.ring();
  if (remote_ != nullptr) remote_->leave();
}

void Peers::end_posts() {
  if (remote_ != nullptr) remote_->end_posts(run());
}

bool Peers::settle(int64_t limit_ns) {
  const auto has_settled = [this] {
    block(options_.process).mail.take_now([this](const Post& post) { return take(post); });
    return remote_ == nullptr || remote_->have_ended(run());
  };
  return has_settled() || sleep(block(options_.process).sleepers, remote_.get(), limit_ns, has_settled);
}

uint64_t Peers::send_order(const Order& order) {
  ++num_ordered_;
  for (int64_t p = 1; p < num_processes(); ++p) {
    if (is_remote(p)) {
      remote_->send_order(p, order, num_ordered_);
      continue;
    }
    PeerBlock& other = block(p);
    other.order.kind = order.kind;
    other.order.clears_poison = order.clears_poison;
    other.order.program = order.program;
    other.order.list = order.list;
    other.order.num_symbols = order.num_symbols;
    std::copy_n(order.symbols, order.num_symbols, other.order.symbols);
    other.ordered.store(num_ordered_, std::memory_order_release);
    other.sleepers.wake_all_if_any(true, true);
  }
  return num_ordered_;
}

bool Peers::await_order(int64_t limit_ns, Order* order, uint64_t* number) {
  PeerBlock& own = block(options_.process);
  const auto has_come = [&] { return own.ordered.load(std::memory_order_acquire) > num_ordered_; };
  if (!sleep(own.sleepers, remote_.get(), limit_ns, has_come)) return false;
  num_ordered_ = own.ordered.load(std::memory_order_acquire);
  *order = own.order;
  *number = num_ordered_;
  return true;
}

void Peers::answer(const Answer& answer) {
  if (is_remote(0)) {
    remote_->answer(answer, num_ordered_);
    return;
  }
  PeerBlock& own = block(options_.process);
  own.answer = answer;
  own.answered.store(num_ordered_, std::memory_order_release);
  block(0).sleepers.wake_all_if_any(true, true);
}

bool Peers::have_answered() const {
  for (int64_t p = 1; p < num_processes(); ++p) {
    if (block(p).answered.load(std::memory_order_acquire) != num_ordered_) return false;
  }
  return true;
}

bool Peers::await_answers(int64_t limit_ns) {
  return sleep(block(0).sleepers, remote_.get(), limit_ns, [this] { return have_answered(); });
}

const Answer& Peers::answer_of(int64_t process) const { return block(process).answer; }

void Peers::report(uint64_t num_completed, bool is_at_work) {
  PeerBlock& own = block(options_.process);
  own.num_completed.store(num_completed, std::memory_order_relaxed);
  own.is_at_work.store(is_at_work, std::memory_order_relaxed);
}

Progress Peers::progress(int64_t process) const {
  const PeerBlock& other = block(process);
  return {other.pid.load(std::memory_order_relaxed), other.num_completed.load(std::memory_order_relaxed),
          other.is_at_work.load(std::memory_order_relaxed)};
}

void Peers::report_stopped() {
  const bool is_new = block(options_.process).stopped.exchange(run(), std::memory_order_relaxed) != run();
  if (is_new && remote_ != nullptr) remote_->report();
}

bool Peers::is_stopped() const {
  for (int64_t p = 0; p < num_processes(); ++p) {
    if (block(p).stopped.load(std::memory_order_relaxed) == run()) return true;
  }
  return false;
}

bool Peers::has_ended(int64_t process) const {
  if (options_.ends[process] < 0) return false;
  pollfd end{options_.ends[process], POLLIN, 0};
  return poll(&end, 1, 0) > 0;
}

// Only time in which this thread was awake counts, so that no process is lost while the machine is suspended. A silent
// leader on this host is not lost: the user may have stopped it (Ctrl-Z) and may continue it. Silence is the only sign
// that a remote process has ended.
int64_t Peers::find_lost(int64_t limit_ns, std::string* how) {
  const int64_t now = now_ns();
  const int64_t passed = std::min(now - looked_ns_, 4 * kBeatNs);
  looked_ns_ = now;
  for (int64_t p = 0; p < num_processes(); ++p) {
    if (p == process()) continue;
    const uint64_t beats = block(p).beats.load(std::memory_order_relaxed);
    Life& life = lives_[p];
    life.quiet_ns = beats == life.beats ? life.quiet_ns + passed : 0;
    life.beats = beats;
    *how = "";
    if (has_ended(p)) {
      *how = "has ended";
    } else if (is_remote(p) && remote_->connection().has_failed()) {
      *how = "cannot be reached: " + remote_->connection().cause();
    } else if ((leads() || is_remote(p)) && life.quiet_ns > limit_ns) {
      *how = "has not responded for " + std::to_string(life.quiet_ns / 1'000'000'000) + " s";
    }
    if (how->empty()) continue;
    if (remote_ != nullptr) remote_->connection().fail("process " + std::to_string(p) + " " + *how);
    return p;
  }
  return -1;
}

}  // namespace tilewise::comm
