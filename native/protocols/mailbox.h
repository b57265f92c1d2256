// Messages from many threads, of this process and others, to the threads of one that look for them between their work.
//
// Purpose: a post of a signal that another process's device waits for (comm/peers.h). Those who look say so: `awake`
// counts them. While there is one, a sender only leaves its message; otherwise it rings the bell, by which a thread
// that does nothing else sleeps. So a message costs its sender no system call while the receivers compute, and none is
// left lying: who looks no more says so, then looks once more; the sender leaves its message, then looks for who is
// awake; and each must see the other's first step. Before it sleeps the listener reads the bell, then looks; a ring in
// between keeps it awake.
//
// A message lies in the cell of its number. A cell's turn says what it waits for: 2n, a message of the n-th round; 2n +
// 1, that the message is taken. Who may call: send any thread of any process; the rest the receiver's. Blocks: never,
// but for the lock of those who take messages, and listen() until the bell rings. Memory: shared between processes;
// all-zero bytes are an empty mailbox at which no thread looks.
#pragma once
#include <mutex>

#include "protocols/spin_lock.h"

namespace tilewise::protocols {

struct MailboxOrders {
  static constexpr auto kPublish = std::memory_order_seq_cst;  // of a message: before the look for who is awake
  static constexpr auto kSeeAwake = std::memory_order_seq_cst;
  static constexpr auto kLeave = std::memory_order_seq_cst;  // before the last look
  static constexpr auto kLook = std::memory_order_seq_cst;
  static constexpr auto kTaken = std::memory_order_release;  // the message has been read: the cell is free
  static constexpr auto kSeeTaken = std::memory_order_acquire;
  static constexpr bool kLooksAfterLeaving = true;
  static constexpr bool kHearsBeforeLooking = true;
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

  /// False: there is no room now.
  bool send(const Message& message) {
    uint64_t number = tail.load(std::memory_order_relaxed);
    while (true) {
      Cell& cell = cells[number % kCells];
      const uint64_t free = number / kCells * 2;
      const uint64_t turn = cell.turn.load(Orders::kSeeTaken);
      if (turn < free) return false;
      if (turn > free) {  // another was faster
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

  /// Between work: takes what is there unless another thread is at it. take(message): false leaves it and all behind
  /// it.
  template <class Take>
  void look(Take&& take) {
    if (!has_any() || !lock.try_lock()) return;
    take_all(take);
    lock.unlock();
  }
  /// Takes all that was sent before, whatever other threads do.
  template <class Take>
  bool take_now(Take&& take) {
    std::lock_guard guard(lock);
    return take_all(take);
  }

  /// The calling thread will look from now on.
  void stay() { awake.fetch_add(1, std::memory_order_relaxed); }
  /// It looks no more. False: a message had come, and it stays.
  template <class Take>
  bool leave(Take&& take) {
    bool has_taken = false;
    if constexpr (!Orders::kLooksAfterLeaving) has_taken = take_now(take);
    awake.fetch_sub(1, Orders::kLeave);
    if constexpr (Orders::kLooksAfterLeaving) has_taken = take_now(take);
    if (has_taken) stay();
    return !has_taken;
  }

  /// Takes what is there, then sleeps until the bell rings, at most so long (limit_ns < 0: for ever), unless is_over():
  /// what makes that true rings afterwards.
  template <class Take, class IsOver>
  void listen(Take&& take, IsOver&& is_over, int64_t limit_ns) {
    uint32_t heard = 0;
    if constexpr (Orders::kHearsBeforeLooking) heard = bell.load(std::memory_order_acquire);
    take_now(take);
    if constexpr (!Orders::kHearsBeforeLooking) heard = bell.load(std::memory_order_acquire);
    if (!is_over()) Memory::sleep(bell, heard, limit_ns, true);
  }
  void ring() {
    bell.fetch_add(1, std::memory_order_release);  // what was sent is seen by who hears it
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
