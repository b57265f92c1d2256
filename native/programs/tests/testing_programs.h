// For the tests of programs: fake kernels, helpers that build programs, and a sequential oracle.
//
// The oracle runs a program's devices in turns, each strictly in its submission order, on its own memory. It treats
// signals as plain counters and knows no handles, slots, windows or threads.
#pragma once
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "base/testing.h"
#include "programs/run/executor.h"

namespace tilewise::programs::testing {

inline uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b + 0x7F4A7C15u;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 32);
}

inline uint64_t* row(const kernels::TileView& view, int64_t r) {
  return static_cast<uint64_t*>(view.data) + r * view.stride;
}

inline void spin(int64_t rounds) {
  for (int64_t i = 0; i < rounds / 10; ++i) protocols::relax();
}

/// ints: number of outputs, seed, largest delay. Outputs come first; each becomes a hash of all that the task reads,
/// including its own old contents.
inline void hash_kernel(const kernels::KernelArgs& args) {
  const int64_t num_outputs = args.ints[0];
  uint64_t seen = mix(args.ints[1], args.row_begin);
  if (args.ints[2] > 0) spin(static_cast<int64_t>(seen % static_cast<uint64_t>(args.ints[2])));
  for (int64_t t = num_outputs; t < args.num_tiles; ++t) {
    for (int64_t r = 0; r < args.tiles[t].rows; ++r) {
      for (int64_t c = 0; c < args.tiles[t].cols; ++c) seen = mix(seen, row(args.tiles[t], r)[c]);
    }
  }
  for (int64_t t = 0; t < num_outputs; ++t) {
    for (int64_t r = 0; r < args.tiles[t].rows; ++r) {
      for (int64_t c = 0; c < args.tiles[t].cols; ++c) {
        uint64_t& value = row(args.tiles[t], r)[c];
        value = mix(seen, value + r + c);
      }
    }
  }
}

/// Adds 1 to every element of its first tile.
inline void increment_kernel(const kernels::KernelArgs& args) {
  for (int64_t r = 0; r < args.tiles[0].rows; ++r) {
    for (int64_t c = 0; c < args.tiles[0].cols; ++c) ++row(args.tiles[0], r)[c];
  }
}

inline void copy_pairs_kernel(const kernels::KernelArgs& args) {
  for (int64_t t = 0; t + 1 < args.num_tiles; t += 2) {
    for (int64_t r = 0; r < args.tiles[t].rows; ++r) {
      std::memcpy(row(args.tiles[t], r), row(args.tiles[t + 1], r), args.tiles[t].cols * sizeof(uint64_t));
    }
  }
}

inline void throwing_kernel(const kernels::KernelArgs& args) {
  if (args.row_begin == args.ints[0]) throw std::runtime_error("kernel gave up");
}

/// Sleeps for as many milliseconds as its first integer says, else five.
inline void slow_kernel(const kernels::KernelArgs& args) {
  std::this_thread::sleep_for(std::chrono::milliseconds(args.num_ints > 0 ? args.ints[0] : 5));
}

/// The arguments of a call of recording_kernel.
struct Recorded {
  std::vector<kernels::TileView> tiles;
  int64_t row_begin;
};
inline std::mutex recorded_mutex;
inline std::vector<Recorded> recorded;

inline void recording_kernel(const kernels::KernelArgs& args) {
  std::lock_guard guard(recorded_mutex);
  recorded.push_back({{args.tiles, args.tiles + args.num_tiles}, args.row_begin});
}

/// Integers of every task of note_kernel.
inline std::vector<std::vector<int64_t>> noted;

inline void note_kernel(const kernels::KernelArgs& args) {
  std::lock_guard guard(recorded_mutex);
  noted.emplace_back(args.ints, args.ints + args.num_ints);
}

/// These kernels take any operands and attributes.
inline bool fits_any(const kernels::KernelArgs&) { return true; }

/// A kernel that declares two operands and an integer.
inline bool fits_two(const kernels::KernelArgs& args) {
  return args.num_tiles == 2 && args.num_ints == 1 && args.ints[0] >= 0 && args.num_floats == 0;
}

inline const kernels::Entry* resolve(std::string_view name) {
  static constexpr kernels::Entry kKernels[] = {
      {"hash", hash_kernel, fits_any},           {"copy_pairs", copy_pairs_kernel, fits_any},
      {"increment", increment_kernel, fits_any}, {"throwing", throwing_kernel, fits_any},
      {"slow", slow_kernel, fits_any},           {"recording", recording_kernel, fits_any},
      {"note", note_kernel, fits_any},           {"two", note_kernel, fits_two},
      {"moves", throwing_kernel, fits_any},  // which is never called
  };
  if (moves_of(name) != Moves::kNothing) name = "moves";
  for (const kernels::Entry& kernel : kKernels)
    if (kernel.name == name) return &kernel;
  return nullptr;
}

/// Adds devices with a class each of the same number; their device group 0 has all of them.
inline void add_devices(Program& program, int64_t count, int64_t memory_bytes = kNoFile) {
  std::vector<int64_t> all(count);
  std::iota(all.begin(), all.end(), 0);
  for (int64_t d = 0; d < count; ++d) program.add_device({program.add_class(memory_bytes), {}, {all}});
}

inline std::shared_ptr<Program> program_of(int64_t num_devices, int64_t memory_bytes = kNoFile) {
  auto program = std::make_shared<Program>();
  add_devices(*program, num_devices, memory_bytes);
  return program;
}

inline Tensor tensor(int64_t offset, const Number& rows, int64_t cols, int64_t tile_rows, int64_t first_handle) {
  return {offset, rows, cols, cols, DType::kF64, tile_rows, first_handle, {}};
}

inline Operand whole(int64_t slot, int64_t access) { return {slot, Mode::kWhole, access}; }
inline Operand by_row(int64_t slot, int64_t access) { return {slot, Mode::kRow, access}; }
inline Operand peer_row(int64_t slot, int64_t peer, int64_t role = kNoAccess) {
  return {slot, Mode::kRow, kNoAccess, 0, peer, 1, 0, 1, false, role};
}

inline Instr instr(const std::string& kernel, int64_t rows, const Number& step, std::vector<Operand> operands,
                   std::vector<Number> ints = {}, std::vector<Wait> waits = {}, std::vector<Notify> notifies = {}) {
  Instr made;
  made.kernel = kernel;
  made.extent = rows;
  made.step = step;
  made.operands = std::move(operands);
  made.ints = std::move(ints);
  made.waits = std::move(waits);
  made.notifies = std::move(notifies);
  return made;
}

/// The options of an executor that fits the program.
inline ExecutorOptions options_of(const Program& program, int64_t workers = 1, int64_t window = 512,
                                  double deadline_s = 30) {
  ExecutorOptions options{.num_devices = program.num_devices(),
                          .workers_per_device = workers,
                          .arena_bytes = {},
                          .window = window,
                          .deadline_s = deadline_s};
  for (int64_t d = 0; d < program.num_devices(); ++d) {
    options.arena_bytes.push_back(program.needs(d).arena_bytes);
    options.num_signals = std::max(options.num_signals, program.needs(d).num_signals);
    options.num_handles = std::max(options.num_handles, program.needs(d).num_handles);
  }
  return options;
}

inline std::unique_ptr<Executor> executor_for(const Program& program, int64_t workers = 1, int64_t window = 512,
                                              double deadline_s = 30) {
  return std::make_unique<Executor>(options_of(program, workers, window, deadline_s));
}

inline uint64_t* words(Executor& executor, int64_t device) {
  return reinterpret_cast<uint64_t*>(executor.memory(device, 0, 0));
}

/// The message of the Error that `body` throws; "" if it throws none.
template <class Error, class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class Oracle {
 public:
  explicit Oracle(const Program& program, std::vector<int64_t> symbols = {}, const std::string& name = "")
      : program_(program), symbols_(std::move(symbols)), list_(program.find_list(name)) {
    for (int64_t d = 0; d < program.num_devices(); ++d) {
      memory_.emplace_back(program.needs(d).arena_bytes);
      arenas_.push_back(memory_.back().data());
      values_.emplace_back(program.needs(d).num_signals);
    }
  }

  /// Simulates one run; signals and memory carry over to the next.
  void run() {
    std::vector<std::vector<uint64_t>> expected = values_;
    std::vector<size_t> call(memory_.size()), at(memory_.size());
    std::vector<int64_t> index(memory_.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t d = 0; d < memory_.size(); ++d) {
        moved |= step(static_cast<int64_t>(d), call[d], at[d], index[d], expected[d]);
      }
    }
  }
  std::vector<std::byte>& memory(int64_t device) { return memory_[device]; }

 private:
  bool step(int64_t device, size_t& call, size_t& at, int64_t& index, std::vector<uint64_t>& expected) {
    const std::vector<Call>& calls = program_.list_of(device, list_).calls;
    if (call >= calls.size()) return false;
    const std::vector<BoundInstr>& instrs = program_.bound(device)[calls[call].template_id].instrs;
    if (at >= instrs.size()) {
      ++call;
      at = 0;
      return true;
    }
    const BoundInstr& now = instrs[at];
    const Values values{symbols_.data(), nullptr, calls[call].numbers.data()};
    const int64_t extent = now.source->extent.at(values);
    const int64_t rows = now.source->step_at(values);
    if (index >= num_iterations(extent, rows)) {
      ++at;
      index = 0;
      return true;
    }
    const int64_t iteration = iteration_at(index, now.first, num_iterations(extent, rows));
    for (const BoundWait& wait : now.waits) {
      const int64_t s = wait.signal.at(values, iteration);
      if (values_[device][s] < expected[s] + wait.increment.at(values)) return false;
    }
    for (const BoundWait& wait : now.waits) expected[wait.signal.at(values, iteration)] += wait.increment.at(values);
    execute(device, calls[call], now, values, {iteration, extent, rows});
    for (const BoundNotify& n : now.notifies) ++values_[n.device][n.signal.at(values, iteration)];
    ++index;
    return true;
  }

  struct Loop {
    int64_t index, extent, step;
  };

  void execute(int64_t device, const Call& call, const BoundInstr& now, const Values& values, const Loop& loop) {
    if (now.fn == nullptr) return;
    Task task;
    std::vector<tasks::Access> accesses;
    std::vector<int64_t> ints;
    for (const Number& n : now.source->ints) ints.push_back(n.on(program_.device(device).numbers).at(values));
    expand({&program_, device, &symbols_, &arenas_}, {call, now, ints.data(), loop.index, loop.extent, loop.step}, task,
           accesses);
    now.fn({task.views(),
            task.num_views(),
            ints.data(),
            static_cast<int64_t>(ints.size()),
            now.source->floats.data(),
            static_cast<int64_t>(now.source->floats.size()),
            task.row_begin,
            {nullptr, 0}});
  }

  const Program& program_;
  std::vector<int64_t> symbols_;
  int64_t list_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte*> arenas_;
  std::vector<std::vector<uint64_t>> values_;
};

/// Whether every byte of every device's arena equals the oracle's.
inline bool same_memory(Executor& executor, Oracle& oracle, int64_t num_devices) {
  for (int64_t d = 0; d < num_devices; ++d) {
    if (std::memcmp(executor.memory(d, 0, 0), oracle.memory(d).data(), oracle.memory(d).size()) != 0) return false;
  }
  return true;
}

}  // namespace tilewise::programs::testing
