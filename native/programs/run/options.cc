// See options.h.
#include "programs/run/options.h"

#include <sched.h>

#include <numeric>
#include <set>

namespace tilewise::programs {

namespace {

void check_group(const ExecutorOptions& options) {
  const GroupOptions& group = options.group;
  if (group.processes.empty()) return;
  check<ArgumentError>(
      std::ssize(group.processes) == options.num_devices && std::ssize(group.arena_files) == options.num_devices,
      "[programs.Executor] a device group must name the process and the memory file of every device; got ",
      group.processes.size(), " processes and ", group.arena_files.size(), " files for ", options.num_devices,
      " devices; correct the argument");
  for (int64_t process : group.processes) {
    check<ArgumentError>(process >= 0 && process < std::ssize(group.peer_files),
                         "[programs.Executor] a device's process must be one of ", group.peer_files.size(), "; got ",
                         process, "; count from 0");
  }
  check<ArgumentError>(
      group.hosts.empty() ||
          (group.hosts.size() == group.peer_files.size() && group.connection != nullptr &&
           std::ssize(group.peer_files) <= group.connection->size() && group.process == group.connection->rank()),
      "[programs.Executor] processes of several hosts must have a connection of as many processes and a host "
      "each; got ",
      group.hosts.size(), " hosts of ", group.peer_files.size(), " processes; correct the argument");
  check<ArgumentError>(std::ssize(group.spill_files) == (options.file_bytes == 0 ? 0 : options.num_devices),
                       "[programs.Executor] a device group must have a file per device if the plan has files; got ",
                       group.spill_files.size(), " files of ", options.file_bytes, " bytes; correct the argument");
}

/// Workers on one core would take turns, and a core that this process may not use cannot be had.
void check_cores(const ExecutorOptions& options) {
  if (options.cores.empty()) return;
  int64_t num_here = 0;
  for (int64_t d = 0; d < options.num_devices; ++d) num_here += is_remote_device(options.group, d) ? 0 : 1;
  const int64_t num_threads = num_here * options.workers_per_device;
  check<ArgumentError>(std::ssize(options.cores) >= num_threads,
                       "[programs.Executor] every worker must have a core; got ", options.cores.size(), " cores for ",
                       num_threads, " workers; name more cores, or use fewer devices or workers per device");
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  std::set<int64_t> used;
  for (int64_t n = 0; n < num_threads; ++n) {
    const int64_t core = options.cores[n];
    check<ArgumentError>(core >= 0 && core < CPU_SETSIZE && CPU_ISSET(core, &allowed),
                         "[programs.Executor] a core must be one that this process may use; got core ", core, ", and ",
                         CPU_COUNT(&allowed), " cores that it may use; see os.sched_getaffinity(0)");
    check<ArgumentError>(used.insert(core).second, "[programs.Executor] a core must have one worker; got core ", core,
                         " twice; name each once");
  }
}

}  // namespace

bool is_local(const GroupOptions& group, int64_t device) {
  return group.processes.empty() || group.processes[device] == group.process;
}

bool is_remote_device(const GroupOptions& group, int64_t device) {
  return !group.processes.empty() && group.is_remote(group.processes[device]);
}

void check_options(const ExecutorOptions& options) {
  const auto positive = [](int64_t value, const char* name) {
    check<ArgumentError>(value >= 1, "[programs.Executor] ", name, " must be at least 1; got ", value,
                         "; correct the argument");
  };
  positive(options.num_devices, "num_devices");
  positive(options.workers_per_device, "workers_per_device");
  positive(options.window, "window");
  check<ArgumentError>(
      options.workers_per_device <= tasks::Embedded::kMaxWorkers && options.window <= tasks::Embedded::kMaxWindow,
      "[programs.Executor] workers_per_device and window must be at most ", tasks::Embedded::kMaxWorkers, " and ",
      tasks::Embedded::kMaxWindow, "; got ", options.workers_per_device, " and ", options.window,
      "; choose smaller ones");
  check<ArgumentError>(static_cast<int64_t>(options.arena_bytes.size()) == options.num_devices,
                       "[programs.Executor] arena_bytes needs one size per device; got ", options.arena_bytes.size(),
                       " for ", options.num_devices, " devices; pass the plan's sizes");
  for (int64_t bytes : options.arena_bytes) {
    check<ArgumentError>(bytes >= 0, "[programs.Executor] arena_bytes must not be negative; got ", bytes,
                         "; pass the plan's sizes");
  }
  constexpr int64_t kMostObjects = INT32_MAX;  // the engine counts both together in 32 bits
  check<ArgumentError>(options.num_signals >= 0 && options.num_handles >= 0 && options.num_signals <= kMostObjects &&
                           options.num_handles <= kMostObjects && options.deadline_s > 0,
                       "[programs.Executor] num_signals and num_handles must lie in [0, ", kMostObjects,
                       "] and deadline_s be > 0; got ", options.num_signals, ", ", options.num_handles, ", ",
                       options.deadline_s, "; correct the argument");
  check<ArgumentError>(options.scratch_bytes >= 0 && options.file_bytes >= 0,
                       "[programs.Executor] scratch_bytes and file_bytes must not be negative; got ",
                       options.scratch_bytes, " and ", options.file_bytes, "; pass the plan's sizes");
  int64_t total = std::accumulate(options.arena_bytes.begin(), options.arena_bytes.end(), int64_t{0});
  check_group(options);
  check_cores(options);
  for (int64_t d = 0; d < options.num_devices; ++d) total += bytes_needed(device_options(options, d)).total();
  check<ResourceError>(options.memory_limit_bytes <= 0 || total <= options.memory_limit_bytes,
                       "[programs.Executor] the devices' memory must stay within the limit; got ",
                       ByteCount(static_cast<uint64_t>(total)), " against ",
                       ByteCount(static_cast<uint64_t>(options.memory_limit_bytes)),
                       "; shard over more devices, use smaller batches or raise the limit");
}

int64_t core_of(const ExecutorOptions& options, int64_t device, int64_t worker) {
  if (options.cores.empty()) return -1;
  int64_t place = 0;  // of the device among those of its host
  for (int64_t d = 0; d < device; ++d) {
    if (is_remote_device(options.group, d) == is_remote_device(options.group, device)) ++place;
  }
  return options.cores[place * options.workers_per_device + worker];
}

DeviceOptions device_options(const ExecutorOptions& options, int64_t device) {
  return {device,
          options.workers_per_device,
          options.arena_bytes[device],
          options.num_signals,
          options.num_handles,
          options.window,
          options.scratch_bytes,
          options.file_bytes,
          options.file_directory,
          options.group.arena_files.empty() ? -1 : options.group.arena_files[device],
          options.group.spill_files.empty() ? -1 : options.group.spill_files[device],
          is_remote_device(options.group, device)};
}

}  // namespace tilewise::programs
