// See signal.h.
#include "comm/signal.h"

#include <memory>
#include <mutex>
#include <new>

namespace tilewise::comm {

bool Signal::wait(Waiter* waiter, uint64_t* poison) {
  std::lock_guard guard(lock_);
  if (value_.load(std::memory_order_relaxed) >= waiter->threshold) {
    *poison = poison_.load(std::memory_order_relaxed);
    return true;
  }
  waiter->next = waiters_;
  waiters_ = waiter;
  return false;
}

void Signal::raise(uint64_t poison) {
  Waiter* met = nullptr;
  uint64_t left = 0;
  {
    std::lock_guard guard(lock_);
    if (poison != 0 && poison_.load(std::memory_order_relaxed) == 0) {
      poison_.store(poison, std::memory_order_release);
    }
    left = poison_.load(std::memory_order_relaxed);
    const uint64_t value = value_.load(std::memory_order_relaxed) + 1;
    value_.store(value, std::memory_order_release);
    for (Waiter** link = &waiters_; *link != nullptr;) {
      Waiter* waiter = *link;
      if (waiter->threshold > value) {
        link = &waiter->next;
        continue;
      }
      *link = waiter->next;
      waiter->next = met;
      met = waiter;
    }
  }
  while (met != nullptr) {
    Waiter* next = met->next;
    met->on_raised(met, left);
    met = next;
  }
}

SignalBoard::SignalBoard(int64_t num_signals)
    : arena_(num_signals * static_cast<int64_t>(sizeof(Signal))), size_(num_signals) {
  signals_ = reinterpret_cast<Signal*>(arena_.data());
  std::uninitialized_default_construct_n(signals_, num_signals);
}

}  // namespace tilewise::comm
