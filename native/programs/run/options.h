// The options of an executor, and the checks before anything is allocated.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/connection.h"
#include "kernels/kernel.h"
#include "programs/run/device.h"

namespace tilewise::programs {

/// Where a program's devices are, if not all in this process. Descriptors stay their owner's. Processes of other hosts
/// are remote: of their devices there are no files here, and of their ends no descriptors.
struct GroupOptions {
  int64_t process = 0;                  // this one
  std::vector<int64_t> processes = {};  // per device, which has it; empty: all are here
  int group_file = -1;                   // sealed memory of comm::Peers::bytes()
  std::vector<int> arena_files = {};    // per device, sealed memory
  std::vector<int> spill_files = {};    // per device, where the plan has files: memory::SpillFile::make()
  std::vector<int> peer_files = {};     // per process, becomes readable when it ends; -1: not watched
  std::vector<int64_t> hosts = {};      // per process; empty: all are on one
  std::shared_ptr<comm::Connection> connection = nullptr;  // to those of other hosts
  int64_t number = 0;                   // by which all processes know this device group

  bool is_remote(int64_t other) const { return !hosts.empty() && hosts[other] != hosts[process]; }
};

struct ExecutorOptions {
  int64_t num_devices = 1;
  int64_t workers_per_device = 1;
  std::vector<int64_t> arena_bytes;  // per device
  int64_t num_signals = 0;
  int64_t num_handles = 0;  // per device
  int64_t window = 512;
  int64_t scratch_bytes = kernels::kScratchBytes;  // per worker
  int64_t file_bytes = 0;  // per device, in a file of its own in file_directory
  std::string file_directory = {};
  int64_t memory_limit_bytes = 0;                  // over all devices and all they reserve; 0: none
  double deadline_s = 60.0;                        // without a completed task and with no worker inside a kernel
  GroupOptions group = {};
};

/// Refuses sizes and limits that cannot be (ArgumentError), and memory beyond the limit (ResourceError).
void check_options(const ExecutorOptions& options);
/// Whether this process has the device.
bool is_local(const GroupOptions& group, int64_t device);
/// Whether another host has it.
bool is_remote_device(const GroupOptions& group, int64_t device);
DeviceOptions device_options(const ExecutorOptions& options, int64_t device);

}  // namespace tilewise::programs
