// See thread_slots.h.
#include "tasks/engine/thread_slots.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "tasks/engine/handles.h"

namespace tilewise::tasks {

namespace {

/// The engines of this process, so that a thread that ends can return its submission contexts.
struct Registry {
  std::mutex mutex;
  uint64_t next_id = 1;
  std::map<uint64_t, Engine*> engines;
};
Registry& registry();

// In a forked child an engine must not be waited for, locked, joined or, in shared memory, written.
void forget_in_child(Engine& engine) {
  engine.is_left_behind = true;
  engine.is_closed = true;
  engine.id_open = UINT64_MAX;
  if (running.engine == &engine) running = {};
  static auto* lost = new std::vector<std::thread>;  // of the parent process: they can be neither joined nor detached
  for (std::thread& thread : engine.threads) lost->push_back(std::move(thread));
  engine.threads.clear();
}

// A forked child has only the thread that forked, and every lock in its state at that moment.
void before_fork() { registry().mutex.lock(); }
void after_fork() { registry().mutex.unlock(); }
void after_fork_in_child() {
  for (const auto& [id, engine] : registry().engines) forget_in_child(*engine);
  registry().engines.clear();
  registry().mutex.unlock();
}

Registry& registry() {
  static auto* all = [] {
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    return new Registry;  // outlives every thread
  }();
  return *all;
}

/// Called when a thread has ended: closes its scopes and frees its submission context; its tasks continue.
void leave_context(Engine& engine, uint32_t thread) {
  ThreadSlot& me = engine.thread_slot(thread);
  while (me.depth > 0) close_scope(engine, thread);
  if (engine.replays != nullptr) engine.replays->leave(thread);
  me.is_taken.store(0, std::memory_order_release);
}

/// The submission contexts of this thread.
struct Tickets {
  std::vector<std::pair<uint64_t, uint32_t>> all;

  ~Tickets() {
    std::lock_guard guard(registry().mutex);
    for (const auto& [id, thread] : all) {
      const auto entry = registry().engines.find(id);
      if (entry != registry().engines.end()) leave_context(*entry->second, thread);
    }
  }
};
thread_local Tickets tickets;

}  // namespace

void enter_registry(Engine& engine) {
  std::lock_guard guard(registry().mutex);
  engine.id = engine.id_open = registry().next_id++;
  registry().engines[engine.id] = &engine;
}

void leave_registry(const Engine& engine) {
  std::lock_guard guard(registry().mutex);
  registry().engines.erase(engine.id);
}

void throw_left_behind() {
  throw_error(PTO_CLOSED,
              "[runtime] a runtime must be used by the process that opened it; got a call in a forked child; ",
              "it was made in another process: open one in this process");
}

uint32_t find_context(Engine& engine) {
  check_process(engine);
  if (engine.is_closed)
    throw_error(PTO_CLOSED, "[runtime] the runtime must be open; got a call after its close; open a new one");
  for (const auto& [id, thread] : tickets.all) {
    if (id != engine.id) continue;
    last_context = {id, thread};
    return thread;
  }
  Header& header = *engine.store.header;
  for (uint32_t s = header.num_workers; s < header.num_thread_slots; ++s) {
    uint32_t free = 0;
    if (!engine.store.thread_slots[s].is_taken.compare_exchange_strong(free, 1, std::memory_order_acq_rel)) continue;
    uint32_t used = header.threads_in_use.load(std::memory_order_relaxed);
    while (used < s + 1 && !header.threads_in_use.compare_exchange_weak(used, s + 1, std::memory_order_acq_rel)) {
    }
    tickets.all.emplace_back(engine.id, s);
    populate(engine.store, s);
    last_context = {engine.id, s};
    return s;
  }
  throw_error(PTO_NO_MEMORY, "[runtime] every submitting thread needs a submission context; got more than ",
              header.num_thread_slots - header.num_workers, " threads; increase max_submitters, or let threads end");
}

bool has_context(Engine& engine) {
  try {
    current_thread(engine);
    return true;
  } catch (const StatusError& error) {
    if (error.status != PTO_NO_MEMORY) throw;
    return false;
  }
}

uint64_t num_completed(const Engine& engine) {
  uint64_t total = 0;
  for (uint32_t s = 0; s < engine.store.threads_in_use(); ++s)
    total += engine.store.thread_slots[s].num_completed.load(std::memory_order_acquire);
  return total;
}

uint64_t num_submitted(const Engine& engine) {
  uint64_t total = 0;
  for (uint32_t s = 0; s < engine.store.threads_in_use(); ++s)
    total += engine.store.thread_slots[s].num_submitted.load(std::memory_order_relaxed);
  return total;
}

}  // namespace tilewise::tasks
