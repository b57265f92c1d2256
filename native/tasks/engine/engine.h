// The task runtime of one device, as data for the functions in its folders.
//
// Purpose: orders tasks by the data that they access, and runs them. There is no scheduler thread: the thread that
// submits or completes a task makes its successors ready, and workers (and waiting submitters) take ready tasks. The
// store has everything that two processes may share; the rest is private to this process. The folders:
//
//   engine/  thread slots, kernels, handles, failures  submit/  from a specification to a task that waits or is ready
//   run/     ready tasks, order among live tasks,      replay/  recordings, and replays of them
//            events, running and completing, workers   embed/   an engine inside other native code
//   wait/    waiting for tasks and for room            api/     the C interface; opening, closing, inspecting
//
// Each field says who may write it. Memory order: a task's writes reach its successors through the exchange of its task
// state word and the compare-and-swap with which they started to wait; see store/slots.h.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tasks/engine/callbacks.h"
#include "tasks/engine/host.h"
#include "tasks/engine/kernels.h"
#include "tasks/engine/replays.h"
#include "tasks/observe/graph_log.h"
#include "tasks/observe/trace.h"
#include "tasks/regions/region_index.h"
#include "tasks/store/graph_replay.h"
#include "tasks/store/layout.h"
#include "tasks/store/status.h"

namespace tilewise::tasks {

/// The other process of a shared file.
struct Peer {
  bool is_worker_side = false;  // this process has the workers, the other one submits
  std::atomic<bool> is_lost{false};
  int fd = -1;  // pidfd of that process
  std::string path;  // the store's file
};

struct Engine {
  /// Takes ownership of the store. It has no threads yet; tasks/open.h opens a complete runtime.
  explicit Engine(const Store& its_store);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  ThreadSlot& thread_slot(uint32_t index) const { return store.thread_slots[index]; }
  bool has_failures() const { return store.header->failures.num_failed.load(std::memory_order_acquire) != 0; }

  const Store store;
  RegionIndex boxes;  // under boxes_lock
  bool fences = false;  // a fence with every push, because sleepers cannot use membarrier
  // The runtime's number in this process; id_open is equal to it until the runtime is closed. Written by the threads
  // that open and close it.
  uint64_t id = 0;
  uint64_t id_open = 0;
  bool is_closed = false;
  bool is_left_behind = false;  // in a forked child: a copy without threads
  std::unique_ptr<Replays> replays;
  // The number of open recordings and graphs. While there are any, no submission uses the fast path.
  std::atomic<uint32_t> num_observers{0};
  std::unique_ptr<GraphLog> graph;  // under the submission lock
  std::atomic<Trace*> active_trace{nullptr};  // nullptr: off
  std::unique_ptr<Trace> trace;
  std::mutex trace_mutex;  // one worker of another process switches its trace for all
  Kernels kernels;
  Callbacks callbacks;
  Host* host = nullptr;  // of an embedded engine
  uint64_t num_freezes = 0;  // counts freezing and ends of frozen buffers; under the submission lock
  Peer peer;
  std::vector<std::thread> threads;  // of its workers
};

}  // namespace tilewise::tasks
