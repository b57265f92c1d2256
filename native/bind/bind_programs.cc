// Python binding of native/programs, as submodule `programs`: Program, Executor and their errors.
//
// It converts the planner's dataclasses to tensors and instructions, and checks nothing that the native side checks
// itself. run() releases the GIL and handles pending signals every 50 ms. Each native error class is mapped to its
// Python class here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "base/populate.h"
#include "bind/bind.h"
#include "bind/fields.h"
#include "programs/run/executor.h"
#include "programs/run/inspect.h"

namespace nb = nanobind;

/// An integer, or a tilewise.ir.program.Number: constant, multiple, source, which.
template <>
struct nb::detail::type_caster<tilewise::programs::Number> {
  NB_TYPE_CASTER(tilewise::programs::Number, const_name("Number"))

  bool from_python(handle object, uint8_t flags, cleanup_list* cleanup) noexcept {
    if (PyLong_Check(object.ptr())) {
      make_caster<int64_t> constant;
      if (!constant.from_python(object, flags, cleanup)) return false;
      value = tilewise::programs::Number(constant.value);
      return true;
    }
    make_caster<std::tuple<int64_t, int64_t, int32_t, int32_t>> fields;
    if (!PyTuple_Check(object.ptr()) || !fields.from_python(object, flags, cleanup)) return false;
    const auto [constant, multiple, source, which] = std::tuple<int64_t, int64_t, int32_t, int32_t>(fields);
    value = {constant, multiple, static_cast<tilewise::programs::Source>(source), which};
    return true;
  }
};

namespace tilewise::bind {

namespace {

using namespace tilewise::programs;

constexpr std::array<std::string_view, 4> kDTypeNames = {"f32", "bf16", "i32", "f64"};  // in DType's order

// tilewise.ir.program's named tuples, whose fields have the order of the structs in programs/program.h.
using OperandTuple =
    std::tuple<int64_t, int64_t, int64_t, int64_t, Number, Number, Number, Number, bool, int64_t, Number>;
using WaitTuple = std::tuple<Number, bool, Number, int64_t, Number, int64_t, Number>;
using NotifyTuple = std::tuple<int64_t, Number, Number, bool, int64_t, Number>;
using HintsTuple = std::tuple<std::vector<int64_t>, bool, std::optional<int64_t>>;

Number behind(Number signal, int64_t first_signal) {
  signal.constant += first_signal;
  return signal;
}

DType dtype_of(const std::string& name) {
  const auto* const entry = std::find(kDTypeNames.begin(), kDTypeNames.end(), name);
  check<ArgumentError>(entry != kDTypeNames.end(),
                       "[programs.Program.add_tensor] dtype must be f32, bf16, i32 or f64; got '", name,
                       "'; use one of them");
  return static_cast<DType>(entry - kDTypeNames.begin());
}

/// entry: a tilewise.ir.program.TensorEntry, or an object with its attributes.
int64_t add_tensor(Program& program, int64_t class_id, nb::handle entry, std::vector<int64_t> aliases) {
  Tensor tensor;
  tensor.offset = read<"offset", int64_t>(entry);
  tensor.rows = read<"extent", Number>(entry);
  tensor.cols = read<"cols", int64_t>(entry);
  tensor.stride = read<"stride", int64_t>(entry);
  tensor.dtype = dtype_of(read<"dtype", std::string>(entry));
  tensor.tile_rows = read<"tile_rows", Number>(entry);
  tensor.first_handle = read<"first_handle", int64_t>(entry);
  tensor.tile_cols = read<"tile_cols", int64_t>(entry);
  tensor.aliases = std::move(aliases);
  return program.add_tensor(class_id, std::move(tensor));
}

TaskHints hints_of(const HintsTuple& hints) {
  const auto& [workers, is_preference, priority] = hints;
  return {workers, is_preference, priority};
}

/// instruction: a tilewise.ir.program.Instruction, or an object with its attributes. Its signals count from
/// first_signal on.
void add_instr(Program& program, int64_t class_id, int64_t template_id, nb::handle instruction, int64_t first_signal) {
  Instr instr;
  instr.kernel = read<"kernel", std::string>(instruction);
  instr.extent = read<"extent", Number>(instruction);
  instr.step = read<"step", Number>(instruction);
  for (const auto& [slot, mode, access, group, member, div, part, parts, null, role, offset] :
       read<"operands", std::vector<OperandTuple>>(instruction)) {
    instr.operands.push_back(
        {slot, static_cast<Mode>(mode), access, group, member, div, part, parts, null, role, offset});
  }
  instr.ints = read<"ints", std::vector<Number>>(instruction);
  instr.floats = read<"floats", std::vector<double>>(instruction);
  for (const auto& [base, per_index, increment, group, member, slot, use] :
       read<"waits", std::vector<WaitTuple>>(instruction)) {
    instr.waits.push_back({behind(base, first_signal), per_index, increment, group, member, slot, use});
  }
  for (const auto& [group, member, base, per_index, slot, use] :
       read<"notifies", std::vector<NotifyTuple>>(instruction)) {
    instr.notifies.push_back({group, member, behind(base, first_signal), per_index, slot, use});
  }
  instr.priority = read<"priority", int64_t>(instruction);
  instr.first = read<"first", Number>(instruction);
  instr.hints = hints_of(read<"hints", HintsTuple>(instruction));
  program.add_instr(class_id, template_id, std::move(instr), read<"label", std::string>(instruction));
}

void finish(Program& program, std::vector<int64_t> symbols_max) {
  program.finish(std::move(symbols_max), kernels::find_kernel);
}

ExecutorOptions executor_options(const nb::kwargs& arguments) {
  ExecutorOptions options;
  Keywords(arguments)
      .set<"num_devices">(options.num_devices)
      .set<"workers_per_device">(options.workers_per_device)
      .set<"arena_bytes">(options.arena_bytes)
      .set<"num_signals">(options.num_signals)
      .set<"num_handles">(options.num_handles)
      .set<"window">(options.window)
      .set<"scratch_bytes">(options.scratch_bytes)
      .set<"file_bytes">(options.file_bytes)
      .set<"file_directory">(options.file_directory)
      .set<"memory_limit_bytes">(options.memory_limit_bytes)
      .set<"deadline_s">(options.deadline_s)
      .set<"cores">(options.cores)
      .set<"process">(options.group.process)
      .set<"processes">(options.group.processes)
      .set<"group_file">(options.group.group_file)
      .set<"arena_files">(options.group.arena_files)
      .set<"spill_files">(options.group.spill_files)
      .set<"peer_files">(options.group.peer_files)
      .set<"hosts">(options.group.hosts)
      .set<"connection">(options.group.connection)
      .set<"number">(options.group.number)
      .done();
  return options;
}

/// Runs with the GIL released. A pending Python exception (Ctrl-C) cancels the run and is raised when the devices have
/// finished. An exception of `meanwhile` is also raised then, but cancels nothing.
void run(Executor& executor, std::shared_ptr<const Program> program, std::vector<int64_t> symbols,
         const std::string& name, const nb::object& meanwhile, int64_t number) {
  std::optional<nb::python_error> pending;
  const auto poll = [&pending] {
    nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() == 0) return false;
    pending.emplace();
    return true;
  };
  std::function<void()> call;
  if (!meanwhile.is_none()) {
    call = [&] {
      nb::gil_scoped_acquire locked;
      try {
        meanwhile();
      } catch (nb::python_error& error) {
        pending.emplace(std::move(error));
      }
    };
  }
  try {
    nb::gil_scoped_release release;
    executor.run(std::move(program), std::move(symbols), name, poll, call, number);
  } catch (...) {
    if (pending) throw std::move(*pending);  // an earlier error must not hide Ctrl-C
    throw;
  }
  if (pending) throw std::move(*pending);
}

nb::object buffer(const Executor& executor, int64_t device, int64_t offset, int64_t bytes) {
  std::byte* data = executor.memory(device, offset, bytes);
  auto* arena = new std::shared_ptr<memory::Arena>(executor.arena(device));
  nb::capsule owner(arena, [](void* owned) noexcept { delete static_cast<std::shared_ptr<memory::Arena>*>(owned); });
  const auto size = static_cast<size_t>(bytes);
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {size}, owner));
}

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void move(const Executor& executor, const std::string& way, int64_t device, int64_t offset, const Bytes& memory) {
  check<ArgumentError>(way == "read" || way == "write", "[programs.Executor.move] way must be 'read' or 'write'; got '",
                       way, "'; choose one");
  auto* const data = reinterpret_cast<std::byte*>(memory.data());
  const auto bytes = static_cast<int64_t>(memory.size());
  nb::gil_scoped_release release;
  executor.move(way == "read" ? memory::SpillFile::Way::kRead : memory::SpillFile::Way::kWrite, device, offset, data,
                bytes);
}

nb::list timeline(const Executor& executor) {
  const std::vector<std::string>& labels = executor.timeline_labels();
  nb::list records;
  for (const TimelineEntry& entry : executor.timeline()) {
    const tasks::TimelineRecord& r = entry.record;
    records.append(nb::make_tuple(entry.device, r.worker, labels[r.label], r.row_begin, r.submit_ns, r.ready_ns,
                                  r.start_ns, r.end_ns, r.priority, r.target));
  }
  return records;
}

nb::dict file_traffic(const Executor& executor) {
  const Traffic traffic = executor.stats().files;
  nb::dict result;
  result["bytes_read"] = traffic.bytes_read;
  result["bytes_written"] = traffic.bytes_written;
  result["busy_ns"] = traffic.busy_ns;
  return result;
}

nb::dict stats(const Executor& executor) {
  const ExecutorStats stats = executor.stats();
  nb::dict result;
  result["runs"] = stats.num_runs;
  result["tasks"] = stats.num_tasks;
  result["window_high_water"] = stats.window_high_water;
  result["timeline_dropped"] = stats.timeline_dropped;
  result["bytes_fetched"] = stats.bytes_fetched;
  return result;
}

void inject(Executor& executor, const std::string& kind, int64_t device, std::string label, int64_t index) {
  static const std::map<std::string, Injected> kKinds = {
      {"throw", Injected::kThrow}, {"stall", Injected::kStall}, {"delay", Injected::kDelay}};
  const auto entry = kKinds.find(kind);
  check<ArgumentError>(entry != kKinds.end(),
                       "[programs.Executor.inject] kind must be 'throw', 'stall' or 'delay'; got '", kind,
                       "'; choose one");
  executor.inject(entry->second, device, std::move(label), index);
}

nb::object error_class(const char* name) { return nb::module_::import_("tilewise.core.errors").attr(name); }

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const TaskFailed& e) {
    nb::object failed = error_class("TaskFailed")(e.what(), nb::arg("op") = e.op, nb::arg("tile") = e.tile,
                                                  nb::arg("worker") = e.worker, nb::arg("device") = e.device);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(failed.ptr())), failed.ptr());
  } catch (const PeerLost& e) {
    PyErr_SetString(error_class("PeerLost").ptr(), e.what());
  } catch (const CommTimeout& e) {
    PyErr_SetString(error_class("CommTimeout").ptr(), e.what());
  } catch (const ResourceError& e) {
    PyErr_SetString(error_class("ResourceError").ptr(), e.what());
  } catch (const ArgumentError& e) {
    PyErr_SetString(error_class("PlanError").ptr(), e.what());
  } catch (const std::bad_alloc&) {
    PyErr_SetString(error_class("ResourceError").ptr(),
                    "[runtime] the system must have enough memory; got none; use smaller sizes");
  }
}

nb::dict device_overhead(int64_t workers, int64_t signals, int64_t handles, int64_t scratch_bytes) {
  const DeviceBytes bytes = programs::bytes_needed(
      {.num_workers = workers, .num_signals = signals, .num_handles = handles, .scratch_bytes = scratch_bytes});
  nb::dict result;
  result["scratch"] = bytes.scratch;
  result["signals"] = bytes.signals;
  result["engine"] = bytes.engine;
  return result;
}

void check_device(const Program& program, int64_t device, const char* where) {
  check<ArgumentError>(program.finished() && device >= 0 && device < program.num_devices(), "[programs.Program.", where,
                       "] a finished program and one of its devices are needed; got device ", device,
                       "; call finish() first");
}

int64_t list_named(const Program& program, const std::string& name, const char* where) {
  const int64_t list = program.find_list(name);
  check<ArgumentError>(list >= 0, "[programs.Program.", where, "] the program must have calls under the name; got '",
                       name, "'; pass a name that was given to add_call()");
  return list;
}

void check_symbols(const Program& program, const std::vector<int64_t>& symbols, const char* where) {
  const std::vector<int64_t>& bounds = program.symbols_max();
  bool are_valid = symbols.size() == bounds.size();
  for (size_t s = 0; are_valid && s < symbols.size(); ++s) are_valid = symbols[s] >= 0 && symbols[s] <= bounds[s];
  check<ArgumentError>(are_valid, "[programs.Program.", where, "] every symbol needs a value within its bound; got ",
                       symbols.size(), " for ", bounds.size(), "; pass one per symbol");
}

int64_t num_tasks(const Program& program, int64_t device, const std::vector<int64_t>& symbols,
                  const std::string& name) {
  check_device(program, device, "num_tasks");
  check_symbols(program, symbols, "num_tasks");
  return program.num_tasks(device, list_named(program, name, "num_tasks"), symbols);
}

template <size_t kColumns>
nb::object array_of(Table<kColumns> table) {
  auto* rows = new Table<kColumns>(std::move(table));
  nb::capsule owner(rows, [](void* owned) noexcept { delete static_cast<Table<kColumns>*>(owned); });
  return nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>(rows->data(), {rows->size(), kColumns}, owner));
}

nb::dict tasks_of(const Program& program, int64_t device, const std::vector<int64_t>& symbols,
                  const std::string& name) {
  check_device(program, device, "tasks");
  check_symbols(program, symbols, "tasks");
  TaskTables tables = list_tasks(program, device, list_named(program, name, "tasks"), symbols);
  nb::dict result;
  result["tasks"] = array_of(std::move(tables.tasks));
  result["accesses"] = array_of(std::move(tables.accesses));
  result["views"] = array_of(std::move(tables.views));
  result["waits"] = array_of(std::move(tables.waits));
  result["posts"] = array_of(std::move(tables.posts));
  return result;
}

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program",
                      "Builder of a tile program: classes of devices and the devices, checked by finish().")
      .def(nb::init<>())
      .def("add_class", &Program::add_class, nb::arg("memory_bytes") = kNoFile,
           "Open a class of devices, whose tensors from byte `memory_bytes` on are in the devices' files; returns its "
           "number.")
      .def("add_tensor", &add_tensor, nb::arg("class_id"), nb::arg("entry"),
           nb::arg("aliases") = std::vector<int64_t>{},
           "Add the tensor that an `ir.program.TensorEntry` describes; returns its number in the class.")
      .def("add_template", &Program::add_template, nb::arg("class_id"), nb::arg("name"),
           "Open a list of instructions; returns its number in the class.")
      .def("add_instr", &add_instr, nb::arg("class_id"), nb::arg("template"), nb::arg("instruction"),
           nb::arg("first_signal") = 0, "Add an `ir.program.Instruction`, whose signals count from `first_signal` on.")
      .def(
          "add_call",
          [](Program& program, int64_t class_id, int64_t template_id, std::vector<int64_t> binding,
             std::vector<int64_t> numbers, const std::string& name, const HintsTuple& hints) {
            program.add_call(class_id, {template_id, std::move(binding), std::move(numbers), hints_of(hints)}, name);
          },
          nb::arg("class_id"), nb::arg("template"), nb::arg("binding"), nb::arg("numbers") = std::vector<int64_t>{},
          nb::arg("name") = "", nb::arg("hints") = HintsTuple{},
          "Run a template with binding[slot] = tensor and the call's numbers, in the list of that name; the calls of a "
          "list run in the order in which they were added. `hints`: an `ir.program.TaskHints` for its tasks.")
      .def(
          "add_device",
          [](Program& program, int64_t class_id, std::vector<int64_t> numbers,
             std::vector<std::vector<int64_t>> groups) {
            return program.add_device({class_id, std::move(numbers), std::move(groups)});
          },
          nb::arg("class_id"), nb::arg("numbers") = std::vector<int64_t>{},
          nb::arg("groups") = std::vector<std::vector<int64_t>>{},
          "Add a device of a class with its numbers and its device groups; returns its number.")
      .def(
          "add_kernel",
          [](Program& program, const std::string& name, uint64_t address) {
            program.add_kernel(name,
                               reinterpret_cast<tilewise_tile_kernel>(address));  // NOLINT(performance-no-int-to-ptr)
          },
          nb::arg("name"), nb::arg("address"),
          "Let instructions name the native kernel at an address, a `tilewise_tile_kernel` (tilewise/tile_kernel.h). "
          "The caller keeps its code loaded.")
      .def("finish", &finish, nb::arg("symbols_max") = std::vector<int64_t>{},
           "Check the whole program at the symbols' upper bounds (kernels, ranges, no deadlock) and freeze it.")
      .def(
          "bind",
          [](const Program& program, int64_t device) {
            check_device(program, device, "bind");
            program.bound(device);
          },
          nb::arg("device"), "Bind a device's numbers and peers now instead of at its first run.")
      .def("num_tasks", &num_tasks, nb::arg("device"), nb::arg("symbols") = std::vector<int64_t>{},
           nb::arg("name") = "", "Number of tasks of one run of a list on a device.")
      .def("labels", &Program::labels, "Labels of instructions, by the number in `tasks`.")
      .def("tasks", &tasks_of, nb::arg("device"), nb::arg("symbols") = std::vector<int64_t>{}, nb::arg("name") = "",
           "The tasks of one run of a list on a device, in the order of submission, as int64 arrays with a "
           "row each: `tasks` (call, template, instruction, iteration, label); then, after the task's number, "
           "`accesses` (handle, use: 0 reads, 1 writes, 2 after all earlier uses; handles from the device's `needs` on "
           "order "
           "posts), `views` (operand, owner, begin, end, rows, bytes between rows, role as `Access`; bytes of the "
           "owner's arena), `waits` (signal, threshold if all signals began at 0, poster or -1), `posts` (device, "
           "signal).")
      .def(
          "needs",
          [](const Program& program, int64_t device) {
            check_device(program, device, "needs");
            const Needs& needs = program.needs(device);
            return std::tuple(needs.arena_bytes, needs.num_handles, needs.num_signals);
          },
          nb::arg("device"), "(arena bytes, handles, signals) that an executor must have on a device.");
}

void bind_executor(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Executor>(m, "Executor", "The devices of this process: their memory, workers and signals.")
      .def(
          "__init__", [](Executor* self, const nb::kwargs& options) { new (self) Executor(executor_options(options)); },
          nb::arg("options"),
          "Keyword arguments: num_devices, workers_per_device, arena_bytes (per device), num_signals, num_handles, "
          "window, "
          "scratch_bytes, file_bytes (per device) and file_directory (for offloaded tensors), "
          "memory_limit_bytes (0: none), deadline_s, cores (per worker of this host; none: the system chooses). If "
          "several processes have devices, also process (this one; 0 is "
          "the "
          "leader), "
          "processes (per device), group_file (a sealed memfd of group_bytes()), arena_files (per device "
          "a "
          "sealed memfd), spill_files (per device the result of make_spill_file(), if there are files) and "
          "peer_files (per process a descriptor that is readable after its end, or -1).")
      .def("buffer", &buffer, nb::arg("device"), nb::arg("offset"), nb::arg("bytes"),
           "Writable uint8 array of a device's memory; keeps that memory alive.")
      .def(
          "reaches", [](const Executor& self, int64_t device) { return self.arena(device)->is_mapped(); },
          nb::arg("device"), "Whether buffer() works for a device: its memory is on this host.")
      .def(
          "move", &move, nb::arg("way"), nb::arg("device"), nb::arg("offset"), nb::arg("memory"),
          "'read' bytes of a device's file into a uint8 array, or 'write' them from it; for another host's device also "
          "its memory. Offsets are the plan's: the file begins after the arena.")
      .def("run", &run, nb::arg("program"), nb::arg("symbols") = std::vector<int64_t>{}, nb::arg("name") = "",
           nb::arg("meanwhile") = nb::none(), nb::arg("number") = 0,
           "Run a finished program's list of calls of that name on all devices and wait for its end. `meanwhile` is a "
           "function that is called once, on this thread, while the devices run; its exception is raised at the end. "
           "Other processes run the program that has this number there.")
      .def("serve", &Executor::serve, release, nb::arg("programs"),
           "In a process that does not lead: run those programs that the leader orders, by their places in the list, "
           "until it calls `call_peers`.")
      .def("call_peers", &Executor::call_peers, "In the leader: make `serve` return in all other processes.")
      .def("trace", &Executor::trace, nb::arg("enable"), "Switch the task timeline on or off.")
      .def("timeline", &timeline,
           "Tasks of the last traced run, by start: (device, worker, label, row_begin, submit_ns, ready_ns, start_ns, "
           "end_ns, priority, target: 1 + the worker that it was for, negative if it only preferred this worker, 0 "
           "for any).")
      .def("transfers", &Executor::transfers,
           "Elements read from or written to other devices' memory: label -> one count per device.")
      .def("reset_transfers", &Executor::reset_transfers, "Forget the counted transfers.")
      .def("file_traffic", &file_traffic,
           "Transfers between memory and files: bytes_read, bytes_written, and busy_ns, the time during which at least "
           "one was in progress.")
      .def("allocated_bytes", &Executor::allocated_bytes, "Bytes per device: arena, scratch, signals, task engine.")
      .def("stats", &stats, "Counters: runs, tasks, window_high_water, timeline_dropped.")
      .def(
          "inject", &inject, nb::arg("kind"), nb::arg("device"), nb::arg("label"), nb::arg("index"),
          "For tests: the index-th task of that label on that device will 'throw', 'stall' its worker or begin after a "
          "'delay' of 1 ms in the next run.")
      .def("close", &Executor::close, release, "Stop the workers. Arrays from buffer() stay valid.");
}

}  // namespace

void bind_programs(nb::module_& m) {
  nb::register_exception_translator(translate);
  nb::module_ programs = m.def_submodule("programs", "Tile programs and the executor that runs them.");
  bind_program(programs);
  bind_executor(programs);
  programs.def("group_bytes", &comm::Peers::bytes, nb::arg("num_processes"),
               "Size of the shared memory with which `num_processes` processes run one program.");
  programs.def("make_spill_file", &memory::SpillFile::make, nb::arg("directory"), nb::arg("bytes"),
               "A descriptor of an unnamed file with allocated disk space; the caller must close it.");
  programs.def(
      "populate",
      [](const Bytes& memory) {
        nb::gil_scoped_release release;
        populate(memory.data(), memory.size());
      },
      nb::arg("memory"),
      "Populate the pages of an array from buffer(), which may be in use, so that later writes cause no page faults.");
  programs.def("device_overhead", &device_overhead, nb::arg("workers"), nb::arg("signals"), nb::arg("handles"),
               nb::arg("scratch_bytes"), "Bytes that a device reserves besides its arena, by purpose.");
}

}  // namespace tilewise::bind
