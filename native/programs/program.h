// The tile program: what the planner made, per device, as plain data.
//
// Owns tensors (tiles -> dependency handles), templates of instructions and the calls that bind them. Built once at
// plan time, checked by finish(), then frozen and walked by every run. Refuses anything finish() cannot show to be
// well formed and free of deadlock. Knows no thread, no Python and no graph.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "kernels/kernel.h"

namespace tilewise::programs {

/// constant + multiple * symbols[symbol]; symbol -1: constant alone.
struct Extent {
  int64_t constant = 0;
  int64_t symbol = -1;
  int64_t multiple = 0;

  int64_t at(const std::vector<int64_t>& symbols) const {
    return symbol < 0 ? constant : constant + multiple * symbols[symbol];
  }
};

struct Tensor {
  int64_t offset = 0;  // bytes into the device's arena
  Extent rows;
  int64_t cols = 0;
  int64_t stride = 0;  // elements between rows
  DType dtype = DType::kF32;
  int64_t tile_rows = 1;
  int64_t first_handle = 0;       // tile t has handle first_handle + t
  std::vector<int64_t> aliases;   // tensors that use the same bytes at other times

  int64_t row_bytes() const { return stride * size_of(dtype); }
  int64_t num_tiles(int64_t num_rows) const { return (num_rows + tile_rows - 1) / tile_rows; }
};

enum class Mode : int64_t { kWhole = 0, kRow = 1, kCol = 2, kRowPart = 3, kRowCols = 4 };

/// Bits: reads, writes. Peer operands and constants take none.
enum AccessBits : int64_t { kNoAccess = 0, kIn = 1, kOut = 2, kInOut = 3 };

struct Operand {
  int64_t slot = 0;  // which tensor of the call's binding
  Mode mode = Mode::kWhole;
  int64_t access = kNoAccess;
  int64_t peer = -1;  // device whose memory holds it; -1: this one
  int64_t div = 1;
  int64_t part = 0;   // kRowCols: the first column
  int64_t parts = 1;  // kRowCols: the number of columns
  bool null = false;
};

struct Wait {
  int64_t signal_base = 0;
  bool per_index = false;
  int64_t increment = 0;  // 0: the epoch that an earlier wait of this signal asked for
};

struct Notify {
  int64_t device = 0;
  int64_t signal_base = 0;
  bool per_index = false;
};

struct Instr {
  std::string kernel;  // "": an empty task
  kernels::KernelFn fn = nullptr;
  int64_t label = 0;
  Extent extent;
  int64_t step = 0;  // <= 0: one iteration over the whole extent
  std::vector<Operand> operands;
  std::vector<int64_t> ints;
  std::vector<double> floats;
  std::vector<Wait> waits;
  std::vector<Notify> notifies;
  int64_t priority = 0;

  /// Iterations over an extent. step <= 0 makes exactly one, also over an extent of 0.
  int64_t num_iterations(int64_t rows) const { return step <= 0 ? 1 : (rows + step - 1) / step; }
};

struct Template {
  std::string name;
  std::vector<Instr> instrs;
};

struct Call {
  int64_t template_id = 0;
  std::vector<int64_t> binding;  // tensor per slot, on this device and on peers
};

struct DeviceProgram {
  std::vector<Tensor> tensors;
  std::vector<Template> templates;
  std::vector<Call> calls;
};

/// What a device must offer to run a program.
struct Needs {
  int64_t arena_bytes = 0;
  int64_t num_handles = 0;
  int64_t num_signals = 0;
};

using KernelResolver = std::function<kernels::KernelFn(std::string_view)>;

class Program {
 public:
  explicit Program(int64_t num_devices);

  int64_t add_tensor(int64_t device, Tensor tensor);
  int64_t add_template(int64_t device, std::string name);
  void add_instr(int64_t device, int64_t template_id, Instr instr, const std::string& label);
  void add_call(int64_t device, Call call);

  /// Checks the whole program at the symbols' upper bounds, finds its kernels, shows that it cannot deadlock.
  void finish(std::vector<int64_t> symbols_max, const KernelResolver& resolve);

  bool finished() const { return finished_; }
  int64_t num_devices() const { return static_cast<int64_t>(devices_.size()); }
  const DeviceProgram& device(int64_t index) const { return devices_[index]; }
  const std::vector<std::string>& labels() const { return labels_; }
  const std::vector<int64_t>& symbols_max() const { return symbols_max_; }
  const Needs& needs(int64_t device) const { return needs_[device]; }
  /// Tasks of one run on a device with these symbols.
  int64_t num_tasks(int64_t device, const std::vector<int64_t>& symbols) const;
  /// Devices with an instruction that raises this signal of `device`.
  std::vector<int64_t> raisers(int64_t device, int64_t signal) const;

 private:
  DeviceProgram& open(int64_t device, const char* where);
  void check_tensor(int64_t device, int64_t id, const Tensor& tensor) const;
  void check_instr(int64_t device, const Instr& instr) const;
  void check_call(int64_t device, const Call& call);
  void mirror_aliases(DeviceProgram& program);
  void need_signals(int64_t device, int64_t base, bool per_index, int64_t iterations);

  std::vector<DeviceProgram> devices_;
  std::vector<std::string> labels_;
  std::vector<Needs> needs_;
  std::vector<int64_t> symbols_max_;
  bool finished_ = false;
};

/// Raises ArgumentError when the devices' submission orders and signals block each other (see deadlock.cc).
void check_no_deadlock(const Program& program);

}  // namespace tilewise::programs
