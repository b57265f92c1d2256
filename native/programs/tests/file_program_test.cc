// Programs with tensors in a device's file: the order of transfers and kernels, rejections, a disk that fails.
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "programs/tests/testing_group.h"

using namespace tilewise;
using namespace tilewise::programs;
using namespace tilewise::programs::testing;

namespace {

constexpr int64_t kRows = 12;
constexpr int64_t kArena = 1 << 20;
constexpr int64_t kFileBegin = kArena;  // a whole number of pages

/// Fetches a tensor of the file to one of two places in memory in turns, increments it there, and stores it again.
std::shared_ptr<Program> counting(int64_t num_devices, int64_t cols, int64_t num_calls) {
  auto program = program_of(num_devices, kFileBegin);
  for (int64_t d = 0; d < num_devices; ++d) {
    program->add_tensor(d, tensor(0, kRows, cols, 1, 0));
    program->add_tensor(d, tensor(kRows * cols * 8, kRows, cols, 1, kRows));
    program->add_tensor(d, tensor(kFileBegin, kRows, cols, 1, 2 * kRows));
    program->add_tensor(d, tensor(kFileBegin + kRows * cols * 8, kRows, cols, 1, 3 * kRows));
    const int64_t plan = program->add_template(d, "count");
    program->add_instr(d, plan, instr("fetch_f64", kRows, 1, {by_row(0, kOut), by_row(1, kIn)}), "fetch");
    program->add_instr(d, plan, instr("increment", kRows, 1, {by_row(0, kInOut)}), "count");
    program->add_instr(d, plan, instr("store_f64", kRows, 1, {by_row(1, kOut), by_row(0, kIn)}), "store");
    for (int64_t c = 0; c < num_calls; ++c) program->add_call(d, {plan, {c % 2, 2 + c / 2 % 2}, {}});
  }
  program->finish({}, resolve);
  return program;
}

ExecutorOptions options_for(const Program& program, int64_t cols, int64_t workers) {
  ExecutorOptions options{.num_devices = program.num_devices(), .workers_per_device = workers, .arena_bytes = {}};
  options.arena_bytes.assign(program.num_devices(), kArena);
  options.num_signals = program.needs(0).num_signals;
  options.num_handles = program.needs(0).num_handles;
  options.file_bytes = 2 * kRows * cols * 8;
  options.file_directory = std::string(".");
  return options;
}

constexpr auto kRead = memory::SpillFile::Way::kRead;
constexpr auto kWrite = memory::SpillFile::Way::kWrite;

/// All elements of a device's file.
std::vector<uint64_t> counts_of(const Executor& executor, int64_t device, int64_t cols) {
  std::vector<uint64_t> counts(2 * kRows * cols);
  executor.arena(device)->move(kRead, kFileBegin, reinterpret_cast<std::byte*>(counts.data()), std::ssize(counts) * 8);
  return counts;
}

/// Whether every element equals `expected`.
bool all_counted(const Executor& executor, int64_t device, int64_t cols, uint64_t expected) {
  const std::vector<uint64_t> counts = counts_of(executor, device, cols);
  return std::all_of(counts.begin(), counts.end(), [&](uint64_t count) { return count == expected; });
}

std::string refused(const std::vector<Operand>& operands, const std::string& kernel, int64_t offset) {
  auto program = program_of(1, kFileBegin);
  program->add_tensor(0, tensor(0, kRows, 8, 1, 0));
  program->add_tensor(0, tensor(offset, kRows, 8, 1, kRows));
  const int64_t plan = program->add_template(0, "odd");
  program->add_instr(0, plan, instr(kernel, kRows, 1, operands), "odd");
  program->add_call(0, {plan, {0, 1}, {}});
  return message_of<ArgumentError>([&] { program->finish({}, resolve); });
}

}  // namespace

CASE("tiles of a file are incremented in memory, whole pages or parts of them, on one device or two") {
  for (const int64_t cols : {int64_t{512}, int64_t{37}, int64_t{1000}}) {
    for (const int64_t num_devices : {1, 2}) {
      auto program = counting(num_devices, cols, 40);
      Executor executor(options_for(*program, cols, 2));
      for (uint64_t run = 1; run <= 3; ++run) {
        executor.run(program, {});
        for (int64_t d = 0; d < num_devices; ++d) EXPECT(all_counted(executor, d, cols, 20 * run));
      }
      const Traffic traffic = executor.stats().files;
      EXPECT_EQ(traffic.bytes_read, 3 * num_devices * 40 * kRows * cols * 8);
      EXPECT_EQ(traffic.bytes_written, traffic.bytes_read);
      EXPECT(traffic.busy_ns > 0);
    }
  }
}

CASE("the leader reads and writes the files of other processes' devices") {
  auto program = counting(3, 37, 40);
  ForkedGroup group(program, 2, options_for(*program, 37, 1));
  for (uint64_t run = 1; run <= 3; ++run) {
    group.leader().run(program, {});
    for (int64_t d = 0; d < 3; ++d) EXPECT(all_counted(group.leader(), d, 37, 20 * run));
  }
  std::vector<uint64_t> counts(2 * kRows * 37, 1000);
  group.leader().arena(2)->move(kWrite, kFileBegin, reinterpret_cast<std::byte*>(counts.data()),
                                std::ssize(counts) * 8);
  group.leader().run(program, {});
  EXPECT(all_counted(group.leader(), 2, 37, 1020));
}

CASE("the next run fetches what the host wrote into a file") {
  auto program = counting(1, 512, 2);
  Executor executor(options_for(*program, 512, 1));
  for (uint64_t start : {7u, 1000u}) {
    std::vector<uint64_t> counts(kRows * 512, start);
    executor.arena(0)->move(kWrite, kFileBegin, reinterpret_cast<std::byte*>(counts.data()), kRows * 512 * 8);
    executor.run(program, {});
    counts = counts_of(executor, 0, 512);
    EXPECT_EQ(counts[0], start + 2);
    EXPECT_EQ(counts[kRows * 512 - 1], start + 2);
  }
}

CASE("a failed disk transfer is the error of its task; the next run is right") {
  auto program = counting(1, 512, 2);
  Executor executor(options_for(*program, 512, 2));
  const int file = executor.arena(0)->file()->descriptor();
  const int64_t bytes = executor.arena(0)->file()->bytes();
  EXPECT_EQ(ftruncate(file, 0), 0);
  std::string message;
  try {
    executor.run(program, {});
  } catch (const TaskFailed& error) {
    message = error.what();
    EXPECT_EQ(error.op, "fetch");
    EXPECT_EQ(error.worker, -1);
  }
  EXPECT(contains(message, "[memory.SpillFile]") && contains(message, "kernel 'fetch_f64' in 'fetch'["));
  EXPECT_EQ(executor.stats().files.bytes_read, 0);  // failed transfers are not counted
  EXPECT_EQ(executor.stats().files.bytes_written, 0);
  EXPECT_EQ(ftruncate(file, bytes), 0);
  executor.run(program, {});
  EXPECT_EQ(counts_of(executor, 0, 512)[0], 2u);
}

CASE("a disk failure while the host reads or writes is an error, not the end of the process") {
  auto program = counting(1, 512, 2);
  Executor executor(options_for(*program, 512, 1));
  const int file = executor.arena(0)->file()->descriptor();
  EXPECT_EQ(ftruncate(file, 0), 0);
  EXPECT(contains(message_of<ResourceError>([&] { counts_of(executor, 0, 512); }), "[memory.SpillFile]"));
  std::byte some[8]{};
  for (const int64_t offset : {kFileBegin - 8, kFileBegin + 2 * kRows * 512 * 8 - 7}) {
    EXPECT(
        contains(message_of<ArgumentError>([&] { executor.arena(0)->move(kRead, offset, some, 8); }), "device's file"));
  }
  EXPECT(contains(message_of<ArgumentError>([&] { executor.memory(0, kFileBegin, 8); }), "inside the device's arena"));
}

CASE("a planted failure of a transfer fails the tasks that wait for it, and moves nothing") {
  auto program = counting(1, 512, 4);
  Executor executor(options_for(*program, 512, 2));
  executor.inject(Injected::kThrow, 0, "fetch", 3);
  EXPECT(contains(message_of<TaskFailed>([&] { executor.run(program, {}); }), "injected failure"));
}

CASE("rejected: tensors that differ in their elements or rows, or are shorter than what is moved") {
  for (const DType dtype : {DType::kF64, DType::kBF16}) {
    for (const int64_t cols : {8, 16}) {
      auto program = program_of(1, kFileBegin);
      program->add_tensor(0, tensor(0, kRows, 8, 1, 0));
      Tensor other = tensor(kFileBegin, kRows, cols, 1, kRows);
      other.dtype = dtype;
      program->add_tensor(0, other);
      const int64_t plan = program->add_template(0, "odd");
      program->add_instr(0, plan, instr("store_f64", kRows, 1, {by_row(1, kOut), by_row(0, kIn)}), "odd");
      program->add_call(0, {plan, {0, 1}, {}});
      const bool is_alike = dtype == DType::kF64 && cols == 8;
      if (is_alike) {
        program->finish({}, resolve);
      } else {
        EXPECT(contains(message_of<ArgumentError>([&] { program->finish({}, resolve); }), "of the same shape"));
      }
    }
  }
}

CASE("rejected: kernels on a file, transfers within memory, tensors across the boundary, executors without a file") {
  EXPECT(contains(refused({by_row(1, kInOut)}, "increment", kFileBegin), "no other kernel"));
  EXPECT(contains(refused({by_row(1, kOut), by_row(0, kIn)}, "fetch_f64", kFileBegin), "fetch reads a device's file"));
  EXPECT(contains(refused({by_row(0, kOut), by_row(0, kIn)}, "store_f64", 4096), "in memory"));
  EXPECT(contains(refused({by_row(0, kOut)}, "fetch_f64", kFileBegin), "must move whole rows"));
  EXPECT(contains(refused({by_row(0, kOut), whole(1, kIn)}, "fetch_f64", kFileBegin - 64), "in memory or in the file"));
  Operand none = by_row(1'000'000, kIn);
  none.null = true;
  EXPECT(contains(refused({by_row(0, kOut), none}, "fetch_f64", kFileBegin), "must move whole rows"));
  auto program = counting(1, 8, 1);
  ExecutorOptions options = options_for(*program, 8, 1);
  options.file_bytes = 0;
  Executor without(options);
  EXPECT(contains(message_of<ArgumentError>([&] { without.run(program, {}); }), "files"));
  options = options_for(*program, 8, 1);
  options.arena_bytes = {kArena + 4096};
  Executor elsewhere(options);
  EXPECT(contains(message_of<ArgumentError>([&] { elsewhere.run(program, {}); }), "files"));
}

TILEWISE_TEST_MAIN
