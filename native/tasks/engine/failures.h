// Failures, and how they propagate along data (poison).
//
// A failed task is recorded by name until no thread can ask for it: it is no longer among the newest writers of any
// buffer, and no task submitted before it failed is still live. Consumers look up their producers here, but only if
// anything has failed. Who may call: any thread. Blocks: for the lock of the failures; a sweep needs the submission
// lock. Memory: the store.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Raises PTO_BAD_ARGUMENT for what is no task of this runtime.
bool is_complete(const Engine& engine, pto_task task);
/// The task did not do its work: its own error, or the one it inherits, becomes its consumers'.
void fail(Engine& engine, uint32_t slot, uint32_t thread, int status);
/// The error of a task that has failed; 0: it has not.
uint32_t find_error(Engine& engine, TaskRef task);
/// The task will not run if this producer, whose data it reads, has failed.
void inherit(Engine& engine, Slot& task, TaskRef producer);
/// Called by a submitter, under the submission lock: forgets what no thread can ask for any more.
void sweep_failures_if_many(Engine& engine, bool holds_boxes_lock);
/// The sentence and the status of an error.
std::string error_text(const Engine& engine, uint32_t error);
int error_status(const Engine& engine, uint32_t error);
/// Of a task that has completed; PTO_OK before.
int task_status(Engine& engine, pto_task task);
int task_error(Engine& engine, pto_task task, std::string* text);
/// Its submitter will not ask how the task ended.
void release(Engine& engine, pto_task task);

}  // namespace tilewise::tasks
