// The passive scheduler of one device: window of task slots, handles, dependency edges, ready tasks.
//
// Purpose: orders tasks by the data they touch (read-after-write, write-after-write, write-after-read; readers run in
// parallel). Nobody sleeps here and no thread belongs to it: whoever submits, completes or raises a signal runs it.
// Who may call: acquire/submit/end_walk by the one worker that walks; the rest by any thread. Blocks: only for lock_.
// Memory order: everything under lock_, so what a task wrote before complete() is visible to whoever take()s a
// successor; work() may be read without it. Memory: vectors of the device; nothing is allocated in the steady state.
//
// A slot lives until its task completes. A reference to a task is slot plus 64-bit sequence; a mismatch means
// "completed", so a consumer of a completed producer is ready at once and nothing is ever indexed by a raw id.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "rings/index_pool.h"
#include "rings/ready_heap.h"
#include "rings/spin_lock.h"
#include "runtime/task.h"

namespace tilewise::runtime {

/// Access bits beyond kIn and kOut: waits for the tile's readers and writer, leaves no trace (memory reuse).
inline constexpr uint32_t kReuse = 4;

struct Access {
  int32_t handle;
  uint32_t bits;
};

/// A task that waits for a signal, as the deadline's report needs it.
struct BlockedWait {
  uint64_t sequence;
  const Instr* instr;
  int64_t index;
  int64_t signal;
  uint64_t expected;
};

class Scheduler {
 public:
  enum class Next { kNothing, kTask, kWalk };

  /// What a completion changed. finished: that was the last task of the run.
  struct Completion {
    int64_t num_ready;
    bool finished;
  };

  Scheduler(int64_t window, int64_t num_handles, int64_t low_water);

  /// Starts a run: the walker may be advanced. Only when the previous run is finished.
  void open(bool tracing);

  /// Work for a worker: a task (its slot), or the walker when few tasks are ready and the window has room.
  Next take(int32_t* slot);

  // The walking worker, between take() == kWalk and end_walk().
  int32_t acquire();  // a free slot, kNone when the window is full
  Task& task(int32_t slot) { return slots_[slot]->task; }
  /// Links the task behind earlier tasks. num_waits > 0 leaves it guarded until satisfy(slot, guard + met waits).
  /// Merges repeated handles in place. True when the task became ready.
  bool submit(int32_t slot, std::vector<Access>& accesses, int64_t num_waits);
  /// True when that ended the run.
  bool end_walk(bool done);

  /// `count` external events of a submitted task have happened. True when the task became ready.
  bool satisfy(int32_t slot, int64_t count, uint64_t poison);
  /// The task's kernel ran (poison 0) or was skipped: wakes successors, frees the slot.
  Completion complete(int32_t slot, uint64_t poison);

  /// Inherited error id of a ready task, 0 for none.
  uint64_t poison(int32_t slot) const { return slots_[slot]->poison; }
  int64_t ready_ns(int32_t slot) const { return slots_[slot]->ready_ns; }
  /// Ready tasks plus one if the walker can be advanced: what an idle worker looks at before it sleeps.
  int64_t work() const { return work_.load(std::memory_order_seq_cst); }

  std::vector<BlockedWait> blocked(const std::function<uint64_t(int64_t)>& signal_value);
  int64_t high_water() const { return high_water_; }
  int64_t num_live_nodes() const { return edges_.num_live() + nodes_.num_live(); }
  int64_t node_capacity() const { return edges_.capacity() + nodes_.capacity(); }

 private:
  struct TaskRef {
    int32_t slot = rings::kNone;
    uint64_t sequence = 0;
  };
  struct Handle {
    TaskRef writer;
    int32_t readers = rings::kNone;  // nodes since the last write
    uint64_t poison = 0;             // left by a poisoned writer until the next full write
    uint64_t mark = 0;               // sequence of the submission that last saw it, and where
    int32_t mark_index = 0;
  };
  /// One access of one live task, on the task's list and, if it reads, on the handle's.
  struct Node {
    int32_t handle;
    int32_t slot;
    int32_t next_of_task;
    int32_t next = rings::kNone;
    int32_t previous = rings::kNone;
    bool is_write;
    bool is_linked;
  };
  struct Edge {
    int32_t successor;
    int32_t next;
  };
  struct Slot {
    uint64_t sequence = 0;  // 0: no live task
    int64_t pending = 0;
    bool submitted = false;
    uint64_t poison = 0;
    int32_t first_edge = rings::kNone;
    int32_t first_node = rings::kNone;
    uint64_t last_successor = 0;
    int64_t ready_ns = 0;
    Task task;
  };

  void merge(uint64_t sequence, std::vector<Access>& accesses);
  void depend(Slot& task, int32_t slot, const TaskRef& producer);
  void record(int32_t slot, const Access& access);
  void unlink(const Node& node, int32_t index);
  void release_nodes(Slot& task, TaskRef self, uint64_t poison);
  bool drop_pending(int32_t slot, int64_t count, uint64_t poison);
  void make_ready(int32_t slot);
  void publish();
  bool is_finished() const;
  bool can_walk() const { return walk_open_ && !walk_busy_ && !free_.empty(); }

  rings::SpinLock lock_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<int32_t> free_;
  std::vector<Handle> handles_;
  rings::IndexPool<Node> nodes_;
  rings::IndexPool<Edge> edges_;
  rings::ReadyHeap ready_;
  uint64_t next_sequence_ = 1;
  int64_t low_water_;
  int64_t high_water_ = 0;
  bool walk_open_ = false;
  bool walk_busy_ = false;
  bool tracing_ = false;
  bool has_poison_ = false;  // some handle is poisoned
  std::atomic<int64_t> work_{0};
};

int64_t now_ns();

}  // namespace tilewise::runtime
