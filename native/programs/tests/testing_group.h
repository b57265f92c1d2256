// A program on several processes, for tests: the test's process is the leader; the others are forked from it and serve.
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "programs/tests/testing_programs.h"

namespace tilewise::programs::testing {

/// A sealed memory file of `bytes` bytes for several processes.
inline int sealed_file(int64_t bytes) {
  const int file = memfd_create("tilewise-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT(file >= 0 && ftruncate(file, (bytes + 4095) / 4096 * 4096) == 0);
  EXPECT(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  return file;
}

inline int end_of(pid_t process) { return static_cast<int>(syscall(SYS_pidfd_open, process, 0)); }

/// `epochs` times: every device posts four rows to the next, which reads them in place and acknowledges.
inline std::shared_ptr<Program> ring(int64_t devices, int64_t epochs, const std::string& kernel = "increment",
                                     const std::vector<Number>& ints = {}) {
  auto program = program_of(devices);
  for (int64_t d = 0; d < devices; ++d) {
    const int64_t next = (d + 1) % devices;
    const int64_t before = (d + devices - 1) % devices;
    program->add_tensor(d, tensor(0, 4, 1, 1, 0));
    program->add_tensor(d, tensor(256, 4, 1, 1, 4));
    const int64_t plan = program->add_template(d, "epoch");
    program->add_instr(d, plan, instr(kernel, 4, 1, {by_row(0, kInOut)}, ints, {}, {{0, next, 0, true}}), "show");
    program->add_instr(d, plan,
                       instr("hash", 4, 1, {by_row(1, kInOut), peer_row(0, before)}, {1, d, 0}, {{0, true, 1}},
                             {{0, before, 4, true}}),
                       "look");
    program->add_instr(d, plan, instr("", 4, 1, {by_row(0, kIn)}, {}, {{4, true, 1}}), "acknowledged");
    for (int64_t e = 0; e < epochs; ++e) program->add_call(d, {plan, {0, 1}, {}});
  }
  program->finish({}, resolve);
  return program;
}

/// Distributes devices over processes in blocks. The children end with this object.
class ForkedGroup {
 public:
  ForkedGroup(const std::shared_ptr<const Program>& program, int64_t num_processes, int64_t workers = 1,
              int64_t window = 512)
      : ForkedGroup(program, num_processes, options_of(*program, workers, window)) {}

  ForkedGroup(const std::shared_ptr<const Program>& program, int64_t num_processes, ExecutorOptions options) {
    GroupOptions& group = options.group;
    for (int64_t d = 0; d < options.num_devices; ++d) {
      group.processes.push_back(d * num_processes / options.num_devices);
      files_.push_back(sealed_file(options.arena_bytes[d]));
    }
    group.arena_files = files_;
    for (int64_t d = 0; options.file_bytes > 0 && d < options.num_devices; ++d) {
      group.spill_files.push_back(memory::SpillFile::make(options.file_directory, options.file_bytes));
      files_.push_back(group.spill_files.back());
    }
    files_.push_back(sealed_file(comm::Peers::bytes(num_processes)));
    group.group_file = files_.back();
    const int leader = end_of(getpid());
    files_.push_back(leader);
    group.peer_files.assign(num_processes, -1);
    for (int64_t p = 1; p < num_processes; ++p) {
      const pid_t child = fork();
      if (child == 0) serve(options, p, leader, program);
      children_.push_back(child);
      files_.push_back(end_of(child));
      group.peer_files[p] = files_.back();
    }
    leader_ = std::make_unique<Executor>(options);
  }

  ~ForkedGroup() {
    for (pid_t child : children_) kill(child, SIGKILL);
    for (pid_t child : children_) waitpid(child, nullptr, 0);
    leader_.reset();
    for (int file : files_) close(file);
  }
  ForkedGroup(const ForkedGroup&) = delete;
  ForkedGroup& operator=(const ForkedGroup&) = delete;

  Executor& leader() { return *leader_; }
  pid_t child(int64_t process) const { return children_[process - 1]; }
  /// The children's exit codes, after call_peers() or an end of their own.
  std::vector<int> end_children() {
    std::vector<int> statuses;
    for (pid_t child : children_) {
      int status = 0;
      waitpid(child, &status, 0);
      statuses.push_back(status);
    }
    children_.clear();
    return statuses;
  }

  static constexpr int kCalled = 0, kLost = 3, kFailed = 4;

 private:
  [[noreturn]] static void serve(ExecutorOptions options, int64_t process, int leader,
                                 const std::shared_ptr<const Program>& program) {
    int status = kFailed;
    try {
      options.group.process = process;
      options.group.peer_files[0] = leader;
      Executor executor(options);
      executor.serve(program);
      status = kCalled;
    } catch (const PeerLost&) {
      status = kLost;
    } catch (...) {
      status = kFailed;
    }
    _exit(status);
  }

  std::vector<int> files_;
  std::vector<pid_t> children_;
  std::unique_ptr<Executor> leader_;
};

}  // namespace tilewise::programs::testing
