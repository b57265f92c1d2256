// Tasks and buffers as data: slots, arguments, handles, chunks of references.
//
// Purpose: the structs that submitters and workers share most, each with who may write it; layout.h has their places.
// Functions say which memory order they use. Memory: the store.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "protocols/countdown.h"
#include "protocols/ending.h"
#include "protocols/task_mutex.h"
#include "protocols/task_word.h"
#include "tasks/regions/access.h"
#include "tasks/regions/region_index.h"
#include "tilewise/pto_api.h"

namespace tilewise::tasks {

inline constexpr uint32_t kInlineProducers = 8;
inline constexpr uint32_t kMaxInlineArguments = 5;  // words; the rest is for producers

/// An odd generation: the slot has a task. See protocols/task_word.h.
using TaskWord = protocols::TaskWords<protocols::StdMemory>;
using TaskWordBits = TaskWord::Bits;
using TaskMutexes = protocols::TaskMutexes<protocols::StdMemory>;
using Countdown = protocols::Countdowns<protocols::StdMemory>;

enum SlotFlags : uint16_t {
  kUsesHeap = 1,
  kUsesMutexes = 2,
  kKeepsError = 4,
  kIsParent = 8,   // its kernel may submit: it completes after its children
  kHasTarget = 16,
  kHasPredicate = 32,
  kIsEmbedded = 64,  // the host has its body and its other conditions
  kIsReplayed = 128,  // a task of an instantiated graph, see instantiated_graph.h
  kHasName = 256,  // rare; stored in TaskNotes
  kHasDeadline = 512,
  kHasViews = 1024,
  kPrefersTarget = 2048,  // with kHasTarget: other workers that have been idle for a while may take it
};

struct GraphReplay;

/// The fields that a task of an instantiated graph has instead of producers. They are constant while the graph exists,
/// except the last two. Such a task has no SlotArgs. Memory: of the process.
struct Replayed {
  GraphReplay* replay;
  pto_kernel_fn function;  // nullptr: an empty task
  void* const* buffers;
  const uint64_t* scalars;
  const uint32_t* successors;  // slots
  uint32_t num_successors;
  uint32_t num_arrivals;  // until it is ready: one per producer, or one for the start of the replay
  uint64_t ready_ticks;  // while tracing
  int32_t status;  // for a task that is ended from outside
};

/// kExternal, kEnding, kEnded, kLeft: for a task that is ended from outside; see protocols/ending.h. kChildren: its
/// kernel has returned, its children have not ended.
enum class SlotState : uint8_t {
  kFilling = 0,
  kPending,
  kWaitsForEvent,
  kReady,
  kRunning,
  kExternal,
  kEnding,
  kEnded,
  kLeft,
  kChildren
};
using Ending = protocols::Endings<protocols::StdMemory, SlotState>;

/// The part of a task that every thread reads. Two cache lines. Written by its submitter, then by the threads that
/// advance it (one at a time), then by the one that runs it; `wake` by any thread.
struct alignas(128) Slot {
  TaskWord::Word word;
  int32_t kernel;
  int32_t priority;
  uint32_t next_waiter;  // + 1, in the list that this task is in
  uint32_t parent;  // slot + 1
  uint32_t poison;  // error number inherited
  uint32_t more_producers;  // + 1
  std::atomic<uint32_t> children;  // live children, plus 1 while its kernel runs; for a replayed task: missing arrivals
  std::atomic<uint32_t> child_error;
  std::atomic<uint64_t> sequence;
  std::atomic<uint32_t> cancelled;  // low bits of the generation that was cancelled
  std::atomic<uint32_t> released;  // the same: its submitter will not query its status
  uint8_t type_class;
  uint8_t num_producers;  // stored inline
  uint8_t room;  // inline places for producers
  uint8_t num_params;
  uint16_t flags;
  uint8_t num_scalars;
  std::atomic<SlotState> state;
  // second line
  union {
    uint64_t producers[kInlineProducers];
    Replayed replayed;  // with kIsReplayed
  };

  /// Begins a new task without parameters and producers; resets all fields of the last one.
  void begin(int32_t new_kernel, int32_t new_priority, uint8_t new_class, uint16_t new_flags) {
    kernel = new_kernel;
    priority = new_priority;
    next_waiter = parent = poison = more_producers = 0;
    type_class = new_class;
    num_producers = num_params = num_scalars = 0;
    room = kInlineProducers;
    flags = new_flags;
  }

  /// A task with few arguments, submitted by the fast path in one process, stores them after its producers: addresses
  /// as passed to the kernel, then scalars. So its runner reads two cache lines instead of three. All others store them
  /// in SlotArgs or Replayed.
  bool has_inline_arguments() const { return room + num_params + num_scalars == kInlineProducers; }
  void** addresses() { return reinterpret_cast<void**>(producers + room); }
  uint64_t* scalars() { return producers + room + num_params; }
};
static_assert(sizeof(Slot) == 128);

struct Param {
  uint64_t address;  // distance from the store's base
  uint32_t handle : 24;
  uint32_t mode : 7;
  uint32_t is_region : 1;
  uint32_t shadow;  // + 1: the handle that tracks it for this task's children
};
static_assert(sizeof(Param) == 16);

/// The arguments of a task without inline arguments, which only the runner reads, and rarely used fields.
struct alignas(64) SlotArgs {
  Param params[PTO_MAX_PARAMS];
  uint64_t more_scalars[PTO_MAX_SCALARS];  // scalars follow the task's parameters directly
  uint64_t predicate;  // distance of a uint32_t from the store's base
  uint32_t target_worker;
  uint32_t mutexes[PTO_MAX_PARAMS];  // handles, ascending; valid with kUsesMutexes, like the next two
  uint32_t num_mutexes;
  uint32_t num_mutexes_held;
  int32_t scope_depth;
  int32_t status;  // for a parent that waits for its children
  uint64_t awaited;  // value of the event that it waits for
  std::atomic<uint32_t> runner;  // thread + 1, while the kernel of a task that may submit runs
  uint64_t submit_ticks;  // while tracing
  uint64_t ready_ticks;

  uint64_t* scalars(uint32_t num_params) { return reinterpret_cast<uint64_t*>(params + num_params); }
  const uint64_t* scalars(uint32_t num_params) const { return reinterpret_cast<const uint64_t*>(params + num_params); }
};

/// Valid according to the slot's flags. Written by the submitter; the views' addresses by the runner.
struct TaskNotes {
  char name[PTO_MAX_NAME];
  int64_t deadline_ns;  // of CLOCK_MONOTONIC
  pto_view views[PTO_MAX_PARAMS];
};

/// kHasOwner: only the children of one task may use the buffer.
/// kReplayed: an instantiated graph has the buffer's last accesses; see instantiated_graph.h.
enum HandleFlags : uint32_t {
  kFrozen = 1,
  kHasRegions = 2,
  kOwnedByHeap = 4,
  kUsed = 8,
  kHasOwner = 16,
  kReplayed = 32
};

/// A word that one thread at a time changes while others may read it; they read it again under a lock. A write
/// publishes earlier writes: a thread that sees kUsed sees the state of that use.
struct SharedWord {
  std::atomic<uint32_t> word;
  operator uint32_t() const { return word.load(std::memory_order_acquire); }
  SharedWord& operator=(uint32_t value) {
    word.store(value, std::memory_order_release);
    return *this;
  }
  SharedWord& operator|=(uint32_t mask) { return *this = *this | mask; }
  SharedWord& operator&=(uint32_t mask) { return *this = *this & mask; }
};

/// A buffer. Written by submitters only, under the submission lock (or, inside a task, by that task alone); except
/// `mutex`, which workers use.
struct alignas(128) Handle {
  AccessState state;
  uint64_t address;  // distance from the store's base
  std::atomic<uint32_t> generation;
  SharedWord flags;
  // second cache line: not used by plain tasks
  TaskMutexes::Mutex mutex;  // [locked 1 | first waiter + 1]: commuting tasks, one at a time
  SharedWord owner;  // slot + 1 of the parent whose children use it; 0: outside tasks
  uint64_t bytes;
  uint32_t next;  // + 1: in its scope, or free
  RegionTree tree;  // boxes, if kHasRegions
  uint32_t replayed_by;  // first slot of the instantiated graph, if kReplayed
};
static_assert(sizeof(Handle) == 128 && offsetof(Handle, mutex) == 64);

/// Further references of a group or of a task's producers.
inline constexpr uint32_t kRefsPerChunk = 7;
struct alignas(64) Chunk {
  TaskRef refs[kRefsPerChunk];
  uint32_t next;
  uint32_t count;
};
static_assert(sizeof(Chunk) == 64);

}  // namespace tilewise::tasks
