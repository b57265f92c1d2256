// Waiting for the end of a run: the caller's poll, and the deadline. See group.h.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "programs/run/errors.h"
#include "programs/run/group.h"

namespace tilewise::programs {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPoll{50};
constexpr int64_t kYieldNs = 50'000;
constexpr int64_t kAloneNs = 1'000;  // several times the duration of a yield to no other thread
constexpr double kKernelPatience_s = 1800;     // the limit while a worker is inside a kernel or a disk is busy
constexpr milliseconds kDrainLimit{10'000};  // a cancelled run that still runs a kernel after this is broken

int64_t in_ns(milliseconds time) { return std::chrono::nanoseconds(time).count(); }

bool is_at_work_here(const DeviceGroup& group) {
  if (group.state->files().is_busy()) return true;
  for (const auto& device : group.devices) {
    if (device == nullptr) continue;
    for (int64_t w = 0; w < device->options().num_workers; ++w) {
      const WorkerStatus status = device->status(w);
      if (status.instr != nullptr && !status.stalled) return true;
    }
  }
  return false;
}

bool is_at_work(const DeviceGroup& group) {
  if (is_at_work_here(group)) return true;
  for (int64_t p = 0; group.peers() != nullptr && p < group.peers()->num_processes(); ++p) {
    if (p != group.peers()->process() && group.peers()->progress(p).is_at_work) return true;
  }
  return false;
}

int64_t num_completed_anywhere(const DeviceGroup& group) {
  int64_t total = num_completed(group);
  for (int64_t p = 0; group.peers() != nullptr && p < group.peers()->num_processes(); ++p) {
    if (p != group.peers()->process()) total += static_cast<int64_t>(group.peers()->progress(p).num_completed);
  }
  return total;
}

/// Whether this thread and the workers need more processors than there are.
bool is_crowded(const DeviceGroup& group) {
  static const auto kProcessors = static_cast<int64_t>(std::thread::hardware_concurrency());
  int64_t num_workers = 0;
  for (const auto& device : group.devices) num_workers += device != nullptr ? device->options().num_workers : 0;
  return num_workers >= kProcessors;
}

/// A short run ends before a sleeping thread would be awake, so the caller first yields to the workers. If a yield
/// returns at once although processors are scarce, workers share another processor. Then the caller sleeps, so that
/// they can use this one. With several processes the caller does not yield: it has to wait for their answers anyway.
bool yield_until_finished(const DeviceGroup& group) {
  if (group.peers() != nullptr) return false;
  const bool is_scarce = is_crowded(group);
  const int64_t begin = now_ns();
  for (int64_t last = begin; !group.state->has_finished();) {
    sched_yield();
    const int64_t now = now_ns();
    if (now - begin >= kYieldNs || (is_scarce && now - last < kAloneNs)) return false;
    last = now;
  }
  return true;
}

bool wait_finished(DeviceGroup& group) {
  if (!yield_until_finished(group) && !group.state->wait_finished(kPoll)) return false;
  return group.peers() == nullptr || !group.peers()->leads() || group.peers()->await_answers(in_ns(kPoll));
}

/// Reports this process's progress to the others and checks theirs. Returns false if one is lost.
bool follow_peers(DeviceGroup& group) {
  if (group.peers() == nullptr) return true;
  comm::Peers& peers = *group.peers();
  peers.report(num_completed(group), is_at_work_here(group));
  if (group.state->stopped() != 0) {
    peers.report_stopped();
  } else if (peers.is_stopped()) {
    group.state->fail(std::make_exception_ptr(StoppedElsewhere("[programs.Executor.run] another process has failed")));
  }
  std::string how;
  const int64_t lost = peers.find_lost(kLostNs, &how);
  if (lost < 0) return true;
  group.state->fail(std::make_exception_ptr(PeerLost(describe_loss(group, lost, how))));
  return false;
}

void cancel(DeviceGroup& group) {
  group.state->fail(std::make_exception_ptr(
      Interrupted("[programs.Executor.run] the run was cancelled by its caller; tasks not started were skipped")));
}

}  // namespace

int64_t num_completed(const DeviceGroup& group) {
  int64_t total = 0;
  for (const auto& device : group.devices) {
    if (device != nullptr) total += static_cast<int64_t>(device->engine().num_completed());
  }
  return total;
}

// The deadline counts only time in which this thread was awake, so that a stopped process does not exceed it. Only the
// leader checks it, because the others cannot know whether the leader was stopped. A run that had already failed
// reports that failure; if a device then does not drain, the executor is broken all the same.
bool watch_run(DeviceGroup& group, double deadline_s, const Poll& poll) {
  int64_t seen = num_completed_anywhere(group);
  int64_t quiet_ns = 0;
  int64_t last_ns = now_ns();
  bool cancelled = false;
  const bool keeps_deadline = group.peers() == nullptr || group.peers()->leads();
  while (!wait_finished(group)) {
    if (!follow_peers(group)) return false;
    if (!cancelled && poll && poll()) {
      cancel(group);
      cancelled = true;
      quiet_ns = 0;
    }
    const int64_t now = now_ns();
    quiet_ns += std::min(now - last_ns, 4 * in_ns(kPoll));
    last_ns = now;
    if (const int64_t completed = num_completed_anywhere(group); completed != seen) {
      seen = completed;
      quiet_ns = 0;
    }
    if (cancelled && quiet_ns > in_ns(kDrainLimit)) return false;
    const auto quiet = static_cast<double>(quiet_ns);
    if (cancelled || !keeps_deadline || quiet <= deadline_s * 1e9) continue;
    if (is_at_work(group) && quiet <= kKernelPatience_s * 1e9) continue;
    group.state->fail(std::make_exception_ptr(CommTimeout(describe_timeout(group, deadline_s))));
    return false;
  }
  return true;
}

}  // namespace tilewise::programs
