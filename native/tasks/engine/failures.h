// Failures, and how they propagate along data (poison).
//
// A failed task is recorded by name until no thread can look it up: it is no longer among the newest writers of any
// buffer, and no task submitted before it failed is still live. Consumers look up their producers here, but only if
// anything has failed. Who may call: any thread. Blocks: for the lock of the failures; a sweep needs the submission
// lock. Memory: the store.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Throws PTO_BAD_ARGUMENT if it is not a task of this runtime.
bool is_complete(const Engine& engine, pto_task task);
/// Records that the task did not run successfully: its error, or the one that it inherits, goes to its consumers.
void fail(Engine& engine, uint32_t slot, uint32_t thread, int status);
/// The error number of a failed task; 0: it has not failed.
uint32_t find_error(Engine& engine, TaskRef task);
/// Makes the task inherit the failure, if any, of a producer whose data it reads.
void inherit(Engine& engine, Slot& task, TaskRef producer);
/// Called by a submitter, under the submission lock: removes failures that no thread can look up any more.
void sweep_failures_if_many(Engine& engine, bool holds_boxes_lock);
/// The message and the status of an error.
std::string error_text(const Engine& engine, uint32_t error);
int error_status(const Engine& engine, uint32_t error);
/// The status of a completed task; PTO_OK before its completion.
int task_status(Engine& engine, pto_task task);
int task_error(Engine& engine, pto_task task, std::string* text);
/// Tells the runtime that the submitter will not query the task's status.
void release(Engine& engine, pto_task task);

}  // namespace tilewise::tasks
