// The memory of a checked program: what each thread may read and write according to the C++ memory model.
//
// It is an operational form of C++20's release/acquire memory with seq_cst accesses and fences. Every atomic keeps all
// values ever written to it, in modification order. A thread has a view: per atomic, the oldest write that it may still
// read. A write has the view that it releases, and an acquiring read merges that view. So a load has several
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

using Clock = std::array<uint32_t, kMaxThreads>;  // a vector clock of happens-before: events per thread

/// Whether `clock` includes event number `at` of `thread`.
inline bool has_seen(const Clock& clock, int thread, uint32_t at) { return clock[thread] >= at; }
void join(Clock& clock, const Clock& other);

/// One step of a thread: the operation, then its result.
struct Op {
  Kind kind = Kind::kLoad;
  int location = kNoLocation;
  std::memory_order order = std::memory_order_seq_cst;
  std::memory_order failure = std::memory_order_seq_cst;  // for kCompare
  uint64_t operand = 0;  // the value to write; the number of threads to wake
  uint64_t expected = 0;  // for kCompare and kSleep
  uint64_t (*change)(uint64_t old, uint64_t operand) = nullptr;  // for kChange
  bool may_fail = false;  // a weak kCompare
  uint64_t value = 0;  // the value read
  bool has_succeeded = false;

  bool is_write() const { return kind == Kind::kStore || kind == Kind::kChange || kind == Kind::kCompare; }
  bool is_access() const { return location != kNoLocation && kind != Kind::kSleep && kind != Kind::kWake; }
  bool is_sequential() const {
    return kind == Kind::kFence || kind == Kind::kHeavy || (is_access() && order == std::memory_order_seq_cst);
  }
};

struct View {
  std::array<uint32_t, kMaxLocations> at{};  // per location: the oldest write that may be read
  Clock clock{};  // events that happened before
};

/// An outcome of a step: the write that is read, or after which the new one is placed. A weak compare may fail although
/// it reads the expected value.
struct Choice {
  int message = 0;
  bool fails = false;
  bool operator==(const Choice&) const = default;
};

class Model {
 public:
  /// Starts a new execution without locations; the scenario's constructor adds them.
  void reset(int num_threads);
  int add_location(uint64_t value);

  /// For the single thread before and after the threads: the last value written.
  uint64_t peek(int location) const;
  void poke(int location, uint64_t value);

  /// Every outcome that the step may have now. For a wake: none, or the first of the possible sleepers.
  std::vector<Choice> choices(int thread, const Op& op) const;
  void execute(int thread, Op& op, Choice choice, int event);
  /// Fences that affect only the thread; they are not steps.
  void acquire_fence(int thread);
  void release_fence(int thread);

  /// The event that wrote a message; -1: the initial value.
  int writer(int location, int message) const { return locations_[location].messages[message].event; }
  uint64_t value(int location, int message) const { return locations_[location].messages[message].value; }
  int last_message(int location) const { return static_cast<int>(locations_[location].messages.size()) - 1; }
  /// Whether a later write has another value.
  bool has_newer(int location, int message) const;
  /// After a pause, makes the thread read a newer value if there is one.
  void see_newer(int thread, int location, int message);

  const Clock& clock(int thread) const { return threads_[thread].now.clock; }
  uint32_t number(int thread) const { return threads_[thread].now.clock[thread]; }

  /// Requires that this thread's last read of the location cannot see any store that was or will be made after it: such
  /// a store must be ordered after the read. Returns false if one is not.
  bool pin(int thread, int location);
  bool has_overtaken_pin() const { return has_overtaken_pin_; }

 private:
  struct Message {
    uint32_t time = 0;  // position in the modification order
    bool is_attached = false;  // by a read-modify-write: follows the previous write directly
    int event = -1;
    uint64_t value = 0;
    int writer = -1;
    Clock clock{};  // of its writer
    View view;  // the released view
  };
  struct Pin {
    int thread;
    uint32_t number;
  };
  struct Location {
    std::vector<Message> messages;  // in the order of creation
    std::vector<int> order;  // in modification order
    std::vector<Pin> pins;
  };
  struct Thread {
    View now;  // the thread's view
    View acquired;  // the view after an acquire fence
    View released;  // the view at the last release fence
    std::array<int, kMaxLocations> last_read{};
    std::array<uint32_t, kMaxLocations> read_at{};  // event number of that read
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
  View sequential_;  // shared by seq_cst steps
  View light_;  // released by light barriers to heavy ones
  View heavy_;  // released by heavy barriers to light ones
  View woken_;  // released by a futex's wake to its next sleep
  bool has_overtaken_pin_ = false;
};

}  // namespace tilewise::checker
