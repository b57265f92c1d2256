// See scheduler.h.
#include "runtime/scheduler.h"

#include <algorithm>
#include <chrono>
#include <mutex>

namespace tilewise::runtime {

using rings::kNone;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Scheduler::Scheduler(int64_t window, int64_t num_handles, int64_t low_water)
    : handles_(num_handles), ready_(window), low_water_(low_water) {
  for (int64_t slot = window - 1; slot >= 0; --slot) {
    slots_.push_back(std::make_unique<Slot>());
    free_.push_back(static_cast<int32_t>(slot));
  }
}

void Scheduler::open(bool tracing) {
  std::lock_guard guard(lock_);
  if (has_poison_) {
    for (Handle& handle : handles_) handle.poison = 0;
    has_poison_ = false;
  }
  tracing_ = tracing;
  walk_open_ = true;
  publish();
}

Scheduler::Next Scheduler::take(int32_t* slot) {
  if (work_.load(std::memory_order_relaxed) == 0) return Next::kNothing;
  std::lock_guard guard(lock_);
  if (can_walk() && ready_.size() < low_water_) {
    walk_busy_ = true;
    publish();
    return Next::kWalk;
  }
  if (ready_.size() == 0) return Next::kNothing;
  *slot = ready_.pop();
  publish();
  return Next::kTask;
}

int32_t Scheduler::acquire() {
  std::lock_guard guard(lock_);
  if (free_.empty()) return kNone;
  const int32_t slot = free_.back();
  free_.pop_back();
  high_water_ = std::max(high_water_, static_cast<int64_t>(slots_.size() - free_.size()));
  return slot;
}

bool Scheduler::submit(int32_t slot, std::vector<Access>& accesses, int64_t num_waits) {
  std::lock_guard guard(lock_);
  Slot& task = *slots_[slot];
  task.sequence = next_sequence_++;
  task.submitted = true;
  task.poison = 0;
  task.last_successor = 0;
  // The guard: one event of the submitter's own, so that no signal can make the task ready before all are asked.
  task.pending = num_waits > 0 ? num_waits + 1 : 0;
  merge(task.sequence, accesses);
  for (const Access& access : accesses) {
    const Handle& handle = handles_[access.handle];
    depend(task, slot, handle.writer);
    if ((access.bits & (kOut | kReuse)) != 0) {
      for (int32_t n = handle.readers; n != kNone; n = nodes_[n].next) {
        const int32_t reader = nodes_[n].slot;
        depend(task, slot, {reader, slots_[reader]->sequence});
      }
    }
    if ((access.bits & kIn) != 0 && handle.poison != 0 && task.poison == 0) task.poison = handle.poison;
  }
  for (const Access& access : accesses) record(slot, access);
  if (task.pending > 0) return false;
  make_ready(slot);
  publish();
  return true;
}

// One entry per handle: a task must not depend on itself.
void Scheduler::merge(uint64_t sequence, std::vector<Access>& accesses) {
  size_t kept = 0;
  for (const Access& access : accesses) {
    Handle& handle = handles_[access.handle];
    if (handle.mark == sequence) {
      accesses[handle.mark_index].bits |= access.bits;
      continue;
    }
    handle.mark = sequence;
    handle.mark_index = static_cast<int32_t>(kept);
    accesses[kept++] = access;
  }
  accesses.resize(kept);
}

void Scheduler::depend(Slot& task, int32_t slot, const TaskRef& producer) {
  if (producer.slot == kNone) return;
  Slot& other = *slots_[producer.slot];
  if (other.sequence != producer.sequence) return;       // completed
  if (other.last_successor == task.sequence) return;     // already waits for it
  other.last_successor = task.sequence;
  const int32_t edge = edges_.take();
  edges_[edge] = {slot, other.first_edge};
  other.first_edge = edge;
  ++task.pending;
}

void Scheduler::record(int32_t slot, const Access& access) {
  const bool is_write = (access.bits & kOut) != 0;
  if (!is_write && (access.bits & kIn) == 0) return;
  Slot& task = *slots_[slot];
  Handle& handle = handles_[access.handle];
  if (is_write) {
    // Readers before this write are ordered by it from now on.
    for (int32_t n = handle.readers; n != kNone; n = nodes_[n].next) nodes_[n].is_linked = false;
    handle.readers = kNone;
    handle.writer = {slot, task.sequence};
  }
  const int32_t index = nodes_.take();
  Node& node = nodes_[index];
  node = {access.handle, slot, task.first_node, kNone, kNone, is_write, !is_write};
  task.first_node = index;
  if (is_write) return;
  node.next = handle.readers;
  if (handle.readers != kNone) nodes_[handle.readers].previous = index;
  handle.readers = index;
}

bool Scheduler::end_walk(bool done) {
  std::lock_guard guard(lock_);
  walk_busy_ = false;
  if (done) walk_open_ = false;
  publish();
  return is_finished();
}

bool Scheduler::satisfy(int32_t slot, int64_t count, uint64_t poison) {
  std::lock_guard guard(lock_);
  const bool is_ready = drop_pending(slot, count, poison);
  if (is_ready) publish();
  return is_ready;
}

Scheduler::Completion Scheduler::complete(int32_t slot, uint64_t poison) {
  std::lock_guard guard(lock_);
  Slot& task = *slots_[slot];
  int64_t num_ready = 0;
  for (int32_t edge = task.first_edge; edge != kNone;) {
    const Edge current = edges_[edge];
    num_ready += drop_pending(current.successor, 1, poison);
    edges_.give(edge);
    edge = current.next;
  }
  task.first_edge = kNone;
  release_nodes(task, {slot, task.sequence}, poison);
  task.sequence = 0;
  task.submitted = false;
  free_.push_back(slot);
  publish();
  return {num_ready, is_finished()};
}

void Scheduler::release_nodes(Slot& task, TaskRef self, uint64_t poison) {
  for (int32_t n = task.first_node; n != kNone;) {
    const Node node = nodes_[n];
    Handle& handle = handles_[node.handle];
    if (node.is_linked) unlink(node, n);
    if (node.is_write && handle.writer.slot == self.slot && handle.writer.sequence == self.sequence) {
      handle.writer = {};
      handle.poison = poison;
      has_poison_ |= poison != 0;
    }
    nodes_.give(n);
    n = node.next_of_task;
  }
  task.first_node = kNone;
}

void Scheduler::unlink(const Node& node, int32_t index) {
  if (node.previous != kNone) nodes_[node.previous].next = node.next;
  if (node.next != kNone) nodes_[node.next].previous = node.previous;
  int32_t& first = handles_[node.handle].readers;
  if (first == index) first = node.next;
}

bool Scheduler::drop_pending(int32_t slot, int64_t count, uint64_t poison) {
  Slot& task = *slots_[slot];
  if (poison != 0 && task.poison == 0) task.poison = poison;
  task.pending -= count;
  if (task.pending > 0) return false;
  make_ready(slot);
  return true;
}

void Scheduler::make_ready(int32_t slot) {
  Slot& task = *slots_[slot];
  if (tracing_) task.ready_ns = now_ns();
  ready_.push({task.task.instr->priority, task.sequence, slot});
}

void Scheduler::publish() { work_.store(ready_.size() + (can_walk() ? 1 : 0), std::memory_order_seq_cst); }

bool Scheduler::is_finished() const { return !walk_open_ && !walk_busy_ && free_.size() == slots_.size(); }

std::vector<BlockedWait> Scheduler::blocked(const std::function<uint64_t(int64_t)>& signal_value) {
  std::lock_guard guard(lock_);
  std::vector<BlockedWait> found;
  for (const auto& slot : slots_) {
    if (!slot->submitted || slot->pending == 0) continue;
    for (const TaskWait& wait : slot->task.waits) {
      if (signal_value(wait.signal) >= wait.threshold) continue;
      found.push_back({slot->sequence, slot->task.instr, slot->task.index, wait.signal, wait.threshold});
    }
  }
  std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.sequence < b.sequence; });
  return found;
}

}  // namespace tilewise::runtime
