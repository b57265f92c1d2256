// Letters between processes of one team that share no memory. See peers.h.
#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "comm/peers_block.h"

namespace tilewise::comm {

namespace {

constexpr int64_t kKeenNs = 2'000'000;  // after the last letter, while no worker is awake: looks all the time
constexpr int64_t kPauseNs = 200'000;

}  // namespace

void Peers::join_wire() {
  far_blocks_.resize(options_.num_processes);
  for (int64_t p = 0; p < options_.num_processes; ++p) {
    if (is_far(p)) far_blocks_[p] = std::make_unique<Block>();
  }
  options_.wire->join(options_.team, *this);
}

Letter Peers::letter_of(LetterKind kind) const {
  Letter letter;
  letter.kind = static_cast<uint16_t>(kind);
  letter.team = options_.team;
  return letter;
}

void Peers::post_to_far(const Letter& letter) {
  for (int64_t p = 0; p < options_.num_processes; ++p) {
    if (is_far(p)) options_.wire->post(p, letter);
  }
  options_.wire->progress();
}

// ---- what this process says --------------------------------------------------------------------------------------

void Peers::raise_far(int64_t process, const Raise& raise) {
  Letter letter = letter_of(LetterKind::kRaise);
  letter.flags = raise.is_poisoned ? 1 : 0;
  letter.numbers[0] = static_cast<int64_t>(raise.run);
  letter.numbers[1] = raise.device;
  letter.numbers[2] = raise.signal;
  options_.wire->post(process, letter);
  options_.wire->progress();
}

void Peers::give_far(int64_t process, const Order& order) {
  Letter letter = letter_of(LetterKind::kOrder);
  letter.flags = order.clears_poison ? 1 : 0;
  letter.numbers[0] = static_cast<int64_t>(num_ordered_);
  letter.numbers[1] = static_cast<int64_t>(order.kind);
  letter.numbers[2] = order.list;
  letter.numbers[3] = order.num_symbols;
  const auto* const symbols = reinterpret_cast<const char*>(order.symbols);
  options_.wire->post(process, letter, {symbols, order.num_symbols * sizeof(int64_t)});
  options_.wire->progress();
}

void Peers::answer_far(const Answer& answer) {
  Letter letter = letter_of(LetterKind::kAnswer);
  letter.numbers[0] = static_cast<int64_t>(num_ordered_);
  letter.numbers[1] = static_cast<int64_t>(answer.kind);
  letter.numbers[2] = answer.tile;
  letter.numbers[3] = answer.worker;
  letter.numbers[4] = answer.device;
  std::string text(answer.op, strnlen(answer.op, sizeof(answer.op)));
  letter.numbers[5] = std::ssize(text);
  text.append(answer.message, strnlen(answer.message, sizeof(answer.message)));
  options_.wire->post(0, letter, std::move(text));
  options_.wire->progress();
}

void Peers::tell_far() {
  const Block& own = block(options_.process);
  Letter letter = letter_of(LetterKind::kState);
  letter.flags = own.is_at_work.load(std::memory_order_relaxed) ? 1 : 0;
  letter.numbers[0] = own.pid.load(std::memory_order_relaxed);
  letter.numbers[1] = static_cast<int64_t>(own.beats.load(std::memory_order_relaxed));
  letter.numbers[2] = static_cast<int64_t>(own.num_completed.load(std::memory_order_relaxed));
  letter.numbers[3] = static_cast<int64_t>(own.stopped.load(std::memory_order_relaxed));
  post_to_far(letter);
}

void Peers::end_raises() {
  if (options_.wire == nullptr) return;
  Letter letter = letter_of(LetterKind::kEnd);
  letter.numbers[0] = static_cast<int64_t>(run());
  post_to_far(letter);
}

bool Peers::have_far_ended() const {
  for (int64_t p = 0; p < options_.num_processes; ++p) {
    if (is_far(p) && block(p).ended.load(std::memory_order_acquire) < run()) return false;
  }
  return true;
}

// ---- what it hears -----------------------------------------------------------------------------------------------

// Between letters: takes messages of all kinds, says how it is, and sees to the wire's progress while all workers
// compute. While none of them is awake nothing is lost by looking all the time.
void Peers::listen_to_wire() {
  Block& own = block(options_.process);
  const auto is_over = [this] { return is_closed_.load(std::memory_order_relaxed); };
  int64_t told_ns = 0;
  int64_t keen_until = 0;
  while (!is_over()) {
    const bool has_moved = options_.wire->progress();
    const int64_t now = now_ns();
    if (now - told_ns > kBeatNs) {
      own.beats.fetch_add(1, std::memory_order_relaxed);
      tell_far();
      told_ns = now;
    }
    if (has_moved) keen_until = now + kKeenNs;
    const bool is_keen = now < keen_until && own.mail.awake.load(std::memory_order_relaxed) == 0;
    if (is_keen) StdMemory::yield();
    own.mail.listen([this](const Raise& raise) { return take(raise); }, [&] { return is_keen || is_over(); }, kPauseNs);
  }
}

void Peers::refuse(int64_t from, const Letter& letter) {
  std::string text = "a letter must be of this version and name what there is; got kind " + std::to_string(letter.kind);
  for (const int64_t number : letter.numbers) text += ", " + std::to_string(number);
  options_.wire->fail(text + " from process " + std::to_string(from));
}

void Peers::take(int64_t from, const Letter& letter, const std::string& text) {
  if (from >= options_.num_processes || !is_far(from)) {
    refuse(from, letter);
    return;
  }
  switch (static_cast<LetterKind>(letter.kind)) {
    case LetterKind::kRaise:
      if (letter.numbers[1] != static_cast<int32_t>(letter.numbers[1]) ||
          letter.numbers[2] != static_cast<int32_t>(letter.numbers[2])) {
        refuse(from, letter);
        return;
      }
      undelivered_.push_back({.raise = {.run = static_cast<uint64_t>(letter.numbers[0]),
                                        .device = static_cast<int32_t>(letter.numbers[1]),
                                        .signal = static_cast<int32_t>(letter.numbers[2]),
                                        .is_poisoned = letter.flags != 0},
                              .from = from});
      deliver();
      return;
    case LetterKind::kOrder:
      take_order(letter, text);
      return;
    case LetterKind::kAnswer:
      take_answer(from, letter, text);
      return;
    case LetterKind::kState: {
      Block& other = block(from);
      other.is_at_work.store(letter.flags != 0, std::memory_order_relaxed);
      other.pid.store(letter.numbers[0], std::memory_order_relaxed);
      other.beats.store(letter.numbers[1], std::memory_order_relaxed);
      other.num_completed.store(letter.numbers[2], std::memory_order_relaxed);
      other.stopped.store(letter.numbers[3], std::memory_order_relaxed);
      deliver();
      return;
    }
    case LetterKind::kEnd:
      undelivered_.push_back(
          {.raise = {.run = static_cast<uint64_t>(letter.numbers[0])}, .from = from, .is_end = true});
      deliver();
      return;
    case LetterKind::kRead:
    case LetterKind::kWrite:
    case LetterKind::kWritten:
      options_.take_letter(from, letter, text);
      return;
  }
  refuse(from, letter);
}

// Into this process's own mailbox, where those of its host leave theirs.
void Peers::deliver() {
  Block& own = block(options_.process);
  for (; !undelivered_.empty(); undelivered_.pop_front()) {
    const Undelivered& next = undelivered_.front();
    if (next.is_end) {
      block(next.from).ended.store(next.raise.run, std::memory_order_release);
      own.sleepers.wake_all_if_any(true, true);
    } else if (!own.mail.send(next.raise)) {
      own.mail.look([this](const Raise& raise) { return take(raise); });
      if (!own.mail.send(next.raise)) return;
    }
  }
}

void Peers::take_order(const Letter& letter, const std::string& text) {
  const int64_t count = letter.numbers[3];
  Block& own = block(options_.process);
  const uint64_t number = letter.numbers[0];
  const bool is_known = letter.numbers[1] == static_cast<int64_t>(Order::Kind::kRun) ||
                        letter.numbers[1] == static_cast<int64_t>(Order::Kind::kTalk);
  if (leads() || !is_known || count < 0 || count > kMaxSymbols ||
      std::ssize(text) != count * static_cast<int64_t>(sizeof(int64_t)) ||
      number != own.ordered.load(std::memory_order_relaxed) + 1) {
    refuse(0, letter);
    return;
  }
  own.order.kind = static_cast<Order::Kind>(letter.numbers[1]);
  own.order.clears_poison = letter.flags != 0;
  own.order.list = letter.numbers[2];
  own.order.num_symbols = count;
  if (count > 0) std::memcpy(own.order.symbols, text.data(), text.size());
  own.ordered.store(number, std::memory_order_release);
  own.sleepers.wake_all_if_any(true, true);
}

void Peers::take_answer(int64_t from, const Letter& letter, const std::string& text) {
  const int64_t length = letter.numbers[5];
  if (!leads() || letter.numbers[1] < 0 || letter.numbers[1] > static_cast<int64_t>(Answer::Kind::kOther) ||
      length < 0 || length > std::ssize(text)) {
    refuse(from, letter);
    return;
  }
  Block& other = block(from);
  other.answer.kind = static_cast<Answer::Kind>(letter.numbers[1]);
  other.answer.tile = letter.numbers[2];
  other.answer.worker = letter.numbers[3];
  other.answer.device = letter.numbers[4];
  Answer::set(other.answer.op, sizeof(other.answer.op), text.substr(0, length));
  Answer::set(other.answer.message, sizeof(other.answer.message), text.substr(length));
  other.answered.store(letter.numbers[0], std::memory_order_release);
  block(options_.process).sleepers.wake_all_if_any(true, true);
}

}  // namespace tilewise::comm
