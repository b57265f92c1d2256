// Waiting for tasks: help, spin, yield, sleep.
//
// Who may call: any thread; a kernel only with PTO_SUBMITS. Blocks: yes. Without a deadline the caller helps to run
// tasks; `helps` says so for waits that are divided into slices. Returns a status: PTO_TIMEOUT when the time is over.
#pragma once
#include <algorithm>

#include "tasks/engine/failures.h"
#include "tasks/engine/thread_slots.h"
#include "tasks/run/events.h"
#include "tasks/run/ready.h"
#include "tasks/run/workers.h"
#include "tasks/sched/float_modes.h"

namespace tilewise::tasks {

inline constexpr double kLongestWait = 1e9;      // seconds; longer means for ever
inline constexpr int64_t kSliceNs = 50'000'000;  // interval of a sleeper's checks, for example of the other process

int wait(Engine& engine, pto_task task, double timeout_s, bool helps);
int wait_any(Engine& engine, const pto_task* tasks, uint32_t num_tasks, double timeout_s, uint32_t* first, bool helps);
int wait_all(Engine& engine, double timeout_s, bool helps);
/// Calls back when the task completes, on the thread that completes it; at once if it has completed.
void notify(Engine& engine, pto_task task, void (*callback)(void*), void* context);
/// Runs a task while waiting, under the caller's DefaultFloatModes: outside tasks any leaf; inside a task leaves and
/// the tasks inside it. Returns whether there was one.
bool help(Engine& engine, uint32_t thread);
/// The same for a thread that has no room to submit. Ready tasks that may submit can have all slots, so a task without
/// room also runs such tasks of others, as long as its thread has fewer than kMaxHelpDepth open scopes.
bool help_without_room(Engine& engine, uint32_t thread);
inline constexpr uint32_t kMaxHelpDepth = PTO_MAX_SCOPES / 2;
/// Makes the thread that completes the task wake sleepers. Returns false if the task has completed.
bool watch(Engine& engine, TaskRef task);
/// The same for all tasks of a submitter.
void watch_submitter(Engine& engine, uint32_t thread);
/// Throws PTO_CLOSED in a forked child, PTO_PEER_LOST if the workers' process has died.
void check_open(const Engine& engine);
void check_interrupted(int64_t* last_ns);

// Waits until done(). watch() requests a wake-up.
template <class Done, class Watch>
bool wait_until(Engine& engine, Done&& done, Watch&& watch_it, double timeout_s, bool helps) {
  if (done()) return true;
  if (timeout_s <= 0) return false;
  // A thread that only sleeps needs no submission context; but a leaf kernel must not wait, and gets an error.
  const uint32_t thread = helps || running.engine == &engine ? current_thread(engine) : 0;
  Header& header = *engine.store.header;
  Blocking let_others_run;
  const DefaultFloatModes modes;  // as on a worker, for the tasks that it runs
  const bool is_endless = timeout_s > kLongestWait;
  const int64_t deadline = is_endless ? INT64_MAX : now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  Idle idle;
  int64_t checked_ns = hooks.interrupted != nullptr ? now_ns() : 0;
  while (!done()) {
    check_open(engine);
    check_interrupted(&checked_ns);
    const int64_t next_deadline = header.next_deadline_ns.load(std::memory_order_acquire);
    if (next_deadline != 0 && now_ns() >= next_deadline && has_context(engine))
      expire_overdue(engine, current_thread(engine));
    if (helps && help(engine, thread)) {
      idle.reset();
      continue;
    }
    if (deadline != INT64_MAX && now_ns() >= deadline) return done();
    if (!idle.should_sleep()) continue;
    const auto stays_awake = [&] {
      watch_it();
      return done() || (helps && has_work(engine, thread));
    };
    const auto limit_ns = [&] {
      return deadline == INT64_MAX ? kSliceNs : std::min(kSliceNs, std::max<int64_t>(deadline - now_ns(), 1));
    };
    Sleepers& sleepers = header.waiting;
    if (!sleepers.sleep(sleepers.look(), engine.fences, header.is_shared != 0, stays_awake, limit_ns)) sched_yield();
    check_peer(engine);
  }
  return true;
}

}  // namespace tilewise::tasks
