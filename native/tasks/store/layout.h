// The store: everything that submitters and workers share, as plain structs addressed by index and offset.
//
// Purpose: one mapping, private or shared by two processes, contains thread slots, slots, handles, chunks, queues,
// failures, events and the heap. A shared mapping contains no pointers; buffers are stored as distances from its base.
// (In a private one, slots of instantiated graphs and of tasks that keep their arguments have pointers.) Each struct
// says who may write it, and functions say which memory order they use. Memory: one anonymous or file mapping;
// untouched pages cost nothing, and all-zero bytes are the empty state of every struct.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "protocols/biased_lock.h"
#include "protocols/counter.h"
#include "protocols/ready_ring.h"
#include "protocols/sleepers.h"
#include "tasks/regions/access.h"
#include "tasks/regions/region_index.h"
#include "tasks/store/slots.h"
#include "tilewise/pto_api.h"

namespace tilewise::tasks {

using Sleepers = protocols::Sleepers<protocols::StdMemory>;

inline constexpr uint32_t kNumTypes = 4;
inline constexpr uint32_t kRingCells = 1024;
inline constexpr uint32_t kMaxKernels = 512;
inline constexpr uint32_t kMaxErrors = 256;
inline constexpr uint32_t kMaxReplayable = 1 << 18;
inline constexpr uint64_t kSegmentBytes = 256 << 10;

/// Bytes that a buffer occupies in the heap. The limit, larger than any heap, keeps sums from overflowing.
inline constexpr uint64_t aligned(uint64_t bytes) {
  return ((bytes < 1ull << 48 ? bytes : 1ull << 48) + 63) & ~uint64_t{63};
}

/// Ready tasks of one thread and class.
using Ring = protocols::ReadyRing<protocols::StdMemory, kRingCells, kSlotBits, kNone>;

/// Ready tasks that have a priority, are for one worker, or did not fit in a ring: a binary heap with a lock.
struct OrderedQueue {
  alignas(64) protocols::SpinLock lock;
  std::atomic<uint32_t> size;
  uint64_t entries_offset;  // of OrderedEntry[]
};
enum SharedQueue : uint32_t { kUrgent = 0, kBackground = 1, kOverflow = 2, kNumSharedQueues = 3 };
struct OrderedEntry {
  int64_t priority;
  uint64_t sequence;
  uint32_t slot;
};

struct alignas(64) Event {
  protocols::Counter<protocols::StdMemory, uint32_t> counter;  // a waiter: slot + 1
  std::atomic<uint32_t> used;
  uint32_t generation;
};

/// A run of heap memory. Its scope's thread lends it to tasks until the scope ends; the thread that ends the loan frees
/// it.
struct alignas(64) Segment {
  Countdown::Loan loan;  // uses by tasks
  uint32_t run;  // in the run's first segment: number of segments
  uint32_t next;   // + 1: next run of the scope
  uint32_t owner;  // thread
  uint32_t is_used;  // guarded by the lock of HeapUse
  uint32_t first;  // first segment of this one's run
};

struct Scope {
  uint32_t first_handle;  // + 1
  uint32_t first_segment;  // + 1
  uint32_t current;  // + 1: the run that allocations use
  uint64_t offset;   // bytes used in it
};

/// One thread: its submission context if it submits, its rings, its counters. Written by that thread unless a
/// comment says otherwise.
struct alignas(128) ThreadSlot {
  uint64_t cursor;  // next slot to try: counts up, modulo the window
  uint64_t waited;  // cursor at the end of the last wait_all: only later slots can be in use
  uint32_t depth;  // open scopes
  uint32_t base_depth;  // open scopes of the outer tasks on this thread
  uint32_t free_handles;  // + 1: this thread's stock
  uint32_t num_free_handles;
  uint32_t free_chunks;  // + 1
  uint32_t num_free_chunks;
  uint32_t victim;  // thread to steal from first
  uint32_t classes;  // mask of classes that it runs
  uint32_t stall_rounds;
  int64_t interruption_checked_ns;  // time of the last interruption check
  std::atomic<uint32_t> num_open_scopes;  // depth, for other threads
  std::atomic<uint32_t> is_taken;
  std::atomic<uint32_t> blocked;  // 1 + Resource that it waits for and cannot free itself
  std::atomic<uint64_t> blocked_size;
  std::atomic<uint32_t> first_error;
  std::atomic<uint64_t> cancel_below;
  std::atomic<uint64_t> num_submitted;
  std::atomic<uint64_t> num_failed;
  std::atomic<uint64_t> num_helped;
  std::atomic<uint64_t> stall_ns;
  std::atomic<uint64_t> num_stalls;
  std::atomic<uint64_t> window_high;
  alignas(128) std::atomic<uint64_t> num_completed;
  std::atomic<uint32_t> is_busy;  // it runs a task or makes successors ready
  Scope scopes[PTO_MAX_SCOPES + 1];
};

struct ErrorRecord {
  TaskRef task;
  int32_t kernel;
  int32_t worker;
  int32_t submitter;
  int32_t status;
  uint32_t number;
  char name[PTO_MAX_NAME];
  char text[232];
};

/// An entry of the table of failed tasks (open addressing). key 0: empty.
struct FailedTask {
  TaskRef key;
  uint32_t error;
  uint32_t is_pinned;
  uint64_t submitted_at;  // its sequence number
  TaskRef parent;         // a child is remembered while its parent lives; 0: none
  uint64_t swept_at;  // sequence number at the first sweep after its completion; 0: none yet
};

/// The trace of a worker in another process.
inline constexpr uint64_t kSharedTraceTasks = 1 << 15;
struct SharedTrace {
  std::atomic<uint64_t> num_tasks;
  pto_trace_task tasks[kSharedTraceTasks];  // the newest
};

struct KernelName {
  char name[60];
  uint32_t flags;
};

/// The positions of the structs, as distances from the store's base.
struct Offsets {
  uint64_t thread_slots, slots, args, handles, regions, chunks, declared, notes, rings, queues, entries, events,
      segments, errors, failed, kernels, traces;
};

/// The pools from which threads refill their stocks.
struct alignas(128) Pools {
  protocols::SpinLock lock;
  uint32_t free_handles;  // + 1
  uint32_t num_free_handles;
  std::atomic<uint32_t> fresh_handles;  // ever taken: the high-water mark
  uint32_t free_chunks;  // + 1
  uint32_t num_free_chunks;
  uint32_t fresh_chunks;  // ever taken: the high-water mark
  uint32_t reclaim_below;  // with fewer free chunks than this, those of ended tasks are reclaimed from buffers

  uint32_t num_spare_chunks(uint32_t max_chunks) const { return num_free_chunks + max_chunks - fresh_chunks; }
};

/// Which segments of the heap are used; see heap.h.
struct alignas(128) HeapUse {
  protocols::SpinLock lock;
  uint32_t cursor;  // no segment below it is free
  std::atomic<uint32_t> used;
  std::atomic<uint32_t> high;
};

/// Tasks that have failed; see engine/failures.h.
struct alignas(128) Failures {
  protocols::SpinLock lock;
  std::atomic<uint32_t> num_failed;
  std::atomic<uint32_t> num_errors;
  std::atomic<uint32_t> overflow;  // an error that did not fit in the table
  uint32_t sweep_at;  // written under submit_lock
};

/// The process ids of the two processes of a shared file; 0: not attached yet.
struct Processes {
  std::atomic<int32_t> workers;
  std::atomic<int32_t> owner;
};

struct Header {
  uint64_t magic;
  uint64_t total_bytes;
  uint32_t num_workers;
  uint32_t num_thread_slots;  // workers first, then submitters
  uint32_t window;
  uint32_t num_slots;  // num_thread_slots * window, and behind them those of instantiated graphs
  uint32_t num_replayable;  // slots of instantiated graphs
  uint32_t num_classes;
  uint32_t num_queues;
  uint32_t class_of_type[kNumTypes];
  uint32_t helper_classes;  // mask of classes a helping submitter runs
  uint32_t served_classes;  // mask of classes that some worker runs (all, without workers)
  uint32_t max_handles;
  uint32_t max_regions;
  uint32_t max_chunks;
  uint32_t max_events;
  uint32_t num_segments;
  uint32_t failed_capacity;
  uint32_t is_shared;
  uint64_t heap;
  Offsets at;

  alignas(128) protocols::BiasedLock<protocols::StdMemory> submit_lock;  // owner: the first submitter
  std::atomic<uint64_t> sequence;  // written under submit_lock
  std::atomic<uint32_t> wants_chunks;  // few chunks are left: the next submission reclaims those of ended tasks
  protocols::SpinLock boxes_lock;  // the RegionIndex; taken after submit_lock, or alone by a task's children
  Pools pools;
  HeapUse heap_use;
  Failures failures;
  alignas(128) Sleepers parked;  // workers
  Sleepers waiting;  // threads that wait for tasks or for room
  std::atomic<int64_t> next_deadline_ns;  // earliest deadline of tasks that wait for events; 0: none
  alignas(128) std::atomic<uint32_t> num_urgent;
  std::atomic<uint32_t> num_background;
  std::atomic<uint32_t> num_overflow;
  std::atomic<uint32_t> num_preferring;  // ready tasks that prefer a worker, in the queues of all workers
  alignas(128) std::atomic<uint32_t> num_cancels;
  std::atomic<uint32_t> threads_in_use;  // one more than the highest number in use so far
  std::atomic<uint32_t> num_kernels;
  std::atomic<uint32_t>
      trace_limit;  // with two processes: workers trace while it is not 0; changed only while nothing runs
  std::atomic<uint32_t> closing;
  Processes processes;
  protocols::SpinLock kernel_lock;
};

/// The addresses of the structs in this process.
struct Store {
  std::byte* base = nullptr;
  Header* header = nullptr;
  ThreadSlot* thread_slots = nullptr;
  Slot* slots = nullptr;
  SlotArgs* args = nullptr;
  Handle* handles = nullptr;
  TaskNotes* notes = nullptr;  // of submitted tasks
  pto_region* declared = nullptr;  // [slot][parameter]: boxes of tasks that may submit
  std::byte* regions = nullptr;
  Chunk* chunks = nullptr;
  Ring* rings = nullptr;  // [thread][class]
  OrderedQueue* queues = nullptr;  // [shared queue][class], then one per worker
  Event* events = nullptr;
  Segment* segments = nullptr;
  ErrorRecord* errors = nullptr;
  FailedTask* failed = nullptr;
  KernelName* kernels = nullptr;
  SharedTrace* traces = nullptr;  // per worker, with two processes
  std::byte* heap = nullptr;

  uint64_t distance(const void* address) const {
    return reinterpret_cast<uint64_t>(address) - reinterpret_cast<uint64_t>(base);
  }
  /// The submitter of a task that is not replayed.
  uint32_t submitter_of(uint32_t slot) const { return slot / header->window; }
  /// The slot's index among its submitter's slots.
  uint32_t place_of(uint32_t slot) const { return slot & (header->window - 1); }
  /// The current task of a slot.
  TaskRef name_at(uint32_t slot) const { return make_ref(TaskWord::generation(slots[slot].word), slot); }
  uint32_t index_of(const Handle& handle) const { return static_cast<uint32_t>(&handle - handles); }
  bool lies_in_heap(uint64_t address) const {
    return address - header->heap < uint64_t{header->num_segments} * kSegmentBytes;
  }
  uint32_t threads_in_use() const { return header->threads_in_use.load(std::memory_order_acquire); }
  void* at(uint64_t distance) const { return reinterpret_cast<void*>(reinterpret_cast<uint64_t>(base) + distance); }
};

struct Options {
  uint32_t num_workers = 1;
  uint32_t window = 1024;
  uint32_t max_submitters = 16;
  uint32_t max_handles = 1 << 15;
  uint32_t max_regions = 4096;
  uint32_t max_events = 1024;
  uint32_t max_chunks = 0;  // 0: by the number of slots and handles
  uint32_t max_replayable = kMaxReplayable;  // maximum number of tasks in instantiated graphs
  uint64_t heap_bytes = 64 << 20;
  uint8_t worker_types[256] = {};  // masks
  bool has_types = false;
  bool is_pinned = false;
  bool starts_workers = true;  // false: the caller's threads are the workers
  const char* shared_path = nullptr;
  double peer_timeout_s = 10;
};

/// Bytes that make_store maps for these options.
uint64_t store_bytes(const Options& options);
/// Makes a store (anonymous, or a new file for shared_path) with everything empty. Throws ResourceError.
Store make_store(const Options& options);
/// Gives the complete file its final name, so that other processes never see an incomplete one. Throws ArgumentError if
/// the name exists.
void publish_store(const char* path);
/// Removes the temporary file of a store that was not published.
void drop_part(const char* path);
/// Maps the store of another process. Throws ArgumentError if the file is not a store.
Store attach_store(const char* path);
void unmap_store(const Store& store);
/// Populates a thread's slots in one call, to avoid a page fault per slot in its first submissions.
void populate(const Store& store, uint32_t thread);
/// Bytes of [base, base + bytes) that occupy memory now.
uint64_t resident_bytes(const std::byte* base, uint64_t bytes);

}  // namespace tilewise::tasks
