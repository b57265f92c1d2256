// The C interface: exceptions become statuses, and the message is kept for pto_last_error.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "tasks/api/inside.h"
#include "tasks/engine/handles.h"
#include "tasks/open.h"
#include "tasks/replay/recordings.h"
#include "tasks/run/events.h"
#include "tasks/run/run.h"
#include "tasks/sched/thread_state.h"
#include "tasks/submit/buffers.h"
#include "tasks/submit/submit.h"
#include "tasks/wait/wait.h"

using tilewise::tasks::Engine;
using tilewise::tasks::StatusError;
using tilewise::tasks::throw_error;

namespace {

/// Data of a library that adds calls, by the function that made it.
struct RuntimeData {
  void* (*make)();
  void (*drop)(void* data);
  void* data;
  RuntimeData* next;
};

}  // namespace

struct PTORuntime {
  tilewise::tasks::OpenEngine engine;
  std::atomic<RuntimeData*> data = nullptr;  // grows at its front, under data_lock
  std::mutex data_lock;

  explicit PTORuntime(tilewise::tasks::OpenEngine opened) : engine(std::move(opened)) {}
  ~PTORuntime() {
    engine.reset();  // its tasks may use the data
    for (RuntimeData* next = data; next != nullptr;) {
      const std::unique_ptr<RuntimeData> entry(next);
      next = entry->next;
      entry->drop(entry->data);
    }
  }
  void* find_data(void* (*make)()) const {
    for (const RuntimeData* entry = data.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
      if (entry->make == make) return entry->data;
    }
    return nullptr;
  }
};

// Submitters clear these for every task: one more word in each of three parameters made a chain of tasks a third
// slower.
static_assert(sizeof(pto_param) == 40 && sizeof(pto_task_spec) == 88);

namespace {

thread_local std::string last_error;
thread_local PTORuntime* orchestrated = nullptr;  // the runtime whose orchestration runs on this thread
thread_local int last_status = PTO_OK;

int remember(int status, const char* text) {
  last_status = status;
  last_error = text;
  return status;
}

/// Runs a call; its failure becomes `failed(status)`.
template <class Result, class Body>
Result guarded(Result failure, Body&& body) {
  try {
    return body();
  } catch (const StatusError& error) {
    remember(error.status, error.what());
  } catch (const tilewise::ResourceError& error) {
    remember(PTO_NO_MEMORY, error.what());
  } catch (const std::bad_alloc& error) {
    remember(PTO_NO_MEMORY, error.what());
  } catch (const std::exception& error) {
    remember(PTO_BAD_ARGUMENT, error.what());
  }
  return failure;
}

/// The same for calls that return the status itself.
template <class Body>
int status_of(Body&& body) {
  last_status = PTO_OK;
  const int status = guarded(static_cast<int>(PTO_BAD_ARGUMENT) - 1000, body);
  return status == PTO_BAD_ARGUMENT - 1000 ? last_status : status;
}

template <class Body>
int done(Body&& body) {
  return status_of([&] {
    body();
    return static_cast<int>(PTO_OK);
  });
}

void need(const void* pointer, const char* what) {
  if (pointer != nullptr) return;
  throw_error(PTO_BAD_ARGUMENT, "[runtime] ", what, " must not be NULL; got NULL; pass its address");
}

void check_kernel_flags(uint32_t flags) {
  if ((flags & ~uint32_t{PTO_SUBMITS | PTO_VIEWS}) == 0) return;
  throw_error(PTO_BAD_ARGUMENT, "[runtime.kernel_add] undefined flags must be 0; got ", flags,
              "; pass PTO_SUBMITS, PTO_VIEWS, both or 0");
}

/// Whether a wait has no deadline; if so, its caller helps to run tasks.
bool is_endless(double timeout_s) {
  if (std::isnan(timeout_s)) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.wait] a timeout must be a number; got NaN; pass seconds");
  }
  return timeout_s > tilewise::tasks::kLongestWait;
}

/// For calls that a forked child may make on an inherited runtime, and for submit, which checks the submission context
/// anyway.
Engine& any_engine_of(PTORuntime* runtime) {
  if (runtime == nullptr) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime] a runtime must be open; got NULL; open one");
  }
  return *runtime->engine;
}

Engine& engine_of(PTORuntime* runtime) {
  Engine& engine = any_engine_of(runtime);
  check_process(engine);
  return engine;
}

tilewise::tasks::Options options_of(const pto_config& config) {
  tilewise::tasks::Options options;
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  options.num_workers = config.num_workers == PTO_NO_WORKERS ? 0
                        : config.num_workers != 0            ? config.num_workers
                                                             : std::max(1u, cores - 1);
  if (config.window != 0) options.window = config.window;
  if (config.max_submitters != 0) options.max_submitters = config.max_submitters;
  if (config.max_handles != 0) options.max_handles = config.max_handles;
  if (config.max_regions != 0) options.max_regions = config.max_regions;
  if (config.max_events != 0) options.max_events = config.max_events;
  if (config.heap_bytes != 0) options.heap_bytes = config.heap_bytes;
  options.has_types = config.worker_types != nullptr;
  for (uint32_t w = 0; w < std::min<uint32_t>(options.num_workers, 256); ++w) {
    options.worker_types[w] = options.has_types ? config.worker_types[w] : 0xF;
  }
  options.is_pinned = (config.flags & PTO_PIN) != 0;
  options.shared_path = config.shared_path;
  if (config.peer_timeout_s != 0) {
    if (!(config.peer_timeout_s > 0)) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.open] peer_timeout_s must be more than 0 seconds; got ",
                  config.peer_timeout_s, "; pass 0 for the default of 10");
    }
    options.peer_timeout_s = std::min(config.peer_timeout_s, tilewise::tasks::kLongestWait);
  }
  return options;
}

}  // namespace

extern "C" {

void pto_config_init(pto_config* config) { *config = pto_config{}; }

int pto_runtime_open(const pto_config* config, PTORuntime** runtime) {
  return done([&] {
    const pto_config defaults{};
    need(static_cast<const void*>(runtime), "the pointer for the runtime");
    auto engine = tilewise::tasks::open_engine(options_of(config != nullptr ? *config : defaults));
    *runtime = new PTORuntime(std::move(engine));
  });
}

int pto_runtime_close(PTORuntime* runtime) {
  return done([&] {
    if (runtime != nullptr && runtime == orchestrated) {
      throw_error(PTO_BAD_ARGUMENT,
                  "[runtime.close] a runtime must be closed from outside its orchestrations; got a call inside one; "
                  "close it where it was opened");
    }
    close_engine(any_engine_of(runtime));
    delete runtime;
  });
}

const char* pto_last_error(void) { return last_error.c_str(); }
int pto_last_status(void) { return last_status; }
int pto_set_error(int status, const char* text) { return remember(status, text); }

void* pto_runtime_data(PTORuntime* runtime, void* (*make)(void), void (*drop)(void* data)) {
  if (runtime != nullptr) [[likely]] {
    if (void* data = runtime->find_data(make)) [[likely]]
      return data;
  }
  return guarded(static_cast<void*>(nullptr), [&] {
    engine_of(runtime);  // checks that it is open
    const std::lock_guard guard(runtime->data_lock);
    if (void* data = runtime->find_data(make)) return data;
    auto entry = std::make_unique<RuntimeData>(RuntimeData{make, drop, make(), runtime->data.load()});
    void* const data = entry->data;
    runtime->data.store(entry.release(), std::memory_order_release);
    return data;
  });
}

pto_kernel pto_kernel_add(PTORuntime* runtime, const char* name, pto_kernel_fn function, uint32_t flags) {
  return status_of([&] {
    need(name, "a kernel's name");
    check_kernel_flags(flags);
    return static_cast<int>(engine_of(runtime).kernels.add(name, function, flags));
  });
}

pto_kernel pto_kernel_find(PTORuntime* runtime, const char* name) { return pto_kernel_find_as(runtime, name, 0); }

pto_kernel pto_kernel_find_as(PTORuntime* runtime, const char* name, uint32_t flags) {
  return status_of([&] {
    need(name, "a kernel's name");
    check_kernel_flags(flags);
    return static_cast<int>(engine_of(runtime).kernels.find(name, flags));
  });
}

int pto_library_load(PTORuntime* runtime, const char* path) {
  return done([&] {
    need(path, "a library's path");
    engine_of(runtime).kernels.load(path);
  });
}

pto_handle pto_register(PTORuntime* runtime, void* address, uint64_t bytes) {
  return guarded(pto_handle{0}, [&] { return register_buffer(engine_of(runtime), address, bytes); });
}

int pto_unregister(PTORuntime* runtime, pto_handle handle, double timeout_s) {
  return done([&] { unregister(engine_of(runtime), handle, timeout_s, is_endless(timeout_s)); });
}

int pto_freeze(PTORuntime* runtime, pto_handle handle, int frozen) {
  return done([&] { freeze(engine_of(runtime), handle, frozen != 0); });
}

pto_handle pto_alloc(PTORuntime* runtime, uint64_t bytes) {
  return guarded(pto_handle{0}, [&] { return allocate(engine_of(runtime), bytes); });
}

void* pto_address(PTORuntime* runtime, pto_handle handle) {
  return guarded(static_cast<void*>(nullptr), [&] { return address_of(any_engine_of(runtime), handle); });
}

uint64_t pto_bytes(PTORuntime* runtime, pto_handle handle) {
  return guarded(uint64_t{0}, [&] { return tilewise::tasks::resolve(any_engine_of(runtime), handle, "bytes").bytes; });
}

const void* pto_read(PTORuntime* runtime, pto_handle handle, const pto_region* region, double timeout_s) {
  return guarded(static_cast<void*>(nullptr), [&] {
    return wait_for_buffer(engine_of(runtime), handle, region, PTO_INPUT, timeout_s, is_endless(timeout_s));
  });
}

void* pto_write(PTORuntime* runtime, pto_handle handle, const pto_region* region, double timeout_s) {
  return guarded(static_cast<void*>(nullptr),
                 [&] { return wait_to_write(engine_of(runtime), handle, region, timeout_s, is_endless(timeout_s)); });
}

void pto_scope_begin(PTORuntime* runtime) {
  done([&] { begin_scope(engine_of(runtime)); });
}

int pto_scope_end(PTORuntime* runtime) {
  return done([&] { end_scope(engine_of(runtime)); });
}

pto_task pto_submit_task(PTORuntime* runtime, pto_kernel kernel, pto_worker_type worker_type, pto_param* params,
                         uint32_t num_params) {
  pto_task_spec spec{};
  spec.kernel = kernel;
  spec.worker_type = worker_type;
  spec.params = params;
  spec.num_params = num_params;
  return pto_submit(runtime, &spec);
}

pto_task pto_submit(PTORuntime* runtime, const pto_task_spec* spec) {
  return guarded(pto_task{0}, [&] {
    need(spec, "a task's specification");
    return submit(any_engine_of(runtime), *spec);
  });
}

int pto_task_complete(PTORuntime* runtime, pto_task task, int status) {
  return done([&] { complete_external(engine_of(runtime), task, status); });
}

int pto_is_complete(PTORuntime* runtime, pto_task task) {
  return status_of([&] { return is_complete(engine_of(runtime), task) ? 1 : 0; });
}

int pto_wait(PTORuntime* runtime, pto_task task, double timeout_s) {
  return status_of([&] { return wait(engine_of(runtime), task, timeout_s, is_endless(timeout_s)); });
}

int pto_wait_any(PTORuntime* runtime, const pto_task* tasks, uint32_t num_tasks, double timeout_s, uint32_t* first) {
  return status_of(
      [&] { return wait_any(engine_of(runtime), tasks, num_tasks, timeout_s, first, is_endless(timeout_s)); });
}

int pto_wait_all(PTORuntime* runtime, double timeout_s) {
  return status_of([&] { return wait_all(engine_of(runtime), timeout_s, is_endless(timeout_s)); });
}

int pto_notify(PTORuntime* runtime, pto_task task, void (*callback)(void*), void* context) {
  return done([&] {
    need(reinterpret_cast<const void*>(callback), "a callback");
    notify(engine_of(runtime), task, callback, context);
  });
}

int pto_task_status(PTORuntime* runtime, pto_task task) {
  return status_of([&] { return task_status(engine_of(runtime), task); });
}

int pto_task_error(PTORuntime* runtime, pto_task task, char* text, uint64_t text_bytes) {
  return status_of([&] {
    std::string sentence;
    const int status = task_error(engine_of(runtime), task, &sentence);
    if (text_bytes > 0) {
      const size_t length = std::min<size_t>(sentence.size(), text_bytes - 1);
      std::memcpy(text, sentence.data(), length);
      text[length] = 0;
    }
    return status;
  });
}

void pto_task_release(PTORuntime* runtime, pto_task task) {
  done([&] { release(engine_of(runtime), task); });
}

pto_task pto_this_task(void) {
  const tilewise::tasks::Running& running = tilewise::tasks::running;
  return running.engine == nullptr ? 0 : running.engine->store.name_at(running.slot);
}

int pto_should_stop(void) {
  const tilewise::tasks::Running& running = tilewise::tasks::running;
  return running.engine != nullptr && should_stop(*running.engine, running.slot) ? 1 : 0;
}

void pto_fail(const char* reason) {
  tilewise::tasks::failure_reason = reason != nullptr ? reason : "";
  tilewise::tasks::running.has_reason = true;
}

int pto_cancel(PTORuntime* runtime, pto_task task) {
  return done([&] { cancel(engine_of(runtime), task); });
}

int pto_cancel_all(PTORuntime* runtime) {
  return done([&] { cancel_all(engine_of(runtime)); });
}

pto_event pto_event_open(PTORuntime* runtime) {
  return guarded(pto_event{0}, [&] { return open_event(engine_of(runtime)); });
}

int pto_event_post(PTORuntime* runtime, pto_event event, uint64_t add) {
  return done([&] { post_event(engine_of(runtime), event, add); });
}

uint64_t pto_event_value(PTORuntime* runtime, pto_event event) {
  return guarded(uint64_t{0}, [&] { return event_value(engine_of(runtime), event); });
}

int pto_record_begin(PTORuntime* runtime) {
  return done([&] { recordings_of(engine_of(runtime)).begin(); });
}

pto_recording pto_record_end(PTORuntime* runtime) {
  return guarded(pto_recording{0}, [&] { return recordings_of(engine_of(runtime)).end(); });
}

int pto_replay(PTORuntime* runtime, pto_recording recording, const pto_handle* from, const pto_handle* to,
               uint32_t num_handles) {
  return done([&] { recordings_of(engine_of(runtime)).replay(recording, from, to, num_handles); });
}

int pto_recording_free(PTORuntime* runtime, pto_recording recording) {
  return done([&] { recordings_of(engine_of(runtime)).free(recording); });
}

int pto_run_orchestration(PTORuntime* runtime, const char* library_path, const char* name, const uint64_t* args) {
  return status_of([&] {
    Engine& engine = engine_of(runtime);
    need(library_path, "a library's path");
    need(name, "a function's name");
    void* library = tilewise::tasks::open_library(library_path, "run_orchestration");
    const auto function = reinterpret_cast<pto_orchestration_fn>(dlsym(library, name));
    if (function == nullptr) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.run_orchestration] the library must export the function; got '", name,
                  "', which '", library_path, "' lacks; declare it extern \"C\"");
    }
    int status = 0;
    std::string thrown;
    const uint32_t outer_depth = depth(engine);
    begin_scope(engine);
    last_error = "none";  // reset for the calls inside
    PTORuntime* const outer = std::exchange(orchestrated, runtime);
    try {
      status = function(runtime, args);
    } catch (const std::exception& error) {
      thrown = error.what();
    } catch (...) {
      thrown = "an unknown exception";
    }
    orchestrated = outer;
    while (depth(engine) > outer_depth) end_scope(engine);  // including its own
    const int waited = wait_all(engine, PTO_FOREVER, true);
    if (!thrown.empty()) {
      throw_error(PTO_TASK_FAILED, "[runtime.run_orchestration] the function must not throw; got '", thrown, "' from '",
                  name, "'; catch it there and return a status");
    }
    if (status != 0) {
      throw_error(PTO_TASK_FAILED, "[runtime.run_orchestration] the function must return 0; got ", status, " from '",
                  name, "'; its last error was: ", last_error);
    }
    return waited;
  });
}

int pto_workers_run(const char* shared_path, const char* const* library_paths, uint32_t num_libraries) {
  return status_of([&] {
    need(shared_path, "the shared file's path");
    return tilewise::tasks::run_workers(shared_path,
                                        std::vector<std::string>(library_paths, library_paths + num_libraries));
  });
}

int pto_get_stats(PTORuntime* runtime, pto_stats* stats) {
  return done([&] {
    need(stats, "the pointer for the statistics");
    tilewise::tasks::stats(engine_of(runtime), stats);
  });
}

int pto_is_idle(PTORuntime* runtime) {
  return status_of([&] { return is_idle(engine_of(runtime)) ? 1 : 0; });
}

int pto_trace_enable(PTORuntime* runtime, uint32_t max_records_per_thread) {
  return done([&] { enable_trace(engine_of(runtime), max_records_per_thread); });
}

uint64_t pto_trace_tasks(PTORuntime* runtime, pto_trace_task* records, uint64_t capacity) {
  return guarded(uint64_t{0}, [&] { return trace_tasks(engine_of(runtime), records, capacity); });
}

uint64_t pto_trace_stalls(PTORuntime* runtime, pto_trace_stall* records, uint64_t capacity) {
  return guarded(uint64_t{0}, [&] { return trace_stalls(engine_of(runtime), records, capacity); });
}

const char* pto_kernel_name(PTORuntime* runtime, pto_kernel kernel) {
  return guarded("", [&] { return any_engine_of(runtime).kernels.name_of(kernel); });
}

void pto_set_hooks(void* (*enter)(void), void (*leave)(void*), int (*interrupted)(void)) {
  tilewise::tasks::hooks = {enter, leave, interrupted};
}

int pto_graph_begin(PTORuntime* runtime) {
  return done([&] { begin_graph(engine_of(runtime)); });
}

int pto_graph_end(PTORuntime* runtime, const char* json_path) {
  return done([&] {
    need(json_path, "the file's path");
    end_graph(engine_of(runtime), json_path);
  });
}

}  // extern "C"
