// The tile program as plain data, as the planner made it.
//
// A program consists of classes of devices. A class has tensors (tiles -> dependency handles), templates of
// instructions, and named lists of calls; the calls of all its lists bind the same templates to tensors. A device is a
// class, its numbers and its device groups (ordered lists of devices). An instruction names a peer by a device group
// and a member of it; a member that is the device itself is not a peer. A run executes one list on every device.
//
// Tensors from byte memory_bytes of their class on are in the device's file. Instructions of the kernels `fetch` and
// `store` move tiles between it and memory; no others access it.
//
// It is built once at plan time, checked by finish(), then frozen. bound() is a device's part with its numbers and
// peers inserted (bound.h), which every run uses. finish() rejects every program that it cannot prove to be well formed
// and free of deadlock. It does not depend on Python, on graphs, or on threads other than those that call bound().
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "kernels/kernel.h"
#include "programs/number.h"
#include "tilewise/tile_kernel.h"

namespace tilewise::programs {

struct BoundTemplate;
using Bound = std::vector<BoundTemplate>;  // of one device, by template id

struct Tensor {
  int64_t offset = 0;  // bytes into the device's arena; from DeviceClass::memory_bytes on, into its file
  Number rows = 0;  // may use symbols
  int64_t cols = 0;
  int64_t stride = 0;  // elements between rows
  DType dtype = DType::kF32;
  Number tile_rows = 1;  // may use symbols; 0 counts as 1
  int64_t first_handle = 0;  // tile (r, c) has handle first_handle + r * tiles_across() + c
  std::vector<int64_t> aliases;  // tensors that use the same bytes at other times
  int64_t tile_cols = 0;  // 0: all

  int64_t row_bytes() const { return stride * size_of(dtype); }
  int64_t rows_per_tile(const Values& values) const { return std::max<int64_t>(tile_rows.at(values), 1); }
  int64_t tiles_across() const { return tile_cols > 0 ? std::max<int64_t>((cols + tile_cols - 1) / tile_cols, 1) : 1; }
};

/// The part of a tensor that a task views. kPanelCols: columns of all panels of a packed weight
/// (native/kernels/microkernel.h).
enum class Mode : int64_t { kWhole = 0, kRow = 1, kCol = 2, kRowPart = 3, kRowCols = 4, kRows = 5, kPanelCols = 6 };

/// Bits: reads, writes. Constants need no access. If a tensor is a peer's, the access becomes kNoAccess, because
/// signals order uses of peers' tiles.
enum AccessBits : int64_t { kNoAccess = 0, kIn = 1, kOut = 2, kInOut = 3 };

/// Its numbers may use symbols, the device's and the call's values; `member` only the device's.
struct Operand {
  int64_t slot = 0;  // index into the call's binding
  Mode mode = Mode::kWhole;
  int64_t access = kNoAccess;
  int64_t group = -1;  // -1: this device's memory
  Number member = 0;
  Number div = 1;
  Number part = 0;  // kRowCols: the first column; kRows: the first row
  Number parts = 1;  // kRowCols: the number of columns; kRows: the number of rows
  bool null = false;
  int64_t role = kNoAccess;  // what the kernel does: kOut writes all of it; kNoAccess: as access says, or reads
  Number offset = 0;  // kRowPart: number of rows to skip
};

/// It has no effect on the member itself.
struct Wait {
  Number signal_base = 0;  // may use the device's or the call's values
  bool per_index = false;
  Number increment = 0;  // may use the call's values; 0: the epoch of an earlier wait for this signal
  int64_t group = -1;  // with member: the device that posts it; -1: any
  Number member = 0;
  int64_t slot = -1;  // the tensor that it is about; -1: none
  Number use = {0, 1, Source::kPosition};  // which use of that tensor: a call's value, or the call's position
};

/// It has no effect if the member is the device itself.
struct Notify {
  int64_t group = -1;
  Number member = 0;
  Number signal_base = 0;
  bool per_index = false;
  int64_t slot = -1;
  Number use = {0, 1, Source::kPosition};
};

/// Whether the tasks of an instruction move tiles between memory and file: operand 0 from operand 1.
enum class Moves : uint8_t { kNothing, kFromFile, kToFile };
Moves moves_of(std::string_view kernel);

/// Which workers run tasks, and how urgently. Task i of n goes to workers[i * size / n].
struct TaskHints {
  std::vector<int64_t> workers = {};  // of the device; empty: no choice
  bool is_preference = false;  // a worker without work may take the task instead
  std::optional<int64_t> priority = {};
};

struct Instr {
  std::string kernel;  // "": an empty task
  kernels::KernelFn fn = nullptr;
  tilewise_tile_kernel user_fn = nullptr;  // instead of fn
  int64_t label = 0;
  Number extent = 0;  // may use symbols or the call's values
  Number step = 0;  // the same; a constant <= 0: one iteration over the whole extent
  std::vector<Operand> operands;
  std::vector<Number> ints;  // may use any values
  std::vector<double> floats;
  std::vector<Wait> waits;
  std::vector<Notify> notifies;
  int64_t priority = 0;
  Number first = 0;  // the iteration that is submitted first, modulo their number; may use the device's values
  int64_t first_int = -1;  // place of its ints among a call's late ints; -1: none depends on a symbol or a call
  TaskHints hints = {};  // before those of a call, and before `priority`

  bool is_single() const { return step.is_constant() && step.constant <= 0; }
  /// Rows of an iteration; 0: all.
  int64_t step_at(const Values& values) const { return is_single() ? 0 : std::max<int64_t>(step.at(values), 1); }
};

/// Iterations over an extent. A step of 0 makes exactly one, also over an extent of 0.
inline int64_t num_iterations(int64_t rows, int64_t step) {
  return step <= 0 ? 1 : rows / step + (rows % step > 0 ? 1 : 0);
}

/// The iteration that is number `position` in the order of submission: first, first + 1, ..., count - 1, 0, ...,
/// first - 1, where `first` is taken modulo `count`.
inline int64_t iteration_at(int64_t position, int64_t first, int64_t count) {
  if (first == 0) return position;
  const int64_t iteration = (first % count + position) % count;
  return iteration < 0 ? iteration + count : iteration;
}

struct Template {
  std::string name;
  std::vector<Instr> instrs;
  int64_t num_late_ints = 0;  // over all instructions
};

struct Call {
  int64_t template_id = 0;
  std::vector<int64_t> binding;  // tensor per slot, on this device and on peers
  std::vector<int64_t> numbers = {};
  TaskHints hints = {};  // of the tasks of its instructions
  int64_t first_int = 0;  // place of its late ints in its list
};

/// The calls that one run executes, in order, on every device of a class.
struct CallList {
  std::vector<Call> calls;
  int64_t num_late_ints = 0;
};

inline constexpr int64_t kNoFile = INT64_MAX;  // beyond every address

struct DeviceClass {
  int64_t memory_bytes = kNoFile;  // the offset at which the file of each device begins
  std::vector<Tensor> tensors;
  std::vector<Template> templates;
  std::vector<CallList> lists;  // by list number; missing lists are empty
};

/// One device: its class, its values for the templates' numbers, and its device groups.
struct DeviceEntry {
  int64_t class_id = 0;
  std::vector<int64_t> numbers;
  std::vector<std::vector<int64_t>> groups;
};

/// The resources that a program needs on a device.
struct Needs {
  int64_t arena_bytes = 0;  // of memory
  int64_t file_bytes = 0;
  int64_t num_handles = 0;
  int64_t num_signals = 0;
  int64_t num_workers = 1;
};

using KernelResolver = std::function<const kernels::Entry*(std::string_view)>;

inline constexpr int64_t kPanelRows = 32;  // rows of a packed weight's panel (native/kernels/microkernel.h)

class Program {
 public:
  Program();
  ~Program();

  /// memory_bytes: the offset at which the files of its devices begin.
  int64_t add_class(int64_t memory_bytes = kNoFile);
  int64_t add_tensor(int64_t class_id, Tensor tensor);
  int64_t add_template(int64_t class_id, std::string name);
  void add_instr(int64_t class_id, int64_t template_id, Instr instr, const std::string& label);
  /// Appends a call to the class's list of that name.
  void add_call(int64_t class_id, Call call, const std::string& name = "");
  int64_t add_device(DeviceEntry device);
  /// Names a kernel of the user. Its code must stay loaded as long as the program runs.
  void add_kernel(const std::string& name, tilewise_tile_kernel kernel);

  /// Checks the whole program for symbols up to their bounds, looks up its kernels and proves that no list can
  /// deadlock.
  void finish(std::vector<int64_t> symbols_max, const KernelResolver& resolve);

  bool finished() const { return finished_; }
  int64_t num_devices() const { return std::ssize(devices_); }
  int64_t num_classes() const { return std::ssize(classes_); }
  int64_t num_lists() const { return std::ssize(names_); }
  const DeviceEntry& device(int64_t index) const { return devices_[index]; }
  const DeviceClass& class_at(int64_t index) const { return classes_[index]; }
  const DeviceClass& class_of(int64_t device) const { return classes_[devices_[device].class_id]; }
  const std::vector<std::string>& labels() const { return labels_; }
  const std::vector<int64_t>& symbols_max() const { return symbols_max_; }
  /// The number of the list of that name; -1: no class has one.
  int64_t find_list(const std::string& name) const;
  const CallList& list_of(int64_t device, int64_t list) const;
  const Needs& needs(int64_t device) const { return needs_[devices_[device].class_id]; }
  /// The device's templates with its numbers and peers; made at the first call, which may be on any thread.
  const Bound& bound(int64_t device) const;
  /// Number of tasks of one run of a list on a device with these symbols.
  int64_t num_tasks(int64_t device, int64_t list, const std::vector<int64_t>& symbols) const;
  /// Devices with an instruction that posts this signal of `device`.
  std::vector<int64_t> posters(int64_t device, int64_t signal) const;

 private:
  DeviceClass& open(int64_t class_id, const char* where);
  void find_kernel(Instr& instr, const KernelResolver& resolve) const;
  void check_open(const char* where) const;
  void place_late_ints(DeviceClass& of);
  Bound bind(int64_t device) const;

  std::vector<DeviceClass> classes_;
  std::vector<DeviceEntry> devices_;
  std::vector<std::string> names_;  // of the lists
  std::vector<std::string> labels_;
  std::map<std::string, int64_t, std::less<>> label_ids_;
  std::map<std::string, tilewise_tile_kernel> user_kernels_;
  std::vector<Needs> needs_;  // per class
  std::vector<int64_t> symbols_max_;
  bool finished_ = false;
  mutable std::mutex binding_;
  mutable std::vector<std::unique_ptr<Bound>> bound_;
};

/// Rejects malformed programs and returns what each class needs (see check.cc).
std::vector<Needs> check_program(const Program& program);

/// Rejects an otherwise checked program if submission orders and signals of its devices block each other in one of its
/// lists, or if a wait and its post are about different tensors or uses (see deadlock.cc). Uses a cursor per device,
/// one per class, or the one that suits the number of devices.
void check_signals_by_device(const Program& program);
void check_signals_by_class(const Program& program);
void check_signals(const Program& program);

}  // namespace tilewise::programs
