// The mailbox in every execution: each message is taken once, in each sender's order, and none stays unread when the
// receiving threads sleep.
#include "checker/testing.h"
#include "protocols/mailbox.h"

using namespace tilewise::checker;
using tilewise::protocols::Mailbox;
using tilewise::protocols::MailboxOrders;

namespace {

template <class Orders>
struct With {
  template <uint32_t kCells>
  using Mail = Mailbox<CheckedMemory, uint32_t, kCells, Orders>;
};
template <uint32_t kCells>
using Checked = Mailbox<CheckedMemory, uint32_t, kCells>;

/// Senders of kEach messages; a worker that checks, then leaves for ever; a listener, which takes the rest.
template <template <uint32_t> class Mail, int kSenders, int kEach, uint32_t kCells>
struct Posting {
  static constexpr int kNumThreads = kSenders + 2;
  static constexpr int kWorker = kSenders;
  static constexpr uint32_t kMessages = kSenders * kEach;
  Mail<kCells> mail;
  Plain<uint32_t> payload[kMessages];
  Atomic<uint32_t> num_taken;
  uint32_t next[kSenders] = {};

  Posting() {
    mail.tail.set_name("tail");
    mail.head.set_name("head");
    mail.awake.set_name("awake");
    mail.bell.set_name("bell");
    for (uint32_t c = 0; c < kCells; ++c) mail.cells[c].turn.set_name("turn", static_cast<int>(c));
    mail.stay();  // for the worker
  }
  bool take(uint32_t message) {
    expect(message < kMessages, "a message that was sent");
    expect(payload[message] == message + 7, "what was written before it was sent");
    expect(next[message / kEach]++ == message % kEach, "a sender's messages once and in order");
    if (num_taken.fetch_add(1, std::memory_order_relaxed) + 1 == kMessages) mail.ring();  // the listener may end
    return true;
  }
  void run(int thread) {
    const auto taking = [&](uint32_t message) { return take(message); };
    if (thread < kSenders) {
      for (uint32_t m = 0; m < kEach; ++m) {
        const uint32_t message = thread * kEach + m;
        payload[message] = message + 7;
        while (!mail.send(message)) relax();
      }
    } else if (thread == kWorker) {
      mail.look(taking);
      while (!mail.leave(taking)) {
      }
    } else {
      const auto is_over = [&] { return num_taken.load(std::memory_order_relaxed) == kMessages; };
      while (!is_over()) mail.listen(taking, is_over, -1);
    }
  }
  void end() { expect(num_taken.load() == kMessages, "all messages taken"); }
  static const char* thread_name(int thread) {
    static constexpr const char* kSender[] = {"sender", "second sender"};
    return thread < kSenders ? kSender[thread] : thread == kWorker ? "worker" : "listener";
  }
};

/// The same without sleep: two threads take messages, one of them only if the other is not taking any.
template <template <uint32_t> class Mail, int kSenders, int kEach, uint32_t kCells>
struct Passing {
  static constexpr int kNumThreads = kSenders + 2;
  static constexpr uint32_t kMessages = kSenders * kEach;
  Posting<Mail, kSenders, kEach, kCells> posting;

  void run(int thread) {
    if (thread < kSenders) return posting.run(thread);
    const auto taking = [&](uint32_t message) { return posting.take(message); };
    if (thread == kSenders) return posting.mail.look(taking);
    while (posting.num_taken.load(std::memory_order_relaxed) < kMessages) {
      posting.mail.look(taking);
      relax();
    }
  }
  void end() { posting.end(); }
  static const char* thread_name(int thread) { return Posting<Mail, kSenders, kEach, kCells>::thread_name(thread); }
};

struct PublishesWithoutFence : MailboxOrders {
  static constexpr auto kPublish = std::memory_order_release;
};
struct SeesAwakeAnytime : MailboxOrders {
  static constexpr auto kSeeAwake = std::memory_order_relaxed;
};
struct LeavesWithoutFence : MailboxOrders {
  static constexpr auto kLeave = std::memory_order_acq_rel;
};
struct LooksWithoutFence : MailboxOrders {
  static constexpr auto kLook = std::memory_order_acquire;
};
struct FreesTooEarly : MailboxOrders {
  static constexpr auto kTaken = std::memory_order_relaxed;
};
struct OverwritesTooEarly : MailboxOrders {
  static constexpr auto kSeeTaken = std::memory_order_relaxed;
};
template <uint32_t kCells>
struct LooksBeforeLeaving : Checked<kCells> {
  template <class Take>
  bool leave(Take&& take) {
    const bool has_taken = this->take_now(take);
    this->awake.fetch_sub(1, MailboxOrders::kLeave);
    if (has_taken) this->stay();
    return !has_taken;
  }
};
template <uint32_t kCells>
struct HearsAfterLooking : Checked<kCells> {
  template <class Take, class IsOver>
  void listen(Take&& take, IsOver&& is_over, int64_t limit_ns) {
    this->take_now(take);
    const uint32_t seen = this->bell.load(std::memory_order_acquire);
    if (!is_over()) CheckedMemory::sleep(this->bell, seen, limit_ns, true);
  }
};

}  // namespace

CASE("every message is taken once, and none stays unread") {
  HOLDS(Posting<Checked, 1, 1, 2>);
  HOLDS(Passing<Checked, 1, 3, 1>);
  HOLDS(Passing<Checked, 1, 3, 2>);
  HOLDS(Passing<Checked, 2, 1, 1>);
  HOLDS_WITH(weak_compares(), Passing<Checked, 2, 1, 2>);
}

CASE("every order of the mailbox is needed") {
  FOUND(Posting<With<PublishesWithoutFence>::Mail, 1, 1, 2>);
  FOUND(Posting<With<SeesAwakeAnytime>::Mail, 1, 1, 2>);
  FOUND(Posting<With<LeavesWithoutFence>::Mail, 1, 1, 2>);
  FOUND(Posting<With<LooksWithoutFence>::Mail, 1, 1, 2>);
  FOUND(Passing<With<FreesTooEarly>::Mail, 1, 2, 1>);
  FOUND(Passing<With<OverwritesTooEarly>::Mail, 1, 2, 1>);
  FOUND(Posting<LooksBeforeLeaving, 1, 1, 2>);
  FOUND(Posting<HearsAfterLooking, 1, 1, 2>);
}

CHECKED_TEST_MAIN
