// See far_peers.h.
#include "comm/far_peers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "comm/peer_block.h"

namespace tilewise::comm {

namespace {

constexpr int64_t kKeenNs = 2'000'000;  // after the last letter, while no worker is awake: looks all the time
constexpr int64_t kPauseNs = 200'000;

}  // namespace

FarPeers::FarPeers(FarOptions options, int64_t process, PeerBlock& own, std::function<bool(const Raise&)> take)
    : options_(std::move(options)), process_(process), own_(own), take_(std::move(take)) {
  for (const bool is_far : options_.is_far) blocks_.push_back(is_far ? std::make_unique<PeerBlock>() : nullptr);
  options_.wire->join(options_.team, *this);
}

FarPeers::~FarPeers() { leave(); }

Letter FarPeers::letter_of(LetterKind kind) const {
  Letter letter;
  letter.kind = static_cast<uint16_t>(kind);
  letter.team = options_.team;
  return letter;
}

void FarPeers::post(int64_t process, const Letter& letter, const std::string& text) {
  options_.wire->post(process, letter, text);
  options_.wire->progress();
}

void FarPeers::post_to_all(const Letter& letter) {
  for (int64_t p = 0; p < std::ssize(blocks_); ++p) {
    if (has(p)) options_.wire->post(p, letter);
  }
  options_.wire->progress();
}

// ---- what this process says --------------------------------------------------------------------------------------

void FarPeers::raise(int64_t process, const Raise& raise) {
  Letter letter = letter_of(LetterKind::kRaise);
  letter.flags = raise.is_poisoned ? 1 : 0;
  letter.numbers[0] = static_cast<int64_t>(raise.run);
  letter.numbers[1] = raise.device;
  letter.numbers[2] = raise.signal;
  post(process, letter);
}

void FarPeers::give(int64_t process, const Order& order, uint64_t number) {
  Letter letter = letter_of(LetterKind::kOrder);
  letter.flags = order.clears_poison ? 1 : 0;
  letter.numbers[0] = static_cast<int64_t>(number);
  letter.numbers[1] = static_cast<int64_t>(order.kind);
  letter.numbers[2] = order.list;
  letter.numbers[3] = order.num_symbols;
  const auto* const symbols = reinterpret_cast<const char*>(order.symbols);
  post(process, letter, {symbols, order.num_symbols * sizeof(int64_t)});
}

void FarPeers::answer(const Answer& answer, uint64_t number) {
  Letter letter = letter_of(LetterKind::kAnswer);
  letter.numbers[0] = static_cast<int64_t>(number);
  letter.numbers[1] = static_cast<int64_t>(answer.kind);
  letter.numbers[2] = answer.tile;
  letter.numbers[3] = answer.worker;
  letter.numbers[4] = answer.device;
  std::string text(answer.op, strnlen(answer.op, sizeof(answer.op)));
  letter.numbers[5] = std::ssize(text);
  text.append(answer.message, strnlen(answer.message, sizeof(answer.message)));
  post(0, letter, text);
}

void FarPeers::tell() {
  Letter letter = letter_of(LetterKind::kState);
  letter.flags = own_.is_at_work.load(std::memory_order_relaxed) ? 1 : 0;
  letter.numbers[0] = own_.pid.load(std::memory_order_relaxed);
  letter.numbers[1] = static_cast<int64_t>(own_.beats.load(std::memory_order_relaxed));
  letter.numbers[2] = static_cast<int64_t>(own_.num_completed.load(std::memory_order_relaxed));
  letter.numbers[3] = static_cast<int64_t>(own_.stopped.load(std::memory_order_relaxed));
  post_to_all(letter);
}

void FarPeers::end_raises(uint64_t run) {
  Letter letter = letter_of(LetterKind::kEnd);
  letter.numbers[0] = static_cast<int64_t>(run);
  post_to_all(letter);
}

bool FarPeers::have_ended(uint64_t run) const {
  return std::all_of(blocks_.begin(), blocks_.end(), [run](const auto& of) {
    return of == nullptr || of->ended.load(std::memory_order_acquire) >= run;
  });
}

// ---- what it hears -----------------------------------------------------------------------------------------------

// Between letters: takes messages of all kinds, says how it is, and sees to the wire's progress while all workers
// compute. While none of them is awake nothing is lost by looking all the time.
void FarPeers::listen(const std::function<bool()>& is_over) {
  int64_t told_ns = 0;
  int64_t keen_until = 0;
  while (!is_over()) {
    const bool has_moved = options_.wire->progress();
    const int64_t now = now_ns();
    if (now - told_ns > kBeatNs) {
      own_.beats.fetch_add(1, std::memory_order_relaxed);
      tell();
      told_ns = now;
    }
    if (has_moved) keen_until = now + kKeenNs;
    const bool is_keen = now < keen_until && own_.mail.awake.load(std::memory_order_relaxed) == 0;
    if (is_keen) StdMemory::yield();
    own_.mail.listen(take_, [&] { return is_keen || is_over(); }, kPauseNs);
  }
}

void FarPeers::refuse(int64_t from, const Letter& letter) {
  std::string text = "a letter must be of this version and name what there is; got kind " + std::to_string(letter.kind);
  for (const int64_t number : letter.numbers) text += ", " + std::to_string(number);
  options_.wire->fail(text + " from process " + std::to_string(from));
}

void FarPeers::take(int64_t from, const Letter& letter, const std::string& text) {
  if (from >= std::ssize(blocks_) || !has(from)) {
    refuse(from, letter);
    return;
  }
  switch (static_cast<LetterKind>(letter.kind)) {
    case LetterKind::kRaise:
      take_raise(from, letter);
      return;
    case LetterKind::kOrder:
      take_order(from, letter, text);
      return;
    case LetterKind::kAnswer:
      take_answer(from, letter, text);
      return;
    case LetterKind::kState:
      take_state(from, letter);
      return;
    case LetterKind::kEnd:
      undelivered_.push_back(
          {.raise = {.run = static_cast<uint64_t>(letter.numbers[0])}, .from = from, .is_end = true});
      deliver();
      return;
    case LetterKind::kRead:
    case LetterKind::kWrite:
    case LetterKind::kWritten:
      options_.take(from, letter, text);
      return;
  }
  refuse(from, letter);
}

void FarPeers::take_raise(int64_t from, const Letter& letter) {
  const auto device = static_cast<int32_t>(letter.numbers[1]);
  const auto signal = static_cast<int32_t>(letter.numbers[2]);
  if (letter.numbers[1] != device || letter.numbers[2] != signal) {
    refuse(from, letter);
    return;
  }
  undelivered_.push_back({.raise = {.run = static_cast<uint64_t>(letter.numbers[0]),
                                    .device = device,
                                    .signal = signal,
                                    .is_poisoned = letter.flags != 0},
                          .from = from});
  deliver();
}

void FarPeers::take_state(int64_t from, const Letter& letter) {
  PeerBlock& other = block(from);
  other.is_at_work.store(letter.flags != 0, std::memory_order_relaxed);
  other.pid.store(letter.numbers[0], std::memory_order_relaxed);
  other.beats.store(letter.numbers[1], std::memory_order_relaxed);
  other.num_completed.store(letter.numbers[2], std::memory_order_relaxed);
  other.stopped.store(letter.numbers[3], std::memory_order_relaxed);
  deliver();
}

// Into this process's own mailbox, where those of its host leave theirs.
void FarPeers::deliver() {
  for (; !undelivered_.empty(); undelivered_.pop_front()) {
    const Undelivered& next = undelivered_.front();
    if (next.is_end) {
      block(next.from).ended.store(next.raise.run, std::memory_order_release);
      own_.sleepers.wake_all_if_any(true, true);
    } else if (!own_.mail.send(next.raise)) {
      own_.mail.look(take_);
      if (!own_.mail.send(next.raise)) return;
    }
  }
}

void FarPeers::take_order(int64_t from, const Letter& letter, const std::string& text) {
  const int64_t count = letter.numbers[3];
  const uint64_t number = letter.numbers[0];
  const bool is_known = letter.numbers[1] == static_cast<int64_t>(Order::Kind::kRun) ||
                        letter.numbers[1] == static_cast<int64_t>(Order::Kind::kTalk);
  if (from != 0 || !is_known || count < 0 || count > kMaxSymbols ||
      std::ssize(text) != count * static_cast<int64_t>(sizeof(int64_t)) ||
      number != own_.ordered.load(std::memory_order_relaxed) + 1) {
    refuse(from, letter);
    return;
  }
  own_.order.kind = static_cast<Order::Kind>(letter.numbers[1]);
  own_.order.clears_poison = letter.flags != 0;
  own_.order.list = letter.numbers[2];
  own_.order.num_symbols = count;
  if (count > 0) std::memcpy(own_.order.symbols, text.data(), text.size());
  own_.ordered.store(number, std::memory_order_release);
  own_.sleepers.wake_all_if_any(true, true);
}

void FarPeers::take_answer(int64_t from, const Letter& letter, const std::string& text) {
  const int64_t length = letter.numbers[5];
  PeerBlock& other = block(from);
  const bool is_new =
      static_cast<uint64_t>(letter.numbers[0]) > other.answered.load(std::memory_order_relaxed);  // once: it is read
  if (process_ != 0 || letter.numbers[1] < 0 || letter.numbers[1] > static_cast<int64_t>(Answer::Kind::kOther) ||
      length < 0 || length > std::ssize(text) || !is_new) {
    refuse(from, letter);
    return;
  }
  other.answer.kind = static_cast<Answer::Kind>(letter.numbers[1]);
  other.answer.tile = letter.numbers[2];
  other.answer.worker = letter.numbers[3];
  other.answer.device = letter.numbers[4];
  Answer::set(other.answer.op, sizeof(other.answer.op), text.substr(0, length));
  Answer::set(other.answer.message, sizeof(other.answer.message), text.substr(length));
  other.answered.store(letter.numbers[0], std::memory_order_release);
  own_.sleepers.wake_all_if_any(true, true);
}

}  // namespace tilewise::comm
