// External events: counters that rise, and the tasks that wait for a value. Cancellation and deadlines, which release
// such tasks early.
//
// Who may call: any thread. Blocks: for an event's lock. Comparing the value and registering a task is one critical
// section of the event, posting is another, so no wake-up is lost. Memory: the store.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

pto_event open_event(Engine& engine);
/// The event's value. Throws PTO_BAD_ARGUMENT for an event that was not opened.
uint64_t event_value(Engine& engine, pto_event name);
void post_event(Engine& engine, pto_event name, uint64_t add);
/// Returns true if the event has reached the value. If false, the task waits for it and may belong to another thread.
bool wait_for_event(Engine& engine, uint32_t slot, uint32_t index, uint64_t value);
/// Whether the task was cancelled before its kernel started.
bool is_cancelled(const Engine& engine, uint32_t slot);
/// Whether the task is past its start deadline.
bool is_overdue(const Engine& engine, uint32_t slot);
/// For a running kernel: whether the task or one of its ancestors was cancelled or is past its deadline.
bool should_stop(const Engine& engine, uint32_t slot);
/// A task that starts at the same moment may still run; its status then says which.
void cancel(Engine& engine, pto_task task);
void cancel_all(Engine& engine);
/// Wakes tasks that wait for events and are past their deadlines.
void expire_overdue(Engine& engine, uint32_t thread);

}  // namespace tilewise::tasks
