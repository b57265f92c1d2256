// Waiting for the end of a run: the poll of its caller, and the deadline. See team.h.
#include <algorithm>
#include <chrono>

#include "programs/run/errors.h"
#include "programs/run/team.h"

namespace tilewise::programs {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPoll{50};
constexpr double kKernelPatience_s = 1800;  // a worker inside a kernel, and a disk, are at work: so long for one task
constexpr milliseconds kDrainLimit{10'000};  // a cancelled run that still runs a kernel after this is broken

int64_t in_ns(milliseconds time) { return std::chrono::nanoseconds(time).count(); }

bool is_at_work_here(const Team& team) {
  if (team.state->files().is_busy()) return true;
  for (const auto& device : team.devices) {
    if (device == nullptr) continue;
    for (int64_t w = 0; w < device->options().num_workers; ++w) {
      const WorkerStatus status = device->status(w);
      if (status.instr != nullptr && !status.stalled) return true;
    }
  }
  return false;
}

bool is_at_work(const Team& team) {
  if (is_at_work_here(team)) return true;
  for (int64_t p = 0; team.peers() != nullptr && p < team.peers()->num_processes(); ++p) {
    if (p != team.peers()->process() && team.peers()->progress(p).is_at_work) return true;
  }
  return false;
}

int64_t num_completed_anywhere(const Team& team) {
  int64_t total = num_completed(team);
  for (int64_t p = 0; team.peers() != nullptr && p < team.peers()->num_processes(); ++p) {
    if (p != team.peers()->process()) total += static_cast<int64_t>(team.peers()->progress(p).num_completed);
  }
  return total;
}

bool wait_finished(Team& team) {
  if (!team.state->wait_finished(kPoll)) return false;
  return team.peers() == nullptr || !team.peers()->leads() || team.peers()->await_answers(in_ns(kPoll));
}

/// Tells the other processes how this one is, and asks how they are. False: one is lost.
bool follow_peers(Team& team) {
  if (team.peers() == nullptr) return true;
  comm::Peers& peers = *team.peers();
  peers.tell(num_completed(team), is_at_work_here(team));
  if (team.state->stopped() != 0) {
    peers.tell_stopped();
  } else if (peers.is_stopped()) {
    team.state->fail(std::make_exception_ptr(StoppedElsewhere("[runtime.Executor.run] another process has failed")));
  }
  std::string how;
  const int64_t lost = peers.find_lost(kLostNs, &how);
  if (lost < 0) return true;
  team.state->fail(std::make_exception_ptr(PeerLost(describe_loss(team, lost, how))));
  return false;
}

void cancel(Team& team) {
  team.state->fail(std::make_exception_ptr(
      Interrupted("[runtime.Executor.run] the run was cancelled by its caller; tasks not started were skipped")));
}

}  // namespace

int64_t num_completed(const Team& team) {
  int64_t total = 0;
  for (const auto& device : team.devices) {
    if (device != nullptr) total += static_cast<int64_t>(device->engine().num_completed());
  }
  return total;
}

// The deadline counts time in which this thread itself was awake, so a stopped process does not run into it; of several
// processes the one that leads keeps it, since the others cannot know that it was stopped. A run that had already
// failed raises that failure: a device that then does not drain is broken all the same.
bool watch_run(Team& team, double deadline_s, const Poll& poll) {
  int64_t seen = num_completed_anywhere(team);
  int64_t quiet_ns = 0;
  int64_t last_ns = now_ns();
  bool cancelled = false;
  const bool keeps_deadline = team.peers() == nullptr || team.peers()->leads();
  while (!wait_finished(team)) {
    if (!follow_peers(team)) return false;
    if (!cancelled && poll && poll()) {
      cancel(team);
      cancelled = true;
      quiet_ns = 0;
    }
    const int64_t now = now_ns();
    quiet_ns += std::min(now - last_ns, 4 * in_ns(kPoll));
    last_ns = now;
    if (const int64_t completed = num_completed_anywhere(team); completed != seen) {
      seen = completed;
      quiet_ns = 0;
    }
    if (cancelled && quiet_ns > in_ns(kDrainLimit)) return false;
    const auto quiet = static_cast<double>(quiet_ns);
    if (cancelled || !keeps_deadline || quiet <= deadline_s * 1e9) continue;
    if (is_at_work(team) && quiet <= kKernelPatience_s * 1e9) continue;
    team.state->fail(std::make_exception_ptr(CommTimeout(describe_timeout(team, deadline_s))));
    return false;
  }
  return true;
}

}  // namespace tilewise::programs
