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

/// The processes of a program's devices, if not all are in this one. The caller keeps ownership of the descriptors. For
/// processes of other hosts, which are remote, there are no files and no descriptors.
struct GroupOptions {
  int64_t process = 0;                  // this process
  std::vector<int64_t> processes = {};  // per device; empty: all are in this process
  int group_file = -1;                   // sealed memory of comm::Peers::bytes()
  std::vector<int> arena_files = {};    // per device, sealed memory
  std::vector<int> spill_files = {};    // per device, if the plan has files: memory::SpillFile::make()
  std::vector<int> peer_files = {};     // per process, readable after its end; -1: not watched
  std::vector<int64_t> hosts = {};      // per process; empty: all are on one host
  std::shared_ptr<comm::Connection> connection = nullptr;  // to processes of other hosts
  int64_t number = 0;                   // this device group's number, the same in all processes

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
  int64_t memory_limit_bytes = 0;                  // for all that all devices reserve; 0: no limit
  double deadline_s = 60.0;  // maximum time without a completed task and without a worker inside a kernel
  // Per worker, first those of the host's first device: the core that it runs on. Empty: the system chooses.
  std::vector<int64_t> cores = {};
  GroupOptions group = {};
};

/// Rejects invalid sizes and limits (ArgumentError), and memory beyond the limit (ResourceError).
void check_options(const ExecutorOptions& options);
/// Whether the device is in this process.
bool is_local(const GroupOptions& group, int64_t device);
/// Whether the device is on another host.
bool is_remote_device(const GroupOptions& group, int64_t device);
/// The core of a worker of a device of this host; -1: the system chooses.
int64_t core_of(const ExecutorOptions& options, int64_t device, int64_t worker);
DeviceOptions device_options(const ExecutorOptions& options, int64_t device);

}  // namespace tilewise::programs
