// The devices of one executor, and waiting for the end of a run on them.
//
// Purpose: everything that worker threads touch lives here, shared by the executor and its threads. Who may call:
// watch_run, the thread in run(); num_completed any. Blocks: watch_run until the devices have finished.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "programs/program.h"
#include "programs/run/device.h"
#include "programs/run/run_state.h"

namespace tilewise::programs {

struct Team {
  std::shared_ptr<RunState> state = std::make_shared<RunState>();
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::byte*> arenas;
  std::shared_ptr<const Program> program;  // of the last run
  std::vector<int64_t> symbols;
};

/// Asked every 50 ms while run() waits; true cancels.
using Poll = std::function<bool()>;

int64_t num_completed(const Team& team);

/// Waits for all devices. False: they may never finish: a cancelled run still ran a kernel after ten seconds, or no
/// task completed for deadline_s and no worker was inside a kernel; the team's first error says which.
bool watch_run(Team& team, double deadline_s, const Poll& poll);

/// What is late, in one message: the wait, its signal, who should raise it and what that device does.
std::string describe_timeout(const Program& program, const std::vector<std::unique_ptr<Device>>& devices,
                             double deadline_s);

}  // namespace tilewise::programs
