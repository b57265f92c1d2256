// See open.h.
#include "tasks/open.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/quiet_thread.h"
#include "tasks/engine/builtin_kernels.h"
#include "tasks/engine/thread_slots.h"
#include "tasks/replay/recordings.h"
#include "tasks/run/workers.h"
#include "tasks/wait/wait.h"

namespace tilewise::tasks {

namespace {

/// Pins the thread to one of the opener's processors, round-robin. A hint: errors are ignored.
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

void check_options(const Options& options) {
  const auto within = [](uint64_t value, uint64_t low, uint64_t high, const char* name) {
    if (value >= low && value <= high) return;
    throw_error(PTO_BAD_ARGUMENT, "[runtime.open] ", name, " must lie in [", low, ", ", high, "]; got ", value,
                "; correct it");
  };
  within(options.num_workers, 0, 256, "num_workers");
  within(options.max_submitters, 1, 256, "max_submitters");
  within(options.window, 2, 1 << 16, "window");
  within(uint64_t{options.num_workers + options.max_submitters} * options.window, 1, 1u << kSlotBits,
         "window times workers and submitters");
  within(options.max_handles, 1, 1 << 22, "max_handles");
  within(options.max_regions, 1, 1 << 20, "max_regions");
  within(options.max_events, 1, 1 << 20, "max_events");
  within(options.heap_bytes, 1, uint64_t{1} << 46, "heap_bytes");
  if ((options.window & (options.window - 1)) != 0) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.open] window must be a power of two; got ", options.window,
                "; choose 1024");
  }
}

void start_worker(Engine& engine, uint32_t worker, bool is_pinned) {
  engine.threads.push_back(quiet_thread([&engine, worker, is_pinned] {
    std::string name = "tw-task-";
    name += std::to_string(worker);
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    if (is_pinned) pin(worker + 1);
    worker_loop(engine, worker);
  }));
}

// The orchestrator waits until the workers' process has attached.
void wait_for_workers(Engine& engine, double timeout_s) {
  Header& header = *engine.store.header;
  const int64_t deadline = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  Blocking let_others_run;
  while (header.processes.workers.load(std::memory_order_acquire) == 0) {
    if (now_ns() > deadline) {
      unlink(engine.peer.path.c_str());
      engine.is_closed = true;  // no task has started
      throw_error(PTO_TIMEOUT, "[runtime.open] the workers' process must attach to '", engine.peer.path, "' within ",
                  timeout_s, " s; got none; start pto_workers_run there (python -m tilewise.runtime.workers)");
    }
    timespec nap{0, 2'000'000};
    nanosleep(&nap, nullptr);
  }
  engine.peer.fd = static_cast<int>(syscall(SYS_pidfd_open, header.processes.workers.load(), 0));
  if (engine.peer.fd < 0) engine.peer.is_lost.store(true);
  unlink(engine.peer.path.c_str());  // both have mapped it; no third process can attach
}

void stop(Engine& engine) {
  engine.is_closed = true;
  engine.id_open = UINT64_MAX;  // matches no thread's last context, so every further call is an error
  Header& header = *engine.store.header;
  header.closing.store(1, std::memory_order_seq_cst);
  header.parked.wake_all(header.is_shared != 0);
  Blocking let_others_run;
  for (std::thread& thread : engine.threads) thread.join();
  engine.threads.clear();
}

}  // namespace

OpenEngine open_engine(const Options& options) {
  check_options(options);
  OpenEngine engine(new Engine(make_store(options)), drop_engine);
  engine->replays = std::make_unique<Recordings>(*engine);
  if (options.shared_path != nullptr) engine->peer.path = options.shared_path;
  Header& header = *engine->store.header;
  header.threads_in_use.store(header.num_workers, std::memory_order_release);
  header.processes.owner.store(getpid());
  for (uint32_t s = 0; s < header.num_thread_slots; ++s) {
    ThreadSlot& thread_slot = engine->store.thread_slots[s];
    thread_slot.classes = header.helper_classes;
    if (s >= header.num_workers) continue;
    thread_slot.is_taken.store(1);
    thread_slot.classes = 0;
    for (uint32_t type = 0; type < kNumTypes; ++type) {
      if ((options.worker_types[s] >> type & 1) != 0) thread_slot.classes |= 1u << header.class_of_type[type];
    }
    header.served_classes |= thread_slot.classes;
  }
  if (header.num_workers == 0) header.served_classes = (1u << header.num_classes) - 1;
  for (const BuiltinKernel& kernel : builtin_kernels()) engine->kernels.add(kernel.name, kernel.function, kIsBuiltin);
  if (options.shared_path != nullptr) {
    publish_store(options.shared_path);
    wait_for_workers(*engine, options.peer_timeout_s);
    return engine;
  }
  for (uint32_t w = 0; options.starts_workers && w < header.num_workers; ++w) {
    start_worker(*engine, w, options.is_pinned);
  }
  return engine;
}

int run_workers(const char* path, const std::vector<std::string>& libraries) {
  Engine engine(attach_store(path));
  engine.peer.is_worker_side = true;
  Header& header = *engine.store.header;
  for (const std::string& library : libraries) engine.kernels.load(library);
  engine.kernels.expect_names();
  engine.replays = std::make_unique<Recordings>(engine);
  engine.peer.fd = static_cast<int>(syscall(SYS_pidfd_open, header.processes.owner.load(), 0));
  if (engine.peer.fd < 0)
    throw_error(PTO_PEER_LOST, "[runtime.workers_run] the orchestrator must be alive; got one that has died");
  header.processes.workers.store(getpid(), std::memory_order_release);
  Blocking let_others_run;
  for (uint32_t w = 1; w < header.num_workers; ++w) start_worker(engine, w, false);
  worker_loop(engine, 0);
  for (std::thread& thread : engine.threads) thread.join();
  engine.threads.clear();
  return engine.peer.is_lost.load() ? PTO_PEER_LOST : PTO_OK;
}

void drop_engine(Engine* engine) {
  if (!engine->is_closed && !engine->peer.is_worker_side) {
    try {
      close_engine(*engine);
    } catch (const std::exception&) {
      stop(*engine);
    }
  }
  delete engine;
}

void close_engine(Engine& engine) {
  if (engine.is_closed) return;
  if (running.engine == &engine) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.close] a runtime must be closed from outside its tasks; got a call inside one");
  }
  if (!engine.peer.is_lost.load()) {
    const bool helps = has_context(engine);
    try {
      for (uint32_t slot = 0; slot < engine.store.threads_in_use() * engine.store.header->window; ++slot) {
        const TaskWordBits word = TaskWord::look(engine.store.slots[slot].word);
        if (!TaskWord::is_live(word)) continue;
        const TaskRef task = make_ref(TaskWord::generation_in(word), slot);
        wait_until(engine, [&] { return is_complete(engine, task); }, [&] { watch(engine, task); }, PTO_FOREVER, helps);
      }
      wait_until(
          engine, [&] { return !engine.replays->has_replays(kNone); }, [&] { engine.replays->watch_replays(kNone); },
          PTO_FOREVER, helps);
    } catch (const StatusError& error) {
      if (error.status != PTO_PEER_LOST) throw;
    }
  }
  stop(engine);
}

}  // namespace tilewise::tasks
