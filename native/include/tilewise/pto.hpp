/// The task runtime in C++20: tilewise/pto_api.h with RAII, exceptions and lists in braces. Header only.
///
///   using namespace tilewise::pto;
///   Runtime rt({.num_workers = 2});
///   Kernel scale = rt.kernel("scale", [](void* const* buffers, const uint64_t* scalars) {
///     *static_cast<double*>(buffers[0]) *= scalar<double>(scalars[0]);
///     return PTO_OK;
///   });
///   std::vector<double> data(1);
///   Buffer x = rt.buffer(data);               // unregistered, after its last task, at the end of the block
///   rt.submit(scale, {inout(x)}, {2.5});      // dropping the handle never blocks
///   double now = x.read<double>()[0];         // waits for the writers of x
///
/// Sizes are bytes and times seconds; without a timeout a call waits for ever and helps to run tasks; one of 0 or less
/// polls. Every failure is an `Error`: the status of pto_api.h and the message of pto_last_error(). The threads that
/// may make a call in C may make it here. All threads may use a Runtime at once; other objects only one thread at a
/// time, unless they say otherwise. An object must not outlive its runtime: declare the runtime first. Statistics,
/// traces, graphs, callbacks: the C calls, on Runtime::get(). Costs: submit copies the parameters to the stack and
/// calls pto_submit, the end of a handle is one short call, and neither allocates.
#pragma once
#include <cstddef>
#include <exception>
#include <ranges>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tilewise/pto/kernels.hpp"
#include "tilewise/pto/params.hpp"
#include "tilewise/pto/tasks.hpp"
#include "tilewise/pto/views.hpp"

namespace tilewise::pto {

/// Sizes of a runtime; 0 and empty mean the defaults of pto_config in pto_api.h.
struct Config {
  uint32_t num_workers = 0;  // PTO_NO_WORKERS: waiting threads run everything
  uint32_t window = 0;  // tasks of one thread between submission and completion
  uint32_t max_submitters = 0;  // threads that submit
  uint32_t max_handles = 0;
  uint32_t max_regions = 0;
  uint32_t max_events = 0;
  uint64_t heap_bytes = 0;  // for Outputs and alloc
  std::vector<uint8_t> worker_types = {};  // per worker a mask of 1 << pto_worker_type; empty: all serve all
  bool is_pinned = false;  // worker w stays on processor w + 1
  std::string shared_path = {};  // a new file, for workers in another process
  double peer_timeout_s = 0;  // for that process to attach
};

/// A recorded part of a program, made by Runtime::record. Move-only. Its end frees the recording; running tasks
/// continue.
class Recording {
 public:
  Recording(PTORuntime* runtime, pto_recording recording) : runtime_(runtime), recording_(recording) {}
  Recording(Recording&& other) noexcept : runtime_(other.runtime_), recording_(std::exchange(other.recording_, 0)) {}
  Recording& operator=(Recording&& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(recording_, other.recording_);
    return *this;
  }
  ~Recording() {
    if (recording_ != 0) pto_recording_free(runtime_, recording_);
  }
  /// Submits the recorded tasks again with buffer from[i] replaced by to[i]: of equal size, and distinct buffers must
  /// stay distinct. Blocks as submit does. Cheapest with the same buffers as the last replay.
  void replay(List<pto_handle> from = {}, List<pto_handle> to = {}) const {
    if (recording_ == 0 || from.size() != to.size()) {
      detail::refuse(
          "[pto.Recording.replay] a replay must have a recording and as many buffers in `to` as in `from`; got "
          "a recording that was moved from, or lists of different lengths; correct it");
    }
    detail::check(pto_replay(runtime_, recording_, from.data(), to.data(), from.size()));
  }

 private:
  PTORuntime* runtime_;
  pto_recording recording_;
};

/// An open runtime. Any thread may call anything; every submitting thread has its own slots and scopes. Move-only.
///
/// The destructor waits for every task; during stack unwinding it skips tasks that have not started. It does not report
/// failures of tasks: call wait_all before.
class Runtime {
 public:
  explicit Runtime(const Config& config = {}) {
    if (!config.worker_types.empty() && config.num_workers != config.worker_types.size()) {
      detail::refuse(
          "[pto.Runtime] worker_types must name every worker; got another number than num_workers; correct "
          "one of them");
    }
    pto_config c{};
    c.num_workers = config.num_workers;
    c.window = config.window;
    c.max_submitters = config.max_submitters;
    c.max_handles = config.max_handles;
    c.max_regions = config.max_regions;
    c.max_events = config.max_events;
    c.heap_bytes = config.heap_bytes;
    c.worker_types = config.worker_types.empty() ? nullptr : config.worker_types.data();
    c.flags = config.is_pinned ? uint32_t{PTO_PIN} : 0u;
    c.shared_path = config.shared_path.empty() ? nullptr : config.shared_path.c_str();
    c.peer_timeout_s = config.peer_timeout_s;
    detail::check(pto_runtime_open(&c, &runtime_));
  }
  /// A runtime that another owner closes: in a kernel that submits, or an orchestration.
  static Runtime borrow(PTORuntime* runtime) { return Runtime(runtime); }
  Runtime(Runtime&& other) noexcept
      : runtime_(std::exchange(other.runtime_, nullptr)), owns_(other.owns_), num_exceptions_(other.num_exceptions_) {}
  Runtime& operator=(Runtime&& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(owns_, other.owns_);
    std::swap(num_exceptions_, other.num_exceptions_);
    return *this;
  }
  ~Runtime() {
    if (runtime_ == nullptr || !owns_) return;
    if (std::uncaught_exceptions() > num_exceptions_) pto_cancel_all(runtime_);
    pto_runtime_close(runtime_);
  }
  /// For the C calls; null if moved from, which every call rejects.
  PTORuntime* get() const noexcept { return runtime_; }

  /// A function pointer or a capture-free lambda, (void* const* buffers, const uint64_t* scalars), that returns nothing
  /// or a status. Add each once. An exception fails the task with its text. PTO_SUBMITS: it may submit and wait.
  /// PTO_VIEWS: it uses Views of its buffers.
  template <class Function>
    requires std::is_invocable_v<Function, void* const*, const uint64_t*>
  Kernel kernel(const char* name, Function function, uint32_t flags = 0) {
    return checked(pto_kernel_add(runtime_, name, detail::kernel_function(function), flags));
  }
  /// A built-in ("copy", "fill", "sum_f32", ...), one added before, or a function that a loaded library exports.
  Kernel kernel(const char* name, uint32_t flags = 0) { return checked(pto_kernel_find_as(runtime_, name, flags)); }
  void load_library(const char* path) { detail::check(pto_library_load(runtime_, path)); }

  /// Registers the caller's memory, once; tasks work on it in place.
  Buffer buffer(void* address, uint64_t num_bytes) {
    return {runtime_, detail::check_id(pto_register(runtime_, address, num_bytes))};
  }
  /// The same for a vector, an array, a span. Constant elements: frozen.
  template <std::ranges::contiguous_range Items>
    requires std::ranges::borrowed_range<Items>  // no temporary: it would be destroyed before its tasks
  Buffer buffer(Items&& items) {
    using Item = std::remove_reference_t<std::ranges::range_reference_t<Items>>;
    static_assert(std::is_trivially_copyable_v<Item>, "tasks work on bytes");
    auto* data = const_cast<std::remove_const_t<Item>*>(std::ranges::data(items));
    Buffer made = buffer(static_cast<void*>(data), std::ranges::size(items) * sizeof(Item));
    if constexpr (std::is_const_v<Item>) made.freeze();
    return made;
  }
  /// Allocates runtime memory, which lives as long as this thread's innermost scope and is not initialized.
  BufferRef alloc(uint64_t num_bytes) { return {runtime_, detail::check_id(pto_alloc(runtime_, num_bytes))}; }
  /// The buffer of a handle that came from elsewhere, such as an orchestration's arguments.
  BufferRef at(pto_handle handle) { return {runtime_, handle}; }

  /// Submits a task: it runs when the earlier tasks that use its data have ended. Blocks while the window, the heap or
  /// the handles are full. If it throws, nothing was submitted. Always inline: the compiler then knows the number of
  /// parameters and the unused hints, which at least halves the number of instructions.
  [[gnu::always_inline]] TaskHandle submit(Kernel kernel, List<Param> params = {}, List<Scalar> scalars = {},
                                           const TaskExecutionHints& hints = {}, const TaskOptions& options = {}) {
    detail::check_hints(runtime_, hints);
    pto_param raw[PTO_MAX_PARAMS];
    uint64_t words[PTO_MAX_SCALARS];
    bool has_outputs = false;
    uint32_t p = 0;
    for (const Param& param : params) {
      if (p == PTO_MAX_PARAMS) break;  // the call below refuses the number
      if (param.runtime_ != nullptr && param.runtime_ != runtime_) {
        detail::refuse(
            "[pto.submit] a buffer must belong to the runtime of the task; got one of another; register it "
            "here");
      }
      has_outputs |= is_fresh(param.raw_);
      raw[p++] = param.raw_;
    }
    uint32_t s = 0;
    for (const Scalar& scalar : scalars) {
      if (s == PTO_MAX_SCALARS) break;
      words[s++] = scalar.bits;
    }
    pto_task_spec spec = detail::spec_of(hints, options);
    spec.kernel = kernel.id;
    spec.params = raw;
    spec.num_params = params.size();
    spec.num_scalars = scalars.size();
    spec.scalars = words;
    TaskHandle task(runtime_, detail::check_id(pto_submit(runtime_, &spec)));
    if (has_outputs) [[unlikely]]
      name_outputs(params, raw);
    return task;
  }
  /// Ends a task whose kernel returned PTO_LATER. Call it once, from any thread.
  void complete(pto_task task, int status = PTO_OK) { detail::check(pto_task_complete(runtime_, task, status)); }
  /// Waits for every task that this thread submitted, inside a task for its children. Throws the first failure since
  /// the last wait_all, once.
  void wait_all(double timeout_s = kForever) {
    const int status = pto_wait_all(runtime_, timeout_s);
    if (status == PTO_TIMEOUT) detail::raise_timeout("Runtime.wait_all", timeout_s);
    detail::check(status);
  }
  /// Skips all tasks submitted so far, by any thread, that have not started, also those that wait for events.
  void cancel_all() { detail::check(pto_cancel_all(runtime_)); }
  Event event() { return {runtime_, detail::check_id(pto_event_open(runtime_))}; }

  /// Calls body(); the tasks that this thread submits in it run and are recorded. Exceptions propagate.
  template <class Body>
  Recording record(Body&& body) {
    detail::check(pto_record_begin(runtime_));
    try {
      std::forward<Body>(body)();
    } catch (...) {
      const Recording broken(runtime_, pto_record_end(runtime_));
      throw;
    }
    return {runtime_, detail::check_id(pto_record_end(runtime_))};
  }

 private:
  explicit Runtime(PTORuntime* runtime) : runtime_(runtime), owns_(false) {}

  static bool is_fresh(const pto_param& param) { return param.mode == PTO_OUTPUT && param.handle == 0; }
  static Kernel checked(pto_kernel id) {
    detail::check(id);
    return {id};
  }
  [[gnu::noinline]] void name_outputs(List<Param> params, const pto_param* raw) {
    for (const Param& param : params) {
      if (is_fresh(param.raw_)) {
        param.output_->runtime_ = runtime_;
        param.output_->handle_ = raw->handle;
      }
      ++raw;
    }
  }

  PTORuntime* runtime_ = nullptr;
  bool owns_ = true;
  int num_exceptions_ = std::uncaught_exceptions();
};

/// A scope of this thread: memory that the runtime allocates in it lives until its end. The end does not wait; memory
/// is freed after its last task. The thread that began a scope must end it, the innermost first.
class Scope {
 public:
  explicit Scope(Runtime& runtime) : runtime_(runtime.get()) {
    pto_scope_begin(runtime_);
    detail::check(pto_last_status());
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() {
    if (runtime_ != nullptr) pto_scope_end(runtime_);
  }
  /// Ends the scope before the block ends.
  void end() { detail::check(pto_scope_end(std::exchange(runtime_, nullptr))); }

 private:
  PTORuntime* runtime_;
};

}  // namespace tilewise::pto
