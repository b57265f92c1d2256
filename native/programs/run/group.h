// The devices of one executor, and waiting for the end of a run on them. If several processes have devices of one
// program, each process has an executor. One process is the leader: it starts runs and waits for the devices of all.
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
  std::vector<int64_t> processes;                // per device
  std::vector<int64_t> hosts;                    // per device
  std::vector<std::unique_ptr<Device>> devices;  // nullptr for devices of other processes
  std::vector<std::byte*> arenas;
  std::unique_ptr<RemoteMemory> remote;    // memory of other hosts' devices
  std::shared_ptr<const Program> program;  // of the last run
  std::vector<int64_t> symbols;

  comm::Peers* peers() const { return state->peers.get(); }  // nullptr: all devices are in this process
};

/// Between runs: describes which process is lost and how; empty if none is.
std::string find_loss(DeviceGroup& group);

/// Connects this process with the other processes of the device group, if there are any. arenas: one per device, of all
/// devices.
void join_group(DeviceGroup& group, const GroupOptions& options,
                const std::vector<std::shared_ptr<memory::Arena>>& arenas);
/// Tells the other processes to run the calls of a list. Returns the number of this order; 0 if there is only one
/// process. clears_poison: whether the errors of the last run are forgotten first.
uint64_t order_run(const DeviceGroup& group, bool clears_poison, int64_t program, int64_t list,
                   const std::vector<int64_t>& symbols);

inline constexpr int64_t kLostNs = 5'000'000'000;  // a process that does not respond for this long is lost

/// Called every 50 ms while run() waits; returning true cancels the run.
using Poll = std::function<bool()>;

/// Tasks that the devices of this process have completed.
int64_t num_completed(const DeviceGroup& group);

/// Waits for all devices of this process; the leader waits for those of all processes. Returns false if they may never
/// finish: a cancelled run still ran a kernel after ten seconds, or no task completed for deadline_s and no worker was
/// inside a kernel, or a process is lost. The device group's first error says which.
bool watch_run(DeviceGroup& group, double deadline_s, const Poll& poll);

/// The error with which the run has ended in this process, or nullptr.
std::exception_ptr error_here(const DeviceGroup& group);
/// The same for any process. Only the leader knows it, because the other processes answer to the leader.
std::exception_ptr error_anywhere(const DeviceGroup& group);

/// Handles a signal that another process has posted. The run fails if this process has no such signal.
void take_post(DeviceGroup& group, const comm::Post& post);

/// The deadline's error message: the wait, its signal, the device that should post it and what that device does.
std::string describe_timeout(const DeviceGroup& group, double deadline_s);

/// The error message about a lost process: `how`, and the first wait for one of its devices.
std::string describe_loss(const DeviceGroup& group, int64_t process, const std::string& how);

}  // namespace tilewise::programs
