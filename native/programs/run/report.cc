// The report of an exceeded deadline: which task waits for which signal, which device should post it, and what that
// device does.
#include <algorithm>
#include <sstream>

#include "programs/run/group.h"

namespace tilewise::programs {

namespace {

struct Blocked {
  int64_t device;
  BlockedWait wait;
  uint64_t seen;
  std::vector<int64_t> posters;
};

/// What the workers of a device do; for another process's device, what that process reported last.
std::string activity_of(const DeviceGroup& group, int64_t index) {
  const Program& program = *group.program;
  std::ostringstream text;
  if (group.devices[index] == nullptr) {
    const int64_t process = group.processes[index];
    const comm::Progress progress = group.peers()->progress(process);
    text << "process " << process << ", pid " << progress.pid << ", " << (progress.is_at_work ? "at work" : "idle")
         << " after " << progress.num_completed << " tasks";
    return text.str();
  }
  const Device& device = *group.devices[index];
  for (int64_t w = 0; w < device.options().num_workers; ++w) {
    const WorkerStatus status = device.status(w);
    text << (w == 0 ? "" : ", ") << "worker " << w << " ";
    if (status.instr == nullptr) {
      text << "is idle";
      continue;
    }
    text << (status.stalled ? "has stopped at '" : "runs '") << program.labels()[status.instr->label] << "'["
         << status.index << "] since " << static_cast<double>(now_ns() - status.since_ns) * 1e-9 << " s";
  }
  return text.str();
}

bool is_busy(const DeviceGroup& group, int64_t index) {
  if (group.devices[index] == nullptr) return group.peers()->progress(group.processes[index]).is_at_work;
  const Device& device = *group.devices[index];
  for (int64_t w = 0; w < device.options().num_workers; ++w) {
    if (device.status(w).instr != nullptr) return true;
  }
  return false;
}

std::vector<Blocked> all_blocked(const DeviceGroup& group) {
  std::vector<Blocked> blocked;
  for (int64_t device = 0; device < std::ssize(group.devices); ++device) {
    if (group.devices[device] == nullptr) continue;
    Device& of = *group.devices[device];
    for (const BlockedWait& wait : of.blocked()) {
      blocked.push_back({device, wait, of.signals()[wait.signal].value(), group.program->posters(device, wait.signal)});
      break;  // the first of each device
    }
  }
  return blocked;
}

// A chain of waits begins at the wait whose poster is busy or stalled.
const Blocked& root(const DeviceGroup& group, const std::vector<Blocked>& blocked) {
  for (const Blocked& wait : blocked) {
    const auto busy = [&](int64_t poster) { return is_busy(group, poster); };
    if (std::any_of(wait.posters.begin(), wait.posters.end(), busy)) return wait;
  }
  return blocked.front();
}

void describe(std::ostringstream& text, const DeviceGroup& group, const Blocked& late) {
  text << "device " << late.device << " waits in '" << group.program->labels()[late.wait.instr->label] << "'["
       << late.wait.index << "] for signal " << late.wait.signal << " to reach " << late.wait.expected << " (seen "
       << late.seen << "), which device";
  for (int64_t poster : late.posters) text << " " << poster << " (" << activity_of(group, poster) << ")";
  text << " should post; ";
}

}  // namespace

std::string describe_timeout(const DeviceGroup& group, double deadline_s) {
  std::ostringstream text;
  text << "[programs.Executor.run] a device must make progress within " << deadline_s << " s; got none: ";
  const std::vector<Blocked> blocked = all_blocked(group);
  if (blocked.empty()) {
    for (int64_t d = 0; d < std::ssize(group.devices); ++d)
      text << "device " << d << ": " << activity_of(group, d) << "; ";
  } else {
    describe(text, group, root(group, blocked));
  }
  text << "look at that device, or raise deadline_s; this executor cannot be used again";
  return text.str();
}

std::string describe_loss(const DeviceGroup& group, int64_t process, const std::string& how) {
  std::ostringstream text;
  const comm::Progress progress = group.peers()->progress(process);
  text << "[programs.Executor.run] every process must stay until the end; got process " << process << " (pid "
       << progress.pid << "), which " << how << " after " << progress.num_completed << " tasks; ";
  for (const Blocked& wait : all_blocked(group)) {
    const auto is_its = [&](int64_t poster) { return group.processes[poster] == process; };
    if (std::none_of(wait.posters.begin(), wait.posters.end(), is_its)) continue;
    describe(text, group, wait);
    break;
  }
  text << "look at that process's own messages, then start again from the last checkpoint";
  return text.str();
}

}  // namespace tilewise::programs
