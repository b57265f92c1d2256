// See failures.h.
#include "tasks/engine/failures.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "tasks/engine/pool.h"
#include "tasks/engine/task_parts.h"
#include "tasks/engine/thread_slots.h"
#include "tasks/order/boxes.h"
#include "tasks/sched/thread_state.h"

namespace tilewise::tasks {

namespace {

uint64_t hash_of(TaskRef task) { return (task >> kFlagBits) * 0x9E3779B97F4A7C15ull >> 20; }

uint32_t record_error(Engine& engine, uint32_t slot, uint32_t thread, int status, const std::string& reason) {
  Header& header = *engine.store.header;
  const Slot& task = engine.store.slots[slot];
  std::lock_guard guard(header.failures.lock);
  const uint32_t number = header.failures.num_errors.load(std::memory_order_relaxed) + 1;
  ErrorRecord& record = engine.store.errors[number % kMaxErrors];
  record.task = engine.store.name_at(slot);
  record.kernel = task.kernel;
  record.worker = thread < header.num_workers ? static_cast<int32_t>(thread) : -1;
  record.submitter = static_cast<int32_t>(submitter_of(engine, slot));
  record.status = status;
  record.number = number;
  std::memcpy(record.name, task_name(engine, slot), std::strlen(task_name(engine, slot)) + 1);
  const size_t length = std::min(reason.size(), sizeof(record.text) - 1);
  std::memcpy(record.text, reason.data(), length);
  record.text[length] = 0;
  header.failures.num_errors.store(number, std::memory_order_release);
  return number;
}

// Lookups in a hash table are fast while a quarter of it is empty.
uint32_t max_failures(const Header& header) { return header.failed_capacity / 4 * 3; }

void mark_failed(Engine& engine, TaskRef task, uint32_t error, bool is_pinned) {
  Header& header = *engine.store.header;
  std::lock_guard guard(header.failures.lock);
  const uint32_t mask = header.failed_capacity - 1;
  const uint32_t count = header.failures.num_failed.load(std::memory_order_relaxed);
  if (count >= max_failures(header)) {
    header.failures.overflow.store(error, std::memory_order_release);
    return;
  }
  uint64_t at = hash_of(task) & mask;
  while (engine.store.failed[at].key != 0) at = (at + 1) & mask;
  const uint64_t submitted_at = sequence_of(engine, slot_of(task));
  const uint32_t parent = engine.store.slots[slot_of(task)].parent;
  const TaskRef parent_name = parent == 0 ? 0 : engine.store.name_at(parent - 1);
  engine.store.failed[at] = {task, error, is_pinned ? 1u : 0u, submitted_at, parent_name, 0};
  header.failures.num_failed.store(count + 1, std::memory_order_seq_cst);
  // The task may have been released meanwhile: either the releasing thread sees this entry, or its word is seen here.
  const auto generation = static_cast<uint32_t>(generation_of(task));
  const Slot& slot = engine.store.slots[slot_of(task)];
  if (slot.released.load(std::memory_order_seq_cst) == generation) engine.store.failed[at].is_pinned = 0;
}

// Called by a submitter, under the submission lock, when the table has grown: removes failures that no thread can look
// up. A task that was linked while its producer lived looks it up when it advances; one that was linked later already
// has. So only tasks submitted before the first sweep after the producer's completion can still look it up.
void sweep_failures(Engine& engine, bool holds_boxes_lock) {
  Header& header = *engine.store.header;
  const uint32_t thread = current_thread(engine);
  engine.replays->settle_all(thread);  // so that the buffers' states name all tasks
  ChunkPool pool{engine, engine.thread_slot(thread)};
  std::vector<TaskRef> named;
  const auto note = [&](TaskRef ref) { named.push_back(without_flags(ref)); };
  const auto note_state = [&](const AccessState& state) {
    for_each_now(state, pool, note);
    for_each_before(state, pool, note);
  };
  std::unique_lock boxes_guard(header.boxes_lock, std::defer_lock);
  if (!holds_boxes_lock) boxes_guard.lock();
  for (uint32_t h = 0; h < header.pools.fresh_handles.load(std::memory_order_relaxed); ++h) {
    Handle& handle = engine.store.handles[h];
    if ((handle.flags & kHasOwner) != 0) continue;  // belongs to a task, which changes it without the submission lock
    if ((handle.flags & kHasRegions) != 0) {
      engine.boxes.for_each(handle.tree, [&](uint32_t node) { note_state(engine.boxes[node].state); });
    } else if ((handle.flags & kUsed) != 0) {
      note_state(handle.state);
    }
  }
  std::sort(named.begin(), named.end());
  const uint64_t now = header.sequence.load(std::memory_order_relaxed);
  std::vector<uint64_t> live;
  for (uint32_t slot = 0; slot < engine.store.threads_in_use() * header.window; ++slot) {
    if (!TaskWord::is_live(TaskWord::look(engine.store.slots[slot].word))) continue;
    live.push_back(engine.store.slots[slot].sequence.load(std::memory_order_relaxed));
  }
  std::sort(live.begin(), live.end());
  const std::vector<std::pair<uint64_t, uint64_t>> replays = engine.replays->live_replays();
  // Only a task submitted after the failed one, and before its end was seen, can wait for it.
  const auto is_awaited = [&](const FailedTask& entry) {
    const auto first = std::lower_bound(live.begin(), live.end(), entry.submitted_at);
    if (first != live.end() && *first <= entry.swept_at) return true;
    return std::any_of(replays.begin(), replays.end(), [&](const auto& replay) {
      return entry.submitted_at <= replay.second && replay.first <= entry.swept_at;
    });
  };
  const auto has_live_parent = [&](const FailedTask& entry) {
    return entry.parent != 0 &&
           !TaskWord::has_ended(engine.store.slots[slot_of(entry.parent)].word, generation_of(entry.parent));
  };
  std::lock_guard guard(header.failures.lock);
  std::vector<FailedTask> remaining;
  for (uint32_t at = 0; at < header.failed_capacity; ++at) {
    FailedTask& entry = engine.store.failed[at];
    if (entry.key == 0) continue;
    const bool is_named = std::binary_search(named.begin(), named.end(), entry.key);
    const bool has_ended = TaskWord::has_ended(engine.store.slots[slot_of(entry.key)].word, generation_of(entry.key));
    const bool is_new = entry.swept_at == 0;
    if (is_new && has_ended) entry.swept_at = now;
    if (is_named || is_new || entry.is_pinned != 0 || is_awaited(entry) || has_live_parent(entry)) {
      remaining.push_back(entry);
    }
    entry = {};
  }
  const uint32_t mask = header.failed_capacity - 1;
  for (const FailedTask& entry : remaining) {
    uint64_t at = hash_of(entry.key) & mask;
    while (engine.store.failed[at].key != 0) at = (at + 1) & mask;
    engine.store.failed[at] = entry;
  }
  header.failures.num_failed.store(static_cast<uint32_t>(remaining.size()), std::memory_order_release);
  if (remaining.size() < header.failed_capacity / 4) header.failures.overflow.store(0, std::memory_order_release);
  // The next sweep is due when the number has doubled, or is half-way to the table's maximum.
  const auto num_remaining = static_cast<uint32_t>(remaining.size());
  header.failures.sweep_at = std::min(2 * num_remaining, (num_remaining + max_failures(header)) / 2);
}

}  // namespace

bool is_complete(const Engine& engine, pto_task task) {
  const uint32_t slot = slot_of(task);
  if (task == 0 || slot >= engine.store.header->num_slots) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.wait] a task must be one that this runtime returned; got ", task,
                "; check that submit succeeded");
  }
  return TaskWord::has_ended(engine.store.slots[slot].word, generation_of(task));
}

// Records that the task did not run successfully: its error, or the one that it inherits, goes to its consumers.
void fail(Engine& engine, uint32_t slot, uint32_t thread, int status) {
  Slot& task = engine.store.slots[slot];
  const TaskRef self = engine.store.name_at(slot);
  uint32_t error = task.poison;
  if (error == 0) {
    std::string reason;
    if (status == PTO_CANCELLED) {
      reason = "it was cancelled";
    } else if (status == PTO_TIMEOUT && failure_reason.empty()) {
      reason = "it had not started by its deadline";
    } else if (!failure_reason.empty()) {
      reason = failure_reason;
    } else {
      reason = "its kernel returned " + std::to_string(status);
    }
    failure_reason.clear();
    if (status == PTO_INTERRUPTED) checks_at_once = true;
    error = record_error(engine, slot, thread,
                         status == PTO_CANCELLED || status == PTO_TIMEOUT ? status : PTO_TASK_FAILED, reason);
  }
  ThreadSlot& me = engine.thread_slot(thread);
  me.num_failed.store(me.num_failed.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  mark_failed(engine, self, error, (task.flags & kKeepsError) != 0);
  uint32_t none = 0;
  if (task.parent != 0) {
    engine.store.slots[task.parent - 1].child_error.compare_exchange_strong(none, error, std::memory_order_acq_rel);
  } else {
    engine.thread_slot(submitter_of(engine, slot))
        .first_error.compare_exchange_strong(none, error, std::memory_order_acq_rel);
  }
}

// If the table is full, every task that might have failed counts as failed, so that no wrong result looks right.
uint32_t find_error(Engine& engine, TaskRef task) {
  Header& header = *engine.store.header;
  std::lock_guard guard(header.failures.lock);
  const uint32_t mask = header.failed_capacity - 1;
  for (uint64_t at = hash_of(task) & mask; engine.store.failed[at].key != 0; at = (at + 1) & mask) {
    if (engine.store.failed[at].key == task) return engine.store.failed[at].error;
  }
  return header.failures.overflow.load(std::memory_order_acquire);
}

void inherit(Engine& engine, Slot& task, TaskRef producer) {
  if ((producer & kCarriesPoison) != 0 && task.poison == 0) task.poison = find_error(engine, without_flags(producer));
}

void sweep_failures_if_many(Engine& engine, bool holds_boxes_lock) {
  const Header& header = *engine.store.header;
  // Not before a sixteenth of the table is full, because a sweep visits all of it.
  const uint32_t limit = std::max(header.failures.sweep_at, header.failed_capacity / 16);
  if (header.failures.num_failed.load(std::memory_order_relaxed) >= limit) sweep_failures(engine, holds_boxes_lock);
}

std::string error_text(const Engine& engine, uint32_t error) {
  std::lock_guard guard(engine.store.header->failures.lock);
  const ErrorRecord& record = engine.store.errors[error % kMaxErrors];
  std::ostringstream text;
  if (record.number != error) {
    text << "[runtime.wait] a task must not fail; got a failure whose details were replaced by " << kMaxErrors
         << " later ones; look at the first failure";
    return text.str();
  }
  const std::string called = record.name[0] != 0 ? std::string(" '") + record.name + "'" : "";
  if (record.status == PTO_CANCELLED) {
    text << "[runtime.wait] a task must start to have a result; got task " << record.task << called << " ("
         << (record.kernel >= 0 ? engine.kernels.name_of(record.kernel) : "empty")
         << "), which was cancelled before it started, as were the tasks that read its data; nothing is to be "
            "corrected: "
            "submit it again if needed";
    return text.str();
  }
  text << "[runtime.wait] a task must not fail; got '" << record.text << "' from task " << record.task << called << " ("
       << (record.kernel >= 0 ? engine.kernels.name_of(record.kernel) : "empty") << ") on "
       << (record.worker >= 0 ? "worker " + std::to_string(record.worker) : "a submitter")
       << (record.status == PTO_TIMEOUT ? "; give it longer, or less to wait for"
                                        : "; correct its kernel or its operands");
  return text.str();
}

int error_status(const Engine& engine, uint32_t error) {
  std::lock_guard guard(engine.store.header->failures.lock);
  const ErrorRecord& record = engine.store.errors[error % kMaxErrors];
  return record.number == error ? record.status : PTO_TASK_FAILED;
}

int task_status(Engine& engine, pto_task task) {
  if (!is_complete(engine, task) || !engine.has_failures()) return PTO_OK;
  const uint32_t error = find_error(engine, task);
  return error == 0 ? static_cast<int>(PTO_OK) : error_status(engine, error);
}

int task_error(Engine& engine, pto_task task, std::string* text) {
  const int status = task_status(engine, task);
  if (status != PTO_OK) *text = error_text(engine, find_error(engine, task));
  return status;
}

void release(Engine& engine, pto_task task) {
  if (!is_complete(engine, task)) {
    engine.store.slots[slot_of(task)].released.store(static_cast<uint32_t>(generation_of(task)),
                                                     std::memory_order_seq_cst);
  }
  if (engine.store.header->failures.num_failed.load(std::memory_order_seq_cst) == 0) return;
  Header& header = *engine.store.header;
  std::lock_guard guard(header.failures.lock);
  const uint32_t mask = header.failed_capacity - 1;
  for (uint64_t at = hash_of(task) & mask; engine.store.failed[at].key != 0; at = (at + 1) & mask) {
    if (engine.store.failed[at].key == task) engine.store.failed[at].is_pinned = 0;
  }
}

}  // namespace tilewise::tasks
