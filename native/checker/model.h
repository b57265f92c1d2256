// The memory of a checked program: what each thread may read and write according to the C++ memory model.
//
// It is an operational form of C++20's release/acquire memory with seq_cst accesses and fences. Every atomic keeps all
// values ever written to it, in modification order. A thread has a view: per atomic, the oldest write that it may still
// read. A write carries the view that it releases, and an acquiring read merges that view. So a load has several
// possible results, and a store several possible positions: it may precede writes that its thread has not seen. The
// explorer chooses among them. Plain variables have the vector clocks of their last accesses; unordered accesses are a
// race.
//
// heavy and light barriers are the asymmetric fences of P1202, weaker than membarrier(2): a heavy barrier is ordered
// with every light one, two light ones are not ordered. Not covered: a load that reads a later store (load buffering;
// but see `pin`), consume, mixed sizes, accesses that a compiler invents.
//
// Who may call: explorer.cc and, on its fibers, checker.h. Memory: reused for every execution.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace tilewise::checker {

inline constexpr int kMaxThreads = 4;
inline constexpr int kMaxLocations = 40;
inline constexpr int kNoLocation = -1;

enum class Kind : uint8_t { kLoad, kStore, kChange, kCompare, kFence, kHeavy, kLight, kSleep, kWake };

using Clock = std::array<uint32_t, kMaxThreads>;  // of happens-before: events per thread

/// Whether all that `known` says of `thread` includes its event number `at`.
inline bool has_seen(const Clock& known, int thread, uint32_t at) { return known[thread] >= at; }
void join(Clock& clock, const Clock& other);

/// One step of a thread: what it asks for, then what came of it.
struct Op {
  Kind kind = Kind::kLoad;
  int location = kNoLocation;
  std::memory_order order = std::memory_order_seq_cst;
  std::memory_order failure = std::memory_order_seq_cst;  // of kCompare
  uint64_t operand = 0;  // what is written; how many are woken
  uint64_t expected = 0;  // of kCompare and kSleep
  uint64_t (*change)(uint64_t old, uint64_t operand) = nullptr;  // of kChange
  bool may_fail = false;  // a weak kCompare
  uint64_t value = 0;  // read
  bool has_succeeded = false;

  bool is_write() const { return kind == Kind::kStore || kind == Kind::kChange || kind == Kind::kCompare; }
  bool is_access() const { return location != kNoLocation && kind != Kind::kSleep && kind != Kind::kWake; }
  bool is_sequential() const {
    return kind == Kind::kFence || kind == Kind::kHeavy || (is_access() && order == std::memory_order_seq_cst);
  }
};

struct View {
  std::array<uint32_t, kMaxLocations> at{};  // per location: no older write than this
  Clock clock{};  // what happened before
};

/// An outcome of a step: the write that is read, or behind which is written. A weak compare may fail although it reads
/// what it expects.
struct Choice {
  int message = 0;
  bool fails = false;
  bool operator==(const Choice&) const = default;
};

class Model {
 public:
  /// A new execution: no locations; the scenario's constructor makes them.
  void reset(int num_threads);
  int add_location(uint64_t value);

  /// Before the threads and after them: one thread alone, which reads what was written last.
  uint64_t peek(int location) const;
  void poke(int location, uint64_t value);

  /// Every outcome that the step may have now. Wake: none or the first of the sleepers that it may choose.
  std::vector<Choice> choices(int thread, const Op& op) const;
  void execute(int thread, Op& op, Choice choice, int event);
  /// Fences that concern the thread alone; they are no step.
  void acquire_fence(int thread);
  void release_fence(int thread);

  /// The event that wrote a message; -1: it was there from the beginning.
  int writer(int location, int message) const { return locations_[location].messages[message].event; }
  uint64_t value(int location, int message) const { return locations_[location].messages[message].value; }
  int last_message(int location) const { return static_cast<int>(locations_[location].messages.size()) - 1; }
  /// A later write of another value.
  bool has_newer(int location, int message) const;
  /// The thread, which has paused, does not read that value again if there is such a write.
  void see_newer(int thread, int location, int message);

  const Clock& clock(int thread) const { return threads_[thread].now.clock; }
  uint32_t number(int thread) const { return threads_[thread].now.clock[thread]; }

  /// From now on, and since it was made, this thread's last read of the location must not be able to see a store that
  /// came later: such a store must be ordered behind the read. False: one is not.
  bool pin(int thread, int location);
  bool has_overtaken_pin() const { return has_overtaken_pin_; }

 private:
  struct Message {
    uint32_t time = 0;  // its place in the modification order
    bool is_attached = false;  // by read-modify-write: nothing comes between it and the one before
    int event = -1;
    uint64_t value = 0;
    int writer = -1;
    Clock known{};  // to its writer
    View view;  // that it releases
  };
  struct Pin {
    int thread;
    uint32_t number;
  };
  struct Location {
    std::vector<Message> messages;  // as they came
    std::vector<int> order;  // their modification order
    std::vector<Pin> pins;
  };
  struct Thread {
    View now;  // what it has seen
    View acquired;  // and would see with an acquire fence
    View released;  // at its last release fence
    std::array<int, kMaxLocations> last_read{};
    std::array<uint32_t, kMaxLocations> read_at{};  // number of that event
  };

  uint32_t bound(int thread, const Op& op) const;
  void read(int thread, const Op& op, int message, std::memory_order order);
  int write(int thread, const Op& op, uint64_t value, int behind, bool is_change, int event);
  void sequential_fence(int thread);
  void join_places(View& view, const View& other) const;

  int num_threads_ = 0;
  int num_locations_ = 0;
  std::array<Location, kMaxLocations> locations_;
  std::array<Thread, kMaxThreads> threads_;
  View sequential_;  // what seq_cst steps have agreed on
  View light_;  // what light barriers leave for heavy ones
  View heavy_;  // and the other way round
  View woken_;  // what a futex's wake leaves for its next sleep
  bool has_overtaken_pin_ = false;
};

}  // namespace tilewise::checker
