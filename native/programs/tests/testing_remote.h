// A program on several hosts, for tests: every process is a thread of the test with its own executor, and communicates
// with other hosts through an MPI of threads (comm/testing_mpi.h).
#pragma once
#include <thread>

#include "comm/testing_mpi.h"
#include "programs/tests/testing_group.h"

namespace tilewise::programs::testing {

class RemoteGroup {
 public:
  /// hosts: per process. Devices are distributed over processes in blocks. faults: for the first run.
  RemoteGroup(const std::shared_ptr<const Program>& program, std::vector<int64_t> hosts, int64_t workers = 1,
              int64_t window = 512, uint64_t seed = 0, const std::vector<PlannedInjection>& faults = {})
      : RemoteGroup(program, std::move(hosts), options_of(*program, workers, window), seed, faults) {}

  RemoteGroup(const std::shared_ptr<const Program>& program, std::vector<int64_t> hosts, const ExecutorOptions& options,
              uint64_t seed = 0, const std::vector<PlannedInjection>& faults = {})
      : world(static_cast<int32_t>(hosts.size()), seed), hosts_(std::move(hosts)) {
    const auto num_processes = std::ssize(hosts_);
    std::vector<int64_t> processes;
    std::vector<int> arenas;
    std::vector<int> spills;
    for (int64_t d = 0; d < options.num_devices; ++d) {
      processes.push_back(d * num_processes / options.num_devices);
      files_.push_back(sealed_file(options.arena_bytes[d]));
      arenas.push_back(files_.back());
      if (options.file_bytes == 0) continue;
      files_.push_back(memory::SpillFile::make(options.file_directory, options.file_bytes));
      spills.push_back(files_.back());
    }
    std::vector<int> of_hosts(num_processes, -1);
    for (int64_t p = 0; p < num_processes; ++p) {
      if (of_hosts[hosts_[p]] >= 0) continue;
      files_.push_back(sealed_file(comm::Peers::bytes(num_processes)));
      of_hosts[hosts_[p]] = files_.back();
    }
    for (int64_t p = 0; p < num_processes; ++p) {
      ExecutorOptions of = options;
      of.group.process = p;
      of.group.processes = processes;
      of.group.group_file = of_hosts[hosts_[p]];
      of.group.peer_files.assign(num_processes, -1);
      of.group.hosts = hosts_;
      of.group.connection = std::make_shared<comm::Connection>(world.rank(static_cast<int32_t>(p)));
      of.group.number = 5;
      for (int64_t d = 0; d < options.num_devices; ++d) {
        const bool is_local = hosts_[processes[d]] == hosts_[p];
        of.group.arena_files.push_back(is_local ? arenas[d] : -1);
        if (options.file_bytes > 0) of.group.spill_files.push_back(is_local ? spills[d] : -1);
      }
      connections.push_back(of.group.connection);
      executors_.push_back(std::make_unique<Executor>(of));
      owners_.resize(options.num_devices);
      for (int64_t d = 0; d < options.num_devices; ++d) {
        if (processes[d] == p) owners_[d] = executors_.back().get();
      }
    }
    for (const PlannedInjection& fault : faults)
      owner(fault.device).inject(fault.kind, fault.device, fault.label, fault.index);
    failures_.resize(num_processes);
    for (int64_t p = 1; p < num_processes; ++p) {
      threads_.emplace_back([this, p, program] {
        try {
          executors_[p]->serve({program});
        } catch (const std::exception& error) {
          failures_[p] = error.what();
        }
      });
    }
  }

  ~RemoteGroup() {
    end();
    // Each closes while the others still answer.
    std::vector<std::thread> closing;
    for (auto& executor : executors_) closing.emplace_back([&executor] { executor.reset(); });
    for (std::thread& thread : closing) thread.join();
    for (int file : files_) close(file);
  }
  RemoteGroup(const RemoteGroup&) = delete;
  RemoteGroup& operator=(const RemoteGroup&) = delete;

  Executor& leader() { return *executors_[0]; }
  Executor& owner(int64_t device) { return *owners_[device]; }
  bool is_remote(int64_t device) const {
    return hosts_[device * std::ssize(hosts_) / std::ssize(owners_)] != hosts_[0];
  }
  /// Makes all serve() return; the error message of each.
  const std::vector<std::string>& end() {
    if (!threads_.empty()) leader().call_peers();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return failures_;
  }

  comm::testing::FakeWorld world;
  std::vector<std::shared_ptr<comm::Connection>> connections;

 private:
  std::vector<int64_t> hosts_;
  std::vector<int> files_;
  std::vector<std::unique_ptr<Executor>> executors_;
  std::vector<Executor*> owners_;  // per device
  std::vector<std::thread> threads_;
  std::vector<std::string> failures_;
};

/// Whether every device's memory equals the oracle's, read by the leader and, for other hosts, also by its owner.
/// Memory of the leader's host is read only at the leader's addresses: processes there map one file at different
/// addresses, which ThreadSanitizer cannot follow.
inline bool same_memory(RemoteGroup& group, Oracle& oracle, int64_t num_devices) {
  for (int64_t d = 0; d < num_devices; ++d) {
    const auto& expected = oracle.memory(d);
    const Executor& reader = group.is_remote(d) ? group.owner(d) : group.leader();
    if (std::memcmp(reader.memory(d, 0, 0), expected.data(), expected.size()) != 0) return false;
    if (!group.is_remote(d)) continue;
    std::vector<std::byte> read(expected.size());
    group.leader().move(memory::SpillFile::Way::kRead, d, 0, read.data(), std::ssize(read));
    if (std::memcmp(read.data(), expected.data(), expected.size()) != 0) return false;
  }
  return true;
}

}  // namespace tilewise::programs::testing
