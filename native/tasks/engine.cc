// Opening, closing, seats, kernels, statistics. See engine.h.
#include "tasks/engine.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/quiet_thread.h"
#include "tasks/api/builtin_kernels.h"
#include "tasks/api/text.h"
#include "tasks/observe/graph_log.h"
#include "tasks/replay/recording.h"
#include "tasks/sched/sleep.h"
#include "tasks/sched/thread_state.h"
#include "tasks/store/pool.h"
#include "tasks/waiting.h"

namespace tilewise::tasks {

namespace {

/// The engines that live in this process, so that a thread that ends can give its lanes back.
struct Registry {
  std::mutex mutex;
  uint64_t next_id = 1;
  std::map<uint64_t, Engine*> engines;
};
Registry& registry();

// The child of a fork has only the thread that forked, and every lock as it stood at that moment.
void before_fork() { registry().mutex.lock(); }
void after_fork() { registry().mutex.unlock(); }
void after_fork_in_child() {
  for (const auto& [id, engine] : registry().engines) engine->forget_in_child();
  registry().engines.clear();
  registry().mutex.unlock();
}

/// To one of the processors that the opener may use, counted round; a hint, refused where the system refuses.
void pin(uint32_t number) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  uint32_t left = number % static_cast<uint32_t>(std::max(1, CPU_COUNT(&allowed)));
  for (size_t processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (!CPU_ISSET(processor, &allowed) || left-- != 0) continue;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(processor, &own);
    sched_setaffinity(0, sizeof(own), &own);
    return;
  }
}

Registry& registry() {
  static auto* all = [] {
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    return new Registry;  // outlives every thread
  }();
  return *all;
}

/// The lanes of this thread.
struct Tickets {
  std::vector<std::pair<uint64_t, uint32_t>> all;

  ~Tickets() {
    std::lock_guard guard(registry().mutex);
    for (const auto& [id, seat_index] : all) {
      const auto found = registry().engines.find(id);
      if (found != registry().engines.end()) found->second->leave_lane(seat_index);
    }
  }
};
thread_local Tickets tickets;

void check_options(const Options& options) {
  const auto within = [](uint64_t value, uint64_t low, uint64_t high, const char* name) {
    if (value >= low && value <= high) return;
    raise(PTO_BAD_ARGUMENT, "[runtime.open] ", name, " must lie in [", low, ", ", high, "]; got ", value,
          "; correct it");
  };
  within(options.num_workers, 0, 256, "num_workers");
  within(options.max_lanes, 1, 256, "max_lanes");
  within(options.window, 2, 1 << 16, "window");
  within(uint64_t{options.num_workers + options.max_lanes} * options.window, 1, 1u << kSlotBits,
         "window times workers and lanes");
  within(options.max_handles, 1, 1 << 22, "max_handles");
  within(options.max_regions, 1, 1 << 20, "max_regions");
  within(options.max_events, 1, 1 << 20, "max_events");
  within(options.heap_bytes, 1, uint64_t{1} << 46, "heap_bytes");
  if ((options.window & (options.window - 1)) != 0) {
    raise(PTO_BAD_ARGUMENT, "[runtime.open] window must be a power of two; got ", options.window, "; choose 1024");
  }
}

}  // namespace

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

Engine::Engine(const Region& region) : region_(region), boxes_(region.regions, region.header->max_regions, false) {
  kernels_.reserve(kMaxKernels);  // grows in place: readers index it without a lock
  open_recordings_.resize(region.header->num_seats);
  fences_ = region.header->is_shared != 0 || !register_membarrier();
  std::lock_guard guard(registry().mutex);
  id_ = id_open_ = registry().next_id++;
  registry().engines[id_] = this;
}

std::unique_ptr<Engine> Engine::open(const Options& options) {
  check_options(options);
  std::unique_ptr<Engine> engine(new Engine(make_region(options)));
  if (options.shared_path != nullptr) engine->shared_path_ = options.shared_path;
  Header& header = *engine->region_.header;
  header.seats_in_use.store(header.num_workers, std::memory_order_release);
  header.owner_pid.store(getpid());
  for (uint32_t s = 0; s < header.num_seats; ++s) {
    Seat& seat = engine->region_.seats[s];
    seat.classes = header.helper_classes;
    if (s >= header.num_workers) continue;
    seat.is_taken.store(1);
    seat.classes = 0;
    for (uint32_t type = 0; type < kNumTypes; ++type) {
      if ((options.worker_types[s] >> type & 1) != 0) seat.classes |= 1u << header.class_of_type[type];
    }
    header.served_classes |= seat.classes;
  }
  if (header.num_workers == 0) header.served_classes = (1u << header.num_classes) - 1;
  for (const BuiltinKernel& kernel : builtin_kernels()) engine->add_kernel(kernel.name, kernel.function, kIsBuiltin);
  if (options.shared_path != nullptr) {
    publish_region(options.shared_path);
    engine->wait_for_workers(options.peer_timeout_s);
    return engine;
  }
  for (uint32_t w = 0; options.starts_workers && w < header.num_workers; ++w) {
    engine->start_worker(w, options.is_pinned);
  }
  return engine;
}

void Engine::start_worker(uint32_t worker, bool is_pinned) {
  threads_.push_back(quiet_thread([this, worker, is_pinned] {
    std::string name = "tw-task-";
    name += std::to_string(worker);
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    if (is_pinned) pin(worker + 1);
    worker_loop(worker);
  }));
}

// The orchestrator's side of two processes: work begins when the other side is there.
void Engine::wait_for_workers(double timeout_s) {
  Header& header = *region_.header;
  const int64_t deadline = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  Blocking let_others_run;
  while (header.workers_pid.load(std::memory_order_acquire) == 0) {
    if (now_ns() > deadline) {
      unlink(shared_path_.c_str());
      closed_ = true;  // nothing has begun
      raise(PTO_TIMEOUT, "[runtime.open] the workers' process must attach to '", shared_path_, "' within ", timeout_s,
            " s; got none; start pto_workers_run there (python -m tilewise.runtime.workers)");
    }
    timespec nap{0, 2'000'000};
    nanosleep(&nap, nullptr);
  }
  peer_fd_ = static_cast<int>(syscall(SYS_pidfd_open, header.workers_pid.load(), 0));
  if (peer_fd_ < 0) peer_lost_.store(true);
  unlink(shared_path_.c_str());  // both have it mapped; nobody else can come
}

int Engine::run_workers(const char* path, const std::vector<std::string>& libraries) {
  Engine engine(attach_region(path));
  engine.is_worker_side_ = true;
  Header& header = *engine.region_.header;
  for (const std::string& library : libraries) engine.load_library(library);
  for (uint32_t k = 0; k < kMaxKernels; ++k) {
    engine.kernels_.push_back(std::make_unique<Kernel>());  // found when called
  }
  engine.peer_fd_ = static_cast<int>(syscall(SYS_pidfd_open, header.owner_pid.load(), 0));
  if (engine.peer_fd_ < 0) raise(PTO_PEER_LOST, "[runtime.workers_run] the orchestrator must live; got its death");
  header.workers_pid.store(getpid(), std::memory_order_release);
  Blocking let_others_run;
  for (uint32_t w = 1; w < header.num_workers; ++w) engine.start_worker(w, false);
  engine.worker_loop(0);
  for (std::thread& thread : engine.threads_) thread.join();
  engine.threads_.clear();
  return engine.peer_lost_.load() ? PTO_PEER_LOST : PTO_OK;
}

Engine::~Engine() {
  if (!closed_ && !is_worker_side_) {
    try {
      close();
    } catch (const std::exception&) {
      stop();  // the first failure was nobody's to hear
    }
  }
  {
    std::lock_guard guard(registry().mutex);
    registry().engines.erase(id_);
  }
  if (peer_fd_ >= 0) ::close(peer_fd_);
  if (!shared_path_.empty()) drop_part(shared_path_.c_str());
  unmap_region(region_);
}

void Engine::close() {
  if (closed_) return;
  if (running.engine == this) {
    raise(PTO_BAD_ARGUMENT, "[runtime.close] a runtime is closed from outside its tasks; got a call inside one");
  }
  if (!peer_lost_.load()) {
    const bool helps = has_lane();
    try {
      for (uint32_t slot = 0; slot < header_seats() * region_.header->window; ++slot) {
        const WakeWord word = region_.slots[slot].wake.load(std::memory_order_acquire);
        if (!is_live(word)) continue;
        const TaskRef task = make_ref(generation_in(word), slot);
        wait_until([&] { return is_complete(task); }, [&] { watch(task); }, PTO_FOREVER, helps);
      }
      wait_until([&] { return !has_rounds(kNone); }, [&] { watch_rounds(kNone); }, PTO_FOREVER, helps);
    } catch (const StatusError& error) {
      if (error.status != PTO_PEER_LOST) throw;
    }
  }
  stop();
}

/// Whether this thread has a lane, or gets one now.
bool Engine::has_lane() {
  try {
    seat_here();
    return true;
  } catch (const StatusError& error) {
    if (error.status != PTO_NO_MEMORY) throw;
    return false;
  }
}

void Engine::stop() {
  closed_ = true;
  id_open_ = UINT64_MAX;  // no thread's last lane: every further call is told
  Header& header = *region_.header;
  header.closing.store(1, std::memory_order_seq_cst);
  header.worker_word.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(header.worker_word, INT32_MAX, header.is_shared != 0);
  Blocking let_others_run;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// Nothing of it may be waited for, locked, joined or, in shared memory, written.
void Engine::forget_in_child() {
  is_left_behind_ = true;
  closed_ = true;
  id_open_ = UINT64_MAX;
  if (running.engine == this) running = {};
  static auto* lost = new std::vector<std::thread>;  // not in this process: they can be neither joined nor let go
  for (std::thread& thread : threads_) lost->push_back(std::move(thread));
  threads_.clear();
}

void Engine::raise_left_behind() {
  raise(PTO_CLOSED, "[runtime] a runtime must be used by the process that opened it; got a call in a forked child; ",
        "it was made in another process: open one in this process");
}

// Seats.

uint32_t Engine::seat_here() {
  if (running.engine == this) [[unlikely]] {
    if (running.parent != 0) return running.seat;
    raise(PTO_BAD_ARGUMENT,
          "[runtime] a kernel that submits, waits or allocates must have been added with PTO_SUBMITS; ",
          "got such a call from one that was not; add the flag");
  }
  if (last_lane.engine == id_open_) [[likely]]
    return last_lane.seat;
  return find_lane();
}

uint32_t Engine::find_lane() {
  check_process();
  if (closed_) raise(PTO_CLOSED, "[runtime] the runtime must be open; got a call after its close; open a new one");
  for (const auto& [id, seat_index] : tickets.all) {
    if (id != id_) continue;
    last_lane = {id, seat_index};
    return seat_index;
  }
  Header& header = *region_.header;
  for (uint32_t s = header.num_workers; s < header.num_seats; ++s) {
    uint32_t free = 0;
    if (!region_.seats[s].is_taken.compare_exchange_strong(free, 1, std::memory_order_acq_rel)) continue;
    uint32_t used = header.seats_in_use.load(std::memory_order_relaxed);
    while (used < s + 1 && !header.seats_in_use.compare_exchange_weak(used, s + 1, std::memory_order_acq_rel)) {
    }
    tickets.all.emplace_back(id_, s);
    populate(region_, s);
    last_lane = {id_, s};
    return s;
  }
  raise(PTO_NO_MEMORY, "[runtime] every submitting thread needs a lane; got more than ",
        header.num_seats - header.num_workers, " threads; raise max_lanes, or let threads end");
}

/// The thread has ended: its scopes close, its tasks go on, its lane is free for another.
void Engine::leave_lane(uint32_t seat_index) {
  Seat& me = seat(seat_index);
  while (me.depth > 0) close_scope(seat_index);
  if (open_recordings_[seat_index] != nullptr) {
    open_recordings_[seat_index] = nullptr;
    num_observers_.fetch_sub(1);
  }
  me.is_taken.store(0, std::memory_order_release);
}

// Kernels.

pto_kernel Engine::add_kernel(const std::string& name, pto_kernel_fn function, uint32_t flags) {
  Header& header = *region_.header;
  const auto length = name.size();
  if (length == 0 || length >= sizeof(KernelName::name) || function == nullptr) {
    raise(PTO_BAD_ARGUMENT, "[runtime.kernel_add] a kernel must have an address and a name of 1 to ",
          sizeof(KernelName::name) - 1, " bytes; got '", name, "'; correct it");
  }
  if (!is_text(name)) {
    raise(PTO_BAD_ARGUMENT,
          "[runtime.kernel_add] a kernel's name must be UTF-8 without control characters; got another; ", "correct it");
  }
  std::lock_guard guard(header.kernel_lock);
  const uint32_t id = header.num_kernels.load(std::memory_order_relaxed);
  if (id == kMaxKernels) {
    raise(PTO_NO_MEMORY, "[runtime.kernel_add] a runtime knows at most ", kMaxKernels,
          " kernels; got one more; reuse ids");
  }
  auto kernel = std::make_unique<Kernel>();
  kernel->name = name;
  kernel->function = function;
  kernel->flags = flags;
  kernels_.push_back(std::move(kernel));
  std::memcpy(region_.kernels[id].name, name.c_str(), length + 1);
  region_.kernels[id].flags = flags;
  header.num_kernels.store(id + 1, std::memory_order_release);
  return static_cast<pto_kernel>(id);
}

pto_kernel Engine::find_kernel(const std::string& name, uint32_t flags) {
  Header& header = *region_.header;
  const uint32_t count = header.num_kernels.load(std::memory_order_acquire);
  for (uint32_t id = 0; id < count; ++id) {
    if (name != region_.kernels[id].name) continue;
    if (flags == 0 || flags == region_.kernels[id].flags) return static_cast<pto_kernel>(id);
    raise(PTO_BAD_ARGUMENT, "[runtime.kernel_find] a kernel must be used as it was added; got '", name, "' with flags ",
          flags, " after ", region_.kernels[id].flags, "; ask for it in one way");
  }
  for (void* library : libraries_) {
    if (void* symbol = dlsym(library, name.c_str())) {
      return add_kernel(name, reinterpret_cast<pto_kernel_fn>(symbol), flags);
    }
  }
  raise(PTO_BAD_ARGUMENT,
        "[runtime.kernel_find] a kernel must be built in, added, or a symbol of a loaded library; got '", name,
        "'; load its library first");
}

void Engine::load_library(const std::string& path) { libraries_.push_back(open_library(path, "library_load")); }

void* Engine::open_library(const std::string& path, const char* where) {
  const bool is_name = path.find('/') == std::string::npos;
  const bool is_here = is_name && access(path.c_str(), F_OK) == 0;
  void* library = dlopen(is_here ? ("./" + path).c_str() : path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    raise(PTO_BAD_ARGUMENT, "[runtime.", where, "] a library must load; got '", dlerror(), "'",
          is_name && !is_here ? ", and no file of that name in the current folder" : "", "; check path and symbols");
  }
  return library;
}

// The workers' process finds each kernel by its name, once.
pto_kernel_fn Engine::function_of(int32_t id) {
  const std::string name = region_.kernels[id].name;
  pto_kernel_fn found = nullptr;
  for (const BuiltinKernel& kernel : builtin_kernels()) {
    if (name == kernel.name) found = kernel.function;
  }
  for (void* library : libraries_) {
    if (found == nullptr) found = reinterpret_cast<pto_kernel_fn>(dlsym(library, name.c_str()));
  }
  if (found == nullptr) {
    throw std::runtime_error("kernel '" + name + "' is in no library that the workers' process loaded");
  }
  std::atomic_ref(kernels_[id]->function).store(found, std::memory_order_release);
  return found;
}

const char* Engine::kernel_name(pto_kernel kernel) const {
  const bool known = kernel >= 0 && kernel < static_cast<int32_t>(region_.header->num_kernels.load());
  return known ? region_.kernels[kernel].name : "";
}

// Seeing inside.

uint64_t Engine::num_completed() const {
  uint64_t total = 0;
  for (uint32_t s = 0; s < header_seats(); ++s) total += region_.seats[s].num_completed.load(std::memory_order_acquire);
  return total;
}

uint64_t Engine::num_submitted() const {
  uint64_t total = 0;
  for (uint32_t s = 0; s < header_seats(); ++s) total += region_.seats[s].num_submitted.load(std::memory_order_relaxed);
  return total;
}

void Engine::stats(pto_stats* stats) {
  const Header& header = *region_.header;
  *stats = {};
  uint32_t stocked = 0;
  for (uint32_t s = 0; s < header_seats(); ++s) {
    const Seat& seat = region_.seats[s];
    stats->num_submitted += seat.num_submitted.load(std::memory_order_relaxed);
    stats->num_failed += seat.num_failed.load(std::memory_order_relaxed);
    stats->num_helped += seat.num_helped.load(std::memory_order_relaxed);
    stats->stall_ns += seat.stall_ns.load(std::memory_order_relaxed);
    stats->num_stalls += seat.num_stalls.load(std::memory_order_relaxed);
    stats->window_high = std::max(stats->window_high, seat.window_high.load(std::memory_order_relaxed));
    stocked += seat.num_free_handles;
  }
  stats->num_completed = num_completed();
  stats->window = header.window;
  stats->heap_bytes = uint64_t{header.num_segments} * kSegmentBytes;
  stats->heap_high_bytes = uint64_t{header.segments_high.load()} * kSegmentBytes;
  stats->handles_high = header.fresh_handles.load(std::memory_order_relaxed);
  {
    std::lock_guard guard(region_.header->pool_lock);
    stats->handles = stats->handles_high - stocked - header.num_free_handles;
  }
  std::lock_guard guard(region_.header->boxes_lock);
  stats->regions = boxes_.num_live();
  stats->regions_high = boxes_.high_water();
  stats->metadata_bytes = resident_bytes(region_.base, header.heap);
}

// A thread is busy from taking a task until it has handed on what became ready.
bool Engine::is_idle() const {
  for (uint32_t s = 0; s < header_seats(); ++s) {
    if (region_.seats[s].is_busy.load(std::memory_order_acquire) != 0 || has_work(s)) return false;
  }
  return true;
}

void Engine::enable_trace(uint32_t max_records) {
  if (max_records != 0 && active_trace_.load() != nullptr) {
    raise(PTO_BAD_ARGUMENT, "[runtime.trace_enable] one trace at a time; got a second; end the first");
  }
  active_trace_.store(nullptr);
  if (max_records != 0) {  // else what was recorded can still be read
    trace_ = std::make_unique<Trace>(region_, max_records);
    active_trace_.store(trace_.get());
  }
  if (region_.traces == nullptr || is_worker_side_) return;
  for (uint32_t w = 0; w < region_.header->num_workers && max_records != 0; ++w) region_.traces[w].num_tasks.store(0);
  region_.header->trace_limit.store(max_records, std::memory_order_release);
}

/// In the workers' process, before a task that was submitted after the switch.
void Engine::follow_trace() {
  const uint32_t limit = region_.header->trace_limit.load(std::memory_order_acquire);
  if ((limit != 0) == (active_trace_.load(std::memory_order_relaxed) != nullptr)) return;
  std::lock_guard guard(callbacks_mutex_);  // one worker switches for all
  if ((limit != 0) == (active_trace_.load(std::memory_order_relaxed) != nullptr)) return;
  if (trace_ == nullptr) trace_ = std::make_unique<Trace>(region_, limit);
  active_trace_.store(limit != 0 ? trace_.get() : nullptr);
}

uint64_t Engine::trace_tasks(pto_trace_task* records, uint64_t capacity) const {
  return trace_ == nullptr ? 0 : trace_->tasks(records, capacity);
}

uint64_t Engine::trace_stalls(pto_trace_stall* records, uint64_t capacity) const {
  return trace_ == nullptr ? 0 : trace_->stalls(records, capacity);
}

}  // namespace tilewise::tasks
