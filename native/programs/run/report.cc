// The report of a passed deadline: who waits for what, who should raise it, and what that device is doing.
#include <algorithm>
#include <sstream>

#include "programs/run/team.h"

namespace tilewise::programs {

namespace {

using Devices = std::vector<std::unique_ptr<Device>>;

struct Blocked {
  int64_t device;
  BlockedWait wait;
  uint64_t seen;
  std::vector<int64_t> raisers;
};

std::string doing(const Program& program, const Device& device) {
  std::ostringstream text;
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

bool is_busy(const Device& device) {
  for (int64_t w = 0; w < device.options().num_workers; ++w) {
    if (device.status(w).instr != nullptr) return true;
  }
  return false;
}

std::vector<Blocked> all_blocked(const Program& program, const Devices& devices) {
  std::vector<Blocked> found;
  for (size_t d = 0; d < devices.size(); ++d) {
    for (const BlockedWait& wait : devices[d]->blocked()) {
      const auto device = static_cast<int64_t>(d);
      found.push_back({device, wait, devices[d]->signals()[wait.signal].value(), program.raisers(device, wait.signal)});
      break;  // the first of each device
    }
  }
  return found;
}

// Of several waits in a chain, the one whose raiser is busy (or stalled) is where the chain begins.
const Blocked& root(const std::vector<Blocked>& blocked, const Devices& devices) {
  for (const Blocked& wait : blocked) {
    const auto busy = [&](int64_t raiser) { return is_busy(*devices[raiser]); };
    if (std::any_of(wait.raisers.begin(), wait.raisers.end(), busy)) return wait;
  }
  return blocked.front();
}

}  // namespace

std::string describe_timeout(const Program& program, const Devices& devices, double deadline_s) {
  std::ostringstream text;
  text << "[runtime.Executor.run] a device must make progress within " << deadline_s << " s; got none: ";
  const std::vector<Blocked> blocked = all_blocked(program, devices);
  if (blocked.empty()) {
    for (size_t d = 0; d < devices.size(); ++d) text << "device " << d << ": " << doing(program, *devices[d]) << "; ";
  } else {
    const Blocked& late = root(blocked, devices);
    text << "device " << late.device << " waits in '" << program.labels()[late.wait.instr->label] << "'["
         << late.wait.index << "] for signal " << late.wait.signal << " to reach " << late.wait.expected << " (seen "
         << late.seen << "), which device";
    for (int64_t raiser : late.raisers) text << " " << raiser << " (" << doing(program, *devices[raiser]) << ")";
    text << " should raise; ";
  }
  text << "look at that device, or raise deadline_s; this executor cannot be used again";
  return text.str();
}

}  // namespace tilewise::programs
