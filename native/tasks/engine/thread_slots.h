// Thread slots: the identity of a thread in a runtime.
//
// Purpose: every thread that submits gets its own submission context at its first call, and returns it when the thread
// ends. Who may call: any thread. Blocks: for the registry's mutex, when a thread ends. Memory: tickets are
// thread-local; the registry of open runtimes is global.
#pragma once
#include "tasks/engine/engine.h"
#include "tasks/sched/thread_state.h"

namespace tilewise::tasks {

/// Adds a runtime to the registry and assigns its id; removes it.
void enter_registry(Engine& engine);
void leave_registry(const Engine& engine);

/// The index of this thread's slot; takes a free one at the first call. Throws PTO_CLOSED, PTO_NO_MEMORY.
uint32_t find_context(Engine& engine);
/// Whether this thread has a submission context or can get one.
bool has_context(Engine& engine);
/// Throws the error for a call in a forked child.
[[noreturn]] void throw_left_behind();
/// Tasks that all threads have completed so far.
uint64_t num_completed(const Engine& engine);
uint64_t num_submitted(const Engine& engine);

inline void check_process(const Engine& engine) {
  if (engine.is_left_behind) [[unlikely]]
    throw_left_behind();
}

/// The index of this thread's slot; inside a task, of the thread that runs it.
[[gnu::always_inline]] inline uint32_t current_thread(Engine& engine) {
  if (running.engine == &engine) [[unlikely]] {
    if (running.parent != 0) return running.thread;
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime] a kernel that submits, waits or allocates must have been added with PTO_SUBMITS; ",
                "got such a call from one that was not; add the flag");
  }
  if (last_context.engine == engine.id_open) [[likely]]
    return last_context.thread;
  return find_context(engine);
}

}  // namespace tilewise::tasks
