// Checks concurrent code: runs its threads in every order, with every result that the C++ memory model allows.
//
// A scenario is a class. Its constructor creates the shared state from Atomic and Plain (memory.h has the policy that
// instantiates the protocols of native/protocols with them). `void run(int thread)` is the function of each of
// `kNumThreads` threads, `const char* thread_name(int)` their names in reports, and `void end()` checks the result.
// explore() calls them once per execution. It returns the number of executions and the first failure with the trace of
// its steps: a failed expect(), a data race on a Plain, a deadlock, or a thread that spins for ever.
//
// Each operation on an Atomic is one step. Code between two steps is invisible to other threads, so it may use only
// Plain, Atomic and thread-local data. relax() marks a loop that only polls: a failed poll is repeated only when
// a newer value can be read.
//
// Executions that differ only in the order of independent steps are explored once (sleep sets, source sets: Abdulla et
// al., POPL 2014). The write that a load reads is part of its step, so a load and a store are independent except for
// the choices that the store adds.
//
// model.h describes what the memory model covers. Who may call: tests, from one thread. Sanitizers cannot be used with
// it: they do not know the stacks between which it switches, and there is only one real thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "checker/model.h"

namespace tilewise::checker {

struct Options {
  int64_t max_executions = 2'000'000;  // the result is incomplete beyond this
  bool reduces = true;  // false: every order of all steps, for tests of the reduction
  bool weak_compares_fail = false;  // compare_exchange_weak may fail spuriously, once per thread
};

struct Result {
  int64_t num_executions = 0;
  int64_t num_abandoned = 0;  // cut short because equivalent to another execution
  bool is_complete = false;  // everything was explored
  std::string failure;  // empty: none
  std::string trace;    // the failure's steps
  double seconds = 0;  // processor time
  bool holds() const { return is_complete && failure.empty(); }
};

/// A scenario without its type.
struct Program {
  int num_threads;
  void* (*make)();
  void (*run)(void* scenario, int thread);
  void (*end)(void* scenario);
  void (*destroy)(void* scenario);
  const char* (*thread_name)(void* scenario, int thread);
};

Result explore(const Program& program, const Options& options);

template <class Scenario>
Result explore(const Options& options = {}) {
  static_assert(Scenario::kNumThreads <= kMaxThreads);
  return explore(
      Program{Scenario::kNumThreads, [] { return static_cast<void*>(new Scenario()); },
              [](void* scenario, int thread) { static_cast<Scenario*>(scenario)->run(thread); },
              [](void* scenario) { static_cast<Scenario*>(scenario)->end(); },
              [](void* scenario) { delete static_cast<Scenario*>(scenario); },
              [](void* scenario, int thread) { return static_cast<Scenario*>(scenario)->thread_name(thread); }},
      options);
}

/// In a scenario's run() or end(): the execution fails unless the condition is true.
void expect(bool condition, const char* what);
/// The thread polls: it repeats its reads since its last write once a newer value can be read.
void relax();
void fence(std::memory_order order);
/// The asymmetric pair: see model.h.
void heavy_fence();
void light_fence();

/// The interface to the explorer; each call is a step of the calling thread. Not for tests.
int add_location(uint64_t value);
uint64_t perform(Op& op);
void name_location(int location, const char* name, int index);
void pin_location(int location);
const Clock* own_clock(int* thread);  // nullptr before and after the threads
[[gnu::cold]] void report_race(const char* what, const void* name);
void sleep_on(int location, uint64_t expected);
void wake(int location, int count);

/// The part of std::atomic that the protocols use.
template <class T>
class Atomic {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);

 public:
  Atomic(T value = {}) : location_(add_location(bits(value))) {}  // NOLINT: as std::atomic
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order order = std::memory_order_seq_cst) const {
    Op op{.kind = Kind::kLoad, .location = location_, .order = order};
    return value_of(perform(op));
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    Op op{.kind = Kind::kStore, .location = location_, .order = order, .operand = bits(value)};
    perform(op);
  }
  T exchange(T value, std::memory_order order = std::memory_order_seq_cst) {
    return change(value, order, [](uint64_t, uint64_t operand) { return operand; });
  }
  T fetch_add(T value, std::memory_order order = std::memory_order_seq_cst) {
    return change(value, order, [](uint64_t old, uint64_t operand) {
      return bits(static_cast<T>(value_of(old) + value_of(operand)));
    });
  }
  T fetch_sub(T value, std::memory_order order = std::memory_order_seq_cst) {
    return change(value, order, [](uint64_t old, uint64_t operand) {
      return bits(static_cast<T>(value_of(old) - value_of(operand)));
    });
  }
  bool compare_exchange_strong(T& expected, T value, std::memory_order order, std::memory_order failure) {
    return compare(expected, value, order, failure, false);
  }
  bool compare_exchange_strong(T& expected, T value, std::memory_order order = std::memory_order_seq_cst) {
    return compare(expected, value, order, weaker(order), false);
  }
  bool compare_exchange_weak(T& expected, T value, std::memory_order order, std::memory_order failure) {
    return compare(expected, value, order, failure, true);
  }
  bool compare_exchange_weak(T& expected, T value, std::memory_order order = std::memory_order_seq_cst) {
    return compare(expected, value, order, weaker(order), true);
  }
  /// futex_wait and futex_wake.
  void sleep(T expected) { sleep_on(location_, bits(expected)); }
  void wake_sleepers(int count) { wake(location_, count); }

  void set_name(const char* name, int index = -1) { name_location(location_, name, index); }
  /// Fails if a later store could have been read by this thread's last read. A guard against load buffering, which is
  /// not explored.
  void pin() const { pin_location(location_); }

 private:
  static uint64_t bits(T value) {
    uint64_t all = 0;
    std::memcpy(&all, &value, sizeof(T));
    return all;
  }
  static T value_of(uint64_t all) {
    T value;
    std::memcpy(&value, &all, sizeof(T));
    return value;
  }
  static std::memory_order weaker(std::memory_order order) {
    return order == std::memory_order_acq_rel   ? std::memory_order_acquire
           : order == std::memory_order_release ? std::memory_order_relaxed
                                                : order;
  }
  T change(T value, std::memory_order order, uint64_t (*function)(uint64_t, uint64_t)) {
    Op op{.kind = Kind::kChange, .location = location_, .order = order, .operand = bits(value), .change = function};
    return value_of(perform(op));
  }
  bool compare(T& expected, T value, std::memory_order order, std::memory_order failure, bool may_fail) {
    Op op{.kind = Kind::kCompare,
          .location = location_,
          .order = order,
          .failure = failure,
          .operand = bits(value),
          .expected = bits(expected),
          .may_fail = may_fail};
    expected = value_of(perform(op));
    return op.has_succeeded;
  }

  int location_;
};

/// A non-atomic variable: two unordered accesses of which one writes are a data race and fail.
template <class T>
class Plain {
 public:
  Plain(T value = {}) : value_(value) {}  // NOLINT: as a T
  Plain(const Plain& other) : value_(other.read()) {}
  Plain& operator=(const Plain& other) { return *this = other.read(); }
  Plain& operator=(T value) {
    note_write();
    value_ = value;
    return *this;
  }
  operator T() const { return read(); }  // NOLINT: as a T
  Plain& operator++() { return *this = read() + 1; }
  Plain& operator--() { return *this = read() - 1; }
  Plain& operator+=(T value) { return *this = read() + value; }
  Plain& operator-=(T value) { return *this = read() - value; }
  Plain& operator|=(T value) { return *this = read() | value; }

 private:
  T read() const {
    int thread = 0;
    if (const Clock* clock = own_clock(&thread)) {
      if (writer_ >= 0 && !has_seen(*clock, writer_, written_)) report_race("a read next to a write", this);
      read_[thread] = (*clock)[thread];
    }
    return value_;
  }
  void note_write() {
    int thread = 0;
    const Clock* clock = own_clock(&thread);
    if (clock == nullptr) return;
    if (writer_ >= 0 && !has_seen(*clock, writer_, written_)) report_race("a write next to a write", this);
    for (int t = 0; t < kMaxThreads; ++t) {
      if (!has_seen(*clock, t, read_[t])) report_race("a write next to a read", this);
    }
    writer_ = thread;
    written_ = (*clock)[thread];
  }

  T value_;
  int writer_ = -1;
  uint32_t written_ = 0;
  mutable Clock read_{};
};

}  // namespace tilewise::checker
