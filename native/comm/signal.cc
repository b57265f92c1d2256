// See signal.h.
#include "comm/signal.h"

#include <memory>
#include <new>

namespace tilewise::comm {

bool Signal::wait(Waiter* waiter, uint64_t* poison) {
  const auto is_met = [&](uint64_t value) {
    if (value < waiter->threshold) return false;
    *poison = poison_.load(std::memory_order_relaxed);
    return true;
  };
  return counter_.wait(waiter, is_met, [&](Waiter* first) { waiter->next = first; });
}

void Signal::post(uint64_t poison) {
  uint64_t none = 0;
  if (poison != 0) poison_.compare_exchange_strong(none, poison, std::memory_order_relaxed);  // the value publishes it
  const auto next = [](Waiter* waiter) -> Waiter*& { return waiter->next; };
  const auto is_met = [](const Waiter* waiter, uint64_t value) { return waiter->threshold <= value; };
  Waiter* const met = counter_.add(1, is_met, next);
  if (met == nullptr) return;
  const uint64_t left = poison_.load(std::memory_order_relaxed);
  counter_.wake_all(met, next, [&](Waiter* waiter) { waiter->on_posted(waiter, left); });
}

SignalBoard::SignalBoard(int64_t num_signals)
    : arena_(num_signals * static_cast<int64_t>(sizeof(Signal))), size_(num_signals) {
  signals_ = reinterpret_cast<Signal*>(arena_.data());
  std::uninitialized_default_construct_n(signals_, num_signals);
}

void SignalBoard::clear_poison() {
  for (int64_t s = 0; s < size_; ++s) signals_[s].clear_poison();
}

}  // namespace tilewise::comm
