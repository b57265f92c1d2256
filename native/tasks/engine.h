// The task runtime of one device: submission, completion, workers, waiting.
//
// Purpose: orders tasks by the data they touch and runs them. Nobody schedules: whoever submits or completes a task
// makes its successors ready, and workers (and waiting submitters) take ready tasks. Who may call: any thread; each
// submitting thread has a seat of its own. Blocks: submit() when window, heap or handles are full (it helps, then
// sleeps), wait calls, close(). Memory order: a task's writes reach its successors through the exchange of its wake
// word and the compare-and-swap by which they had waited; see layout.h. Memory: the region, and here only what one
// process needs: threads, addresses of kernels, traces.
//
//   checks.cc   what a specification must be                          events.cc    external events
//   submit.cc   from a specification to a ready or waiting task,      wait.cc      waiting, deadlock, sleeping
//   submit_plain.cc  and the short way of most of them               notes.cc     names, deadlines, views
//   run.cc      taking, running and completing tasks                  buffers.cc   handles, heap, scopes
//   failures.cc errors, poison, cancelling                            recording.cc, replay.cc, instance.cc
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "tasks/observe/trace.h"
#include "tasks/order/region_index.h"
#include "tasks/store/layout.h"

namespace tilewise::tasks {

/// What a call reports besides success: thrown inside, a status at the C border.
struct StatusError : std::runtime_error {
  StatusError(int code, const std::string& text) : std::runtime_error(text), status(code) {}
  int status;
};

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void raise(int status, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw StatusError(status, text.str());
}

struct Kernel {
  std::string name;
  pto_kernel_fn function = nullptr;  // nullptr: not found yet in this process
  uint32_t flags = 0;
};

enum class Resource { kWindow = 0, kHeap = 1, kHandles = 2, kRegions = 3 };

class Recording;
struct Running;
class GraphLog;
class Host;
struct Replay;
struct RecordedTask;
struct RecordedBuffer;

/// What check_spec() found.
struct Resolved {
  Handle* handles[PTO_MAX_PARAMS];  // nullptr: no buffer, or none yet
  uint32_t fresh;                   // mask of parameters whose buffers were made for this task; with kHasOutputs
};
enum Traits : uint32_t { kHasMore = 1, kHasOutputs = 2, kHasBoxes = 4, kHasReductions = 8, kSeesViews = 16 };

class Engine {
 public:
  static std::unique_ptr<Engine> open(const Options& options);
  /// The workers' side of a shared region. Returns a status when the orchestrator has closed it or died.
  static int run_workers(const char* path, const std::vector<std::string>& libraries);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Waits for every task, stops the workers.
  void close();

  // Kernels.
  pto_kernel add_kernel(const std::string& name, pto_kernel_fn function, uint32_t flags);
  pto_kernel find_kernel(const std::string& name, uint32_t flags);
  void load_library(const std::string& path);
  /// dlopen; a name without a slash that is a file of the current folder is that file.
  static void* open_library(const std::string& path, const char* where);
  const char* kernel_name(pto_kernel kernel) const;

  // Buffers (buffers.cc).
  pto_handle register_buffer(void* address, uint64_t bytes);
  void unregister(pto_handle handle, double timeout_s, bool helps);
  void freeze(pto_handle handle, bool frozen);
  pto_handle allocate(uint64_t bytes);
  Handle& resolve(pto_handle handle, const char* where) {
    const auto index = static_cast<uint32_t>(handle & 0xFFFFFFFF) - 1;
    if (index < region_.header->max_handles) [[likely]] {
      Handle& found = region_.handles[index];
      const bool is_same = found.generation.load(std::memory_order_relaxed) == static_cast<uint32_t>(handle >> 32);
      if (is_same && (found.flags & kUsed) != 0) [[likely]]
        return found;
    }
    raise_stale(handle, where);
  }
  [[noreturn]] static void raise_stale(pto_handle handle, const char* where);
  void* address_of(pto_handle handle);
  /// Waits as a task with an access of this mode would; a failure of the data's writers is raised if the mode reads.
  /// box: nullptr: the whole buffer. Returns the address of its first byte.
  void* wait_for_buffer(pto_handle handle, const pto_region* box, int mode, double timeout_s, bool helps);
  void* wait_to_write(pto_handle handle, const pto_region* box, double timeout_s, bool helps);
  void begin_scope();
  void end_scope();
  uint32_t depth() { return seat(seat_here()).depth; }

  // Tasks.
  pto_task submit(const pto_task_spec& spec);
  void complete_external(pto_task task, int status);

  // Waiting (wait.cc). Return a status; PTO_TIMEOUT when the time is over.
  bool is_complete(pto_task task) const;
  // Without a deadline the caller helps; `helps` says so for waits cut into slices.
  int wait(pto_task task, double timeout_s, bool helps);
  int wait_any(const pto_task* tasks, uint32_t num_tasks, double timeout_s, uint32_t* first, bool helps);
  int wait_all(double timeout_s, bool helps);
  void notify(pto_task task, void (*callback)(void*), void* context);

  // Failure (failures.cc).
  int task_status(pto_task task);
  int task_error(pto_task task, std::string* text);
  void release(pto_task task);
  void cancel(pto_task task);
  void cancel_all();
  bool should_stop(uint32_t slot) const;

  // Events.
  pto_event open_event();
  void raise_event(pto_event event, uint64_t add);
  uint64_t event_value(pto_event event);

  // Record and replay (recording.cc).
  void begin_recording();
  pto_recording end_recording();
  void replay(pto_recording recording, const pto_handle* from, const pto_handle* to, uint32_t num_handles);
  void free_recording(pto_recording recording);

  // Seeing inside.
  void stats(pto_stats* stats);
  bool is_idle() const;
  void enable_trace(uint32_t max_records);
  uint64_t trace_tasks(pto_trace_task* records, uint64_t capacity) const;
  uint64_t trace_stalls(pto_trace_stall* records, uint64_t capacity) const;
  void begin_graph();
  void end_graph(const char* json_path);

  const Region& region() const { return region_; }
  /// The task that lives in a slot now.
  TaskRef name_at(uint32_t slot) const {
    return make_ref(generation_in(region_.slots[slot].wake.load(std::memory_order_relaxed)), slot);
  }
  void leave_lane(uint32_t seat);  // its thread has ended
  void forget_in_child();          // after a fork: this is a copy without threads, whose locks nobody gives back
  void check_process() const {
    if (is_left_behind_) [[unlikely]]
      raise_left_behind();
  }

 private:
  friend struct SeatPool;
  friend struct Probe;  // benchmarks/runtime
  friend class Recording;
  friend class Instance;
  friend class GraphLog;
  friend class Embedded;
  explicit Engine(const Region& region);

  // Seats.
  uint32_t seat_here();
  uint32_t find_lane();
  bool has_lane();
  Seat& seat(uint32_t index) { return region_.seats[index]; }

  // Submission.
  uint32_t check_spec(const pto_task_spec& spec, Resolved& buffers);
  uint32_t check_param(const pto_task_spec& spec, uint32_t param, Resolved& buffers);
  uint32_t check_more(const pto_task_spec& spec);
  static void check_region(const Handle& handle, const pto_region& box, const char* where, int param);
  void check_extras(const pto_task_spec& spec) const;
  static void check_views(const pto_task_spec& spec, Handle* const* handles);
  void note_extras(uint32_t slot, const pto_task_spec& spec);
  void note_view(uint32_t slot, uint32_t param, const pto_param& given, uint64_t num_bytes);
  void check_builtin(const pto_task_spec& spec);
  void check_combine(const pto_param& param, uint32_t number, uint64_t num_bytes) const;
  bool has_plain_flags(const pto_task_spec& spec);
  uint32_t take_slot(uint32_t seat);
  uint32_t take_slot_carefully(uint32_t seat);
  uint32_t take_slot_slowly(uint32_t seat);
  void fill(Slot& task, SlotArgs& args, const pto_task_spec& spec, uint32_t seat);
  void bind_params(uint32_t slot, const pto_task_spec& spec, uint32_t seat, Resolved& buffers, uint32_t traits);
  void allocate_outputs(const pto_task_spec& spec, uint32_t seat, Resolved& buffers);
  void link(uint32_t slot, TaskRef self, const pto_task_spec& spec, uint32_t seat, Resolved& buffers, uint32_t traits,
            bool& is_recorded);
  void observe(uint32_t slot, const pto_task_spec& spec, uint32_t seat, uint32_t fresh);
  bool is_plain(const pto_task_spec& spec);
  uint64_t* place_arguments(Slot& task, SlotArgs& args, const pto_task_spec& spec, Handle* const* handles);
  void merge_or_order_after(Slot& task, TaskRef producer, uint32_t seat);
  void collect_many(Slot& task, uint32_t seat, Handle& handle, int mode);
  void record_many(TaskRef task, uint32_t seat, Handle& handle, int mode);
  bool link_plain(Slot& task, TaskRef self, const pto_task_spec& spec, Handle* const* handles, uint32_t seat,
                  bool& is_recorded);
  pto_task submit_any(const pto_task_spec& spec, uint32_t seat);
  void use_tokens(Slot& task, SlotArgs& args, uint32_t count);
  void add_producer(Slot& task, uint64_t word, uint32_t seat);
  void order_after(Slot& task, TaskRef producer, uint32_t seat);
  void collect_param(uint32_t slot, uint32_t seat, Handle& handle, const pto_region* region, int mode);
  void record_param(TaskRef task, uint32_t seat, Handle& handle, const pto_region* region, int mode);
  bool prepare_boxes(const SlotArgs& args, const pto_task_spec& spec, uint32_t seat);
  void start_submitted(uint32_t slot, uint32_t seat);
  void start_waiting(uint32_t slot, uint32_t seat);
  void count_submitted(uint32_t seat, uint64_t count);
  pto_task submit_reduction(const pto_task_spec& spec);
  Handle& tracked(Handle& handle, int mode, const pto_region* box, uint32_t seat);
  void take_back(uint32_t slot, uint32_t seat, bool is_recorded);
  void abandon(uint32_t slot);
  void start_empty(uint32_t slot, uint32_t seat);
  void note_submission(SlotArgs& args, uint32_t seat);

  // Running.
  bool stand_behind(uint32_t slot, TaskRef producer_name);
  bool advance(uint32_t slot, uint32_t seat);
  bool wait_for_event(uint32_t slot, uint32_t event, uint64_t value);
  int64_t wake_event(uint32_t event, uint64_t add, uint32_t seat);
  bool is_cancelled(uint32_t slot) const;
  void wake_cancelled();
  bool is_overdue(uint32_t slot) const;
  void expect_deadline(int64_t deadline_ns);
  void expire_overdue(uint32_t seat);
  bool take_tokens(uint32_t slot);
  void drop_producer(Slot& task, uint32_t seat);
  void release_tokens(uint32_t slot, uint32_t seat);
  void make_ready(uint32_t slot, uint32_t seat);
  void push_ready(uint32_t slot, uint32_t seat);
  void push_special(uint32_t slot);
  void add_many(Slot& task, uint64_t word, uint32_t seat);
  uint32_t take(uint32_t seat, bool is_worker);
  uint32_t steal(uint32_t seat, uint32_t classes);
  bool has_work(uint32_t seat) const;
  bool can_help(uint32_t slot) const;
  uint32_t run(uint32_t slot, uint32_t seat, bool is_worker);
  void run_own(uint32_t slot, uint32_t seat);
  int execute(uint32_t slot, uint32_t seat);
  int call_kernel(uint32_t slot, uint32_t seat);
  uint32_t finish(uint32_t slot, uint32_t seat, int status, bool is_worker);
  uint32_t complete(uint32_t slot, uint32_t seat, int status, bool is_worker);
  void fail(uint32_t slot, uint32_t seat, int status);
  void end_parent(uint32_t slot, uint32_t seat);
  void child_ended(uint32_t parent, uint32_t seat);
  bool may_follow(uint32_t slot, uint32_t seat, bool is_worker) const;
  void release_heap(const Slot& slot, const SlotArgs& args);
  void wake_waiters();
  void start_worker(uint32_t worker, bool is_pinned);
  void wait_for_workers(double timeout_s);
  void stop();
  void worker_loop(uint32_t worker);
  void follow_trace();
  void park_worker(uint32_t worker);
  void wake_worker(bool all = false);
  void wake_sleeper(bool all);
  pto_kernel_fn function_of(int32_t kernel);
  /// nullptr: an empty task, or not found yet.
  pto_kernel_fn function_at(int32_t kernel) const {
    return kernel < 0 ? nullptr : std::atomic_ref(kernels_[kernel]->function).load(std::memory_order_acquire);
  }
  int invoke(int32_t kernel, pto_kernel_fn function, void* const* buffers, const uint64_t* scalars, const Running& as);
  void follow_up(uint32_t& next, uint32_t slot, uint32_t seat, bool is_worker);
  uint32_t wake_list(uint32_t waiter, uint32_t next, uint32_t seat, bool is_worker);
  uint32_t complete_replayed(uint32_t slot, uint32_t seat, TaskRef self, bool is_worker);
  void tell_watchers(TaskRef task);
  void trace_end(uint32_t slot, uint32_t seat, TaskRef self, int status);

  // Waiting.
  template <class Done, class Watch>
  bool wait_until(Done&& done, Watch&& watch, double timeout_s, bool helps);
  bool help(uint32_t seat);
  bool help_own_lane(uint32_t seat);
  bool watch(TaskRef task);
  void watch_lane(uint32_t seat);
  uint32_t find_free_slot(uint32_t seat);
  void check_not_inside(pto_task task) const;
  bool wait_for_room(uint32_t seat, Resource resource, uint64_t size);
  bool has_room(uint32_t seat, Resource resource, uint64_t size) const;
  bool is_stuck(uint32_t seat, Resource resource) const;
  bool is_blocked_parent(uint32_t slot) const;
  void note_stall(uint32_t seat, Resource cause, int64_t begin_ns);
  uint64_t num_completed() const;
  uint64_t num_submitted() const;
  uint32_t header_seats() const { return region_.header->seats_in_use.load(std::memory_order_acquire); }
  [[noreturn]] void raise_deadlock(uint32_t seat, Resource resource, uint64_t size);
  void check_peer();
  void check_interrupted(int64_t* last_ns) const;
  void check_open() const;
  [[noreturn]] static void raise_left_behind();

  // Buffers.
  uint32_t index_of(const Handle& handle) const { return static_cast<uint32_t>(&handle - region_.handles); }
  uint32_t take_handle(uint32_t seat);
  void give_handle(uint32_t index, uint32_t seat);
  uint64_t allocate_heap(uint32_t seat, uint64_t bytes);
  uint32_t find_run(uint32_t count) const;
  uint32_t take_run(uint32_t count);
  void give_run(uint32_t first);
  void use_heap(uint64_t address, uint32_t seat);
  void close_scope(uint32_t seat);
  void refill_handles(uint32_t seat);
  bool lies_in_heap(uint64_t address) const {
    return address - region_.header->heap < uint64_t{region_.header->num_segments} * kSegmentBytes;
  }
  void forget_accesses(Handle& handle, uint32_t seat);

  // Failures.
  uint32_t record_error(uint32_t slot, uint32_t seat, int status, const std::string& reason);
  void mark_failed(TaskRef task, uint32_t error, bool is_pinned);
  uint32_t find_error(TaskRef task);
  std::string error_text(uint32_t error) const;
  int error_status(uint32_t error) const;
  const char* task_name(uint32_t slot) const;
  void sweep_failures(bool holds_boxes_lock);
  void sweep_failures_if_many(bool holds_boxes_lock);
  void inherit(Slot& task, TaskRef producer);
  bool has_failures() const { return region_.header->num_failed.load(std::memory_order_acquire) != 0; }

  void run_callbacks(TaskRef task);

  // Replay.
  std::vector<pto_handle> bind_recording(Recording& recording, const pto_handle* from, const pto_handle* to,
                                         uint32_t num_handles);
  void submit_recording(Recording& recording, std::vector<pto_handle> names, uint32_t seat);
  void replay_task(Replay& run, uint32_t number);
  void bind_replayed(Replay& run, uint32_t number, uint32_t slot);
  uint32_t begin_replayed(Replay& run, uint32_t number, const RecordedTask& recorded);
  template <class Leave>
  void leave_or_await(const Replay& run, uint32_t count, Leave&& leave);
  void leave_part(Replay& run, uint32_t count);
  void leave_writers(Handle& handle, const std::vector<TaskRef>& writers, uint32_t seat);
  void leave_behind(Recording& recording, const RecordedBuffer& buffer, Handle& handle,
                    const std::vector<TaskRef>& names, uint32_t seat);

  // Instances (instance.cc).
  void instantiate(Recording& recording);
  void reap_instances();
  bool replay_instance(Recording& recording, const pto_handle* from, const pto_handle* to, uint32_t num_handles,
                       uint32_t seat);
  bool outwait(Instance& instance, uint32_t seat);
  bool enter(Instance& instance, std::vector<pto_handle> names, uint32_t seat);
  void begin_round(Instance& instance, uint32_t seat);
  void settle(Instance& instance, uint32_t seat);
  void settle_buffer(Handle& handle, uint32_t seat);
  void settle_all(uint32_t seat);
  bool arrive(uint32_t slot);
  void inherit_replayed(uint32_t slot);
  bool has_rounds(uint32_t seat) const;
  void watch_rounds(uint32_t seat);
  bool has_live_rounds() const;
  std::vector<std::pair<uint64_t, uint64_t>> live_rounds() const;
  // What tasks of both kinds have, in different places.
  uint32_t lane_of(uint32_t slot) const;
  uint64_t sequence_of(uint32_t slot) const;
  uint64_t& ready_ticks_of(uint32_t slot);
  int32_t& status_of(uint32_t slot);

  Region region_;
  RegionIndex boxes_;
  bool fences_ = false;  // a fence with every push, because the sleeper cannot make everybody else issue one
  bool is_worker_side_ = false;
  bool is_left_behind_ = false;
  Host* host_ = nullptr;  // of an embedded engine
  std::atomic<bool> peer_lost_{false};
  int peer_fd_ = -1;
  std::string shared_path_;
  std::vector<std::unique_ptr<Kernel>> kernels_;  // by id; grows under kernel_lock, capacity reserved
  std::vector<void*> libraries_;
  std::vector<std::thread> threads_;
  uint64_t id_ = 0;       // of this engine among all of the process
  uint64_t id_open_ = 0;  // the same until it is closed
  std::atomic<uint32_t> num_callbacks_{0};
  std::mutex callbacks_mutex_;
  std::unordered_multimap<TaskRef, std::pair<void (*)(void*), void*>> callbacks_;
  std::unique_ptr<Trace> trace_;
  std::atomic<Trace*> active_trace_{nullptr};  // nullptr: off
  std::unique_ptr<GraphLog> graph_;
  std::atomic<uint32_t> num_observers_{0};  // open recordings and graphs
  mutable std::mutex recordings_mutex_;  // of the next three; taken after the submission lock
  std::map<pto_recording, std::shared_ptr<Recording>> recordings_;
  std::vector<std::shared_ptr<Recording>> instantiated_;  // by first slot; also freed ones whose tasks still run
  std::atomic<bool> has_instances_{false};  // ever
  uint64_t num_freezes_ = 0;                // and ends of frozen buffers; under the submission lock
  pto_recording next_recording_ = 1;
  std::vector<std::unique_ptr<Recording>> open_recordings_;  // per seat
  bool closed_ = false;
};

int64_t now_ns();

}  // namespace tilewise::tasks
