// The devices of one executor, and waiting for the end of a run on them. If several processes have devices of one
// program, each has an executor, and the leader waits for all.
//
// Purpose: everything that worker threads access is here, shared by the executor and its threads. Who may call:
// watch_run: the thread in run(); num_completed: any. Blocks: watch_run until the devices have finished.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/peers.h"
#include "programs/program.h"
#include "programs/run/device.h"
#include "programs/run/options.h"
#include "programs/run/run_state.h"

namespace tilewise::programs {

struct DeviceGroup {
  std::shared_ptr<RunState> state = std::make_shared<RunState>();
  std::vector<int64_t> processes;      // per device, which has it
  std::vector<int64_t> hosts;          // per device, whose it is
  std::vector<std::unique_ptr<Device>> devices;  // none where another process has it
  std::vector<std::byte*> arenas;
  std::unique_ptr<RemoteMemory> remote;  // of devices of other hosts
  std::shared_ptr<const Program> program;  // of the last run
  std::vector<int64_t> symbols;

  comm::Peers* peers() const { return state->peers.get(); }  // none: all devices are here
};

/// Between runs: which process is lost, and how, in words; empty: none.
std::string find_loss(DeviceGroup& group);

/// Makes the device group's peers, if it has any. arenas: of all devices.
void join_group(DeviceGroup& group, const GroupOptions& options,
                const std::vector<std::shared_ptr<memory::Arena>>& arenas);
/// Has the others run a list; the order's number. Of one process alone: 0.
uint64_t order_run(const DeviceGroup& group, bool clears_poison, int64_t list, const std::vector<int64_t>& symbols);

inline constexpr int64_t kLostNs = 5'000'000'000;  // a process that shows no life for so long is given up

/// Asked every 50 ms while run() waits; true cancels.
using Poll = std::function<bool()>;

/// Of the devices here.
int64_t num_completed(const DeviceGroup& group);

/// Waits for all devices; in a process that leads, for those of all processes, in another one for those here. False:
/// they may never finish: a cancelled run still ran a kernel after ten seconds, or no task completed for deadline_s and
/// no worker was inside a kernel, or a process is lost; the device group's first error says which.
bool watch_run(DeviceGroup& group, double deadline_s, const Poll& poll);

/// How a run has ended: the error in this process; and, for who leads and has every answer, in any.
std::exception_ptr error_here(const DeviceGroup& group);
std::exception_ptr error_anywhere(const DeviceGroup& group);

/// A post from another process. What names no signal here fails the run.
void take_post(DeviceGroup& group, const comm::Post& post);

/// What is late, in one message: the wait, its signal, who should post it and what that device does.
std::string describe_timeout(const DeviceGroup& group, double deadline_s);

/// The same of a process that is lost: `how`, and the first wait for one of its devices.
std::string describe_loss(const DeviceGroup& group, int64_t process, const std::string& how);

}  // namespace tilewise::programs
