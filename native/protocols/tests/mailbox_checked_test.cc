// The mailbox in every execution: each message is taken once, in each sender's order, and none is left lying when those
// who look have gone to sleep.
#include "checker/testing.h"
#include "protocols/mailbox.h"

using namespace tilewise::checker;
using tilewise::protocols::Mailbox;
using tilewise::protocols::MailboxOrders;

namespace {

/// Senders of kEach messages; a worker that looks, then leaves for ever; a listener, which takes the rest.
template <class Orders, int kSenders, int kEach, uint32_t kCells>
struct Posting {
  static constexpr int kNumThreads = kSenders + 2;
  static constexpr int kWorker = kSenders;
  static constexpr uint32_t kMessages = kSenders * kEach;
  Mailbox<CheckedMemory, uint32_t, kCells, Orders> mail;
  Plain<uint32_t> payload[kMessages];
  Atomic<uint32_t> num_taken;
  uint32_t next[kSenders] = {};

  Posting() {
    mail.tail.set_name("tail");
    mail.head.set_name("head");
    mail.awake.set_name("awake");
    mail.bell.set_name("bell");
    for (uint32_t c = 0; c < kCells; ++c) mail.cells[c].turn.set_name("turn", static_cast<int>(c));
    mail.stay();  // the worker
  }
  bool take(uint32_t message) {
    expect(message < kMessages, "a message that was sent");
    expect(payload[message] == message + 7, "what was written before it was sent");
    expect(next[message / kEach]++ == message % kEach, "a sender's messages once and in order");
    if (num_taken.fetch_add(1, std::memory_order_relaxed) + 1 == kMessages) mail.ring();  // the listener may go
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

/// The same without sleep: two threads take what senders send, one of them only where no other does.
template <class Orders, int kSenders, int kEach, uint32_t kCells>
struct Passing {
  static constexpr int kNumThreads = kSenders + 2;
  static constexpr uint32_t kMessages = kSenders * kEach;
  Posting<Orders, kSenders, kEach, kCells> posting;

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
  static const char* thread_name(int thread) { return Posting<Orders, kSenders, kEach, kCells>::thread_name(thread); }
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
struct LooksBeforeLeaving : MailboxOrders {
  static constexpr bool kLooksAfterLeaving = false;
};
struct HearsAfterLooking : MailboxOrders {
  static constexpr bool kHearsBeforeLooking = false;
};

}  // namespace

CASE("every message is taken once, and none is left lying") {
  HOLDS(Posting<MailboxOrders, 1, 1, 2>);
  HOLDS(Passing<MailboxOrders, 1, 3, 1>);
  HOLDS(Passing<MailboxOrders, 1, 3, 2>);
  HOLDS(Passing<MailboxOrders, 2, 1, 1>);
  HOLDS_WITH(weak_compares(), Passing<MailboxOrders, 2, 1, 2>);
}

CASE("every order of the mailbox is needed") {
  FOUND(Posting<PublishesWithoutFence, 1, 1, 2>);
  FOUND(Posting<SeesAwakeAnytime, 1, 1, 2>);
  FOUND(Posting<LeavesWithoutFence, 1, 1, 2>);
  FOUND(Posting<LooksWithoutFence, 1, 1, 2>);
  FOUND(Passing<FreesTooEarly, 1, 2, 1>);
  FOUND(Passing<OverwritesTooEarly, 1, 2, 1>);
  FOUND(Posting<LooksBeforeLeaving, 1, 1, 2>);
  FOUND(Posting<HearsAfterLooking, 1, 1, 2>);
}

CHECKED_TEST_MAIN
