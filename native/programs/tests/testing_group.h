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

/// How the tasks of puts() write: whole rows or some columns by a copy; columns of contiguous rows by a copy; a kernel
/// that also reads what it writes; one that also reads a third device's tile.
enum class Put : uint8_t { kRows, kColumns, kIntoColumns, kInOut, kFromPeer };
inline constexpr Put kPuts[] = {Put::kRows, Put::kColumns, Put::kIntoColumns, Put::kInOut, Put::kFromPeer};

/// `num_calls` times: every device writes 12 rows in the next device's memory and posts to that device, which reads
/// them there; or to the one after, which reads them as a peer's. The reader acknowledges.
inline std::shared_ptr<Program> puts(int64_t devices, Put put, bool posts_to_third, int64_t num_calls,
                                     int64_t seed = 0) {
  auto program = program_of(devices);
  for (int64_t d = 0; d < devices; ++d) {
    const int64_t next = (d + 1) % devices;
    const int64_t before = (d + devices - 1) % devices;
    const int64_t reader = posts_to_third ? (d + 2) % devices : next;
    const int64_t writer = posts_to_third ? (d + devices - 2) % devices : before;
    program->add_tensor(d, tensor(0, 12, 6, 3, 0));
    program->add_tensor(d, tensor(1024, 12, 6, 3, 4));  // written by the device before
    program->add_tensor(d, tensor(2048, 12, 6, 3, 8));
    program->add_tensor(d, tensor(3072, 12, 4, 3, 12));
    const int64_t plan = program->add_template(d, "call");
    program->add_instr(d, plan, instr("hash", 12, 3, {by_row(0, kInOut), by_row(3, kInOut)}, {2, d + seed, 0}), "make");
    const auto columns = [&](Operand operand) {
      operand.mode = Mode::kRowCols, operand.part = 1, operand.parts = 4;
      return operand;
    };
    const bool is_hash = put == Put::kInOut || put == Put::kFromPeer;
    std::vector<Operand> operands = {peer_row(1, next, is_hash ? kInOut : kOut), by_row(0, kIn)};
    if (put == Put::kColumns) operands = {columns(operands[0]), columns(operands[1])};
    if (put == Put::kIntoColumns) operands = {columns(operands[0]), by_row(3, kIn)};
    if (put == Put::kFromPeer) operands.push_back(peer_row(4, before));
    Instr made = instr(is_hash ? "hash" : "copy_pairs", 12, 3, operands, {}, {}, {{0, reader, 0, true}});
    if (is_hash) made.ints = {1, 7, 0};
    program->add_tensor(d, tensor(4096, 12, 6, 3, 16));  // not written
    program->add_instr(d, plan, made, "put");
    program->add_instr(
        d, plan,
        instr("hash", 12, 3, {by_row(2, kInOut), posts_to_third ? peer_row(1, (writer + 1) % devices) : by_row(1, kIn)},
              {1, d, 0}, {{0, true, 1}}, {{0, writer, 12, true}}),
        "look");
    program->add_instr(d, plan, instr("", 12, 3, {by_row(0, kIn)}, {}, {{12, true, 1}}), "acknowledged");
    for (int64_t c = 0; c < num_calls; ++c) program->add_call(d, {plan, {0, 1, 2, 3, 4}, {}});
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
      executor.serve({program});
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
