// Messages from many threads, of this process and others, to one process whose threads check for them between tasks.
//
// Purpose: posts of signals that another process's device waits for (comm/peers.h). `awake` counts the threads that
// check. While it is above zero, a sender only stores its message; otherwise it rings the bell, on which a listener
// thread sleeps. So sending needs no system call while the receivers compute. No message stays unread: a thread that
// stops checking decrements `awake`, then checks once more; a sender stores its message, then reads `awake`; each must
// see the other's first step. Before the listener sleeps, it reads the bell, then checks; a ring in between keeps it
// awake.
//
// A message is stored in the cell of its number. The cell's `turn` says what happens next in the cell: 2n: the message
// of round n is stored; 2n + 1: that message is taken. Callers: send() any thread of any process; the rest the
// receiver's threads. Blocks: never, except for the lock of the threads that take messages, and listen() until the bell
// rings. Memory: shared between processes; all-zero bytes are an empty mailbox that no thread checks.
#pragma once
#include <mutex>

#include "protocols/spin_lock.h"

namespace tilewise::protocols {

struct MailboxOrders {
  static constexpr auto kPublish = std::memory_order_seq_cst;  // a message, before the sender reads `awake`
  static constexpr auto kSeeAwake = std::memory_order_seq_cst;
  static constexpr auto kLeave = std::memory_order_seq_cst;  // before the last check
  static constexpr auto kLook = std::memory_order_seq_cst;
  static constexpr auto kTaken = std::memory_order_release;  // the message has been read: the cell is free
  static constexpr auto kSeeTaken = std::memory_order_acquire;
};

template <class Memory, class Message, uint32_t kCells, class Orders = MailboxOrders>
struct Mailbox {
  template <class T>
  using Atomic = typename Memory::template Atomic<T>;
  template <class T>
  using Plain = typename Memory::template Plain<T>;

  struct Cell {
    Atomic<uint64_t> turn;
    Plain<Message> message;
  };

  /// Returns false if the mailbox is full.
  bool send(const Message& message) {
    uint64_t number = tail.load(std::memory_order_relaxed);
    while (true) {
      Cell& cell = cells[number % kCells];
      const uint64_t free = number / kCells * 2;
      const uint64_t turn = cell.turn.load(Orders::kSeeTaken);
      if (turn < free) return false;
      if (turn > free) {  // another sender was faster
        number = tail.load(std::memory_order_relaxed);
        continue;
      }
      if (!tail.compare_exchange_weak(number, number + 1, std::memory_order_relaxed, std::memory_order_relaxed))
        continue;
      cell.message = message;
      cell.turn.store(free + 1, Orders::kPublish);
      break;
    }
    if (awake.load(Orders::kSeeAwake) == 0) ring();
    return true;
  }

  /// Between tasks: takes the available messages, unless another thread is taking them. take(message) returns false to
  /// leave this message and all later ones in the mailbox.
  template <class Take>
  void look(Take&& take) {
    if (!has_any() || !lock.try_lock()) return;
    take_all(take);
    lock.unlock();
  }
  /// Takes all messages that were sent before the call; waits for other threads that take messages.
  template <class Take>
  bool take_now(Take&& take) {
    std::lock_guard guard(lock);
    return take_all(take);
  }

  /// The calling thread starts to check for messages.
  void stay() { awake.fetch_add(1, std::memory_order_relaxed); }
  /// The calling thread stops checking. Returns false if a message had arrived; then the thread still counts as
  /// checking.
  template <class Take>
  bool leave(Take&& take) {
    awake.fetch_sub(1, Orders::kLeave);
    if (!take_now(take)) return true;
    stay();
    return false;
  }

  /// Takes the available messages. Then sleeps until the bell rings or limit_ns have passed (negative: no limit),
  /// unless is_over(). A thread that makes is_over() true must ring afterwards.
  template <class Take, class IsOver>
  void listen(Take&& take, IsOver&& is_over, int64_t limit_ns) {
    const uint32_t seen = bell.load(std::memory_order_acquire);
    take_now(take);
    if (!is_over()) Memory::sleep(bell, seen, limit_ns, true);
  }
  void ring() {
    bell.fetch_add(1, std::memory_order_release);  // the listener acquires what was sent
    Memory::wake(bell, 1, true);
  }

  alignas(64) Atomic<uint64_t> tail;
  alignas(64) Atomic<uint64_t> head;  // written under the lock
  BasicSpinLock<Memory> lock;
  alignas(64) Atomic<uint32_t> awake;
  Atomic<uint32_t> bell;
  alignas(64) Cell cells[kCells];

 private:
  bool has_any() const {
    const uint64_t number = head.load(std::memory_order_relaxed);
    return cells[number % kCells].turn.load(std::memory_order_relaxed) == number / kCells * 2 + 1;
  }
  template <class Take>
  bool take_all(Take& take) {
    const uint64_t first = head.load(std::memory_order_relaxed);
    uint64_t number = first;
    while (true) {
      Cell& cell = cells[number % kCells];
      const uint64_t full = number / kCells * 2 + 1;
      if (cell.turn.load(Orders::kLook) != full || !take(static_cast<const Message&>(cell.message))) break;
      cell.turn.store(full + 1, Orders::kTaken);
      head.store(++number, std::memory_order_relaxed);
    }
    return number != first;
  }
};

}  // namespace tilewise::protocols
