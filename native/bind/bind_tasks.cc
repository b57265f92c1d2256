// The Python face of the task runtime's C interface, as submodule `tasks`.
//
// Thin: turns Python values into pto_* calls and statuses into exceptions; tilewise.runtime has the classes people use.
// submit() keeps the GIL unless it must block; waits, replays, orchestrations and close() release it.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "bind/bind.h"
#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

using RegionTuple = std::tuple<uint64_t, std::vector<uint64_t>, std::vector<uint64_t>>;

/// A timeout as the C interface takes it; what is neither None nor a float is Python's to judge.
double seconds_of(nb::handle timeout) {
  if (timeout.is_none()) return PTO_FOREVER;
  double seconds = PyFloat_CheckExact(timeout.ptr()) ? PyFloat_AS_DOUBLE(timeout.ptr()) : NAN;
  if (std::isnan(seconds)) seconds = nb::cast<double>(checked_in_python("seconds")("wait", timeout));
  return seconds < 0 ? 0.0 : seconds;
}

void set_region(pto_region& region, const RegionTuple& tuple) {
  const auto& [offset, size, stride] = tuple;
  region.offset = offset;
  region.ndim = static_cast<uint32_t>(size.size());
  for (size_t d = 0; d < std::min<size_t>(size.size(), PTO_MAX_DIMS); ++d) {
    region.size[d] = size[d];
    region.stride[d] = d < stride.size() ? stride[d] : 0;
  }
}

void init_operand(Operand* self, Core& core, pto_handle handle, const std::optional<RegionTuple>& region) {
  new (self) Operand{&core, handle, region.has_value(), {}};
  if (region) set_region(self->region, *region);
}

/// call: what a refusal names. Nothing is made of what is no operand.
void init_param(Param* self, const char* call, nb::handle x, pto_mode mode, pto_kernel combine = 0) {
  if (!nb::isinstance<Operand>(x) || !nb::inst_ready(x)) checked_in_python("operand")(call, x);
  const Operand& operand = *nb::inst_ptr<Operand>(x);
  new (self) Param{};
  self->core = operand.core;
  self->native.mode = mode;
  self->native.combine = combine;
  self->native.handle = operand.handle;
  self->has_region = operand.has_region;
  self->region = operand.region;
  self->target = nb::borrow(x);
}

struct Input : Param {};
struct InOut : Param {};
struct Commute : Param {};
struct Output : Param {};

/// Of an operand, or of what the runtime allocates: Python knows shapes and dtypes.
void init_output(Output* self, nb::handle x, nb::handle bytes, nb::handle shape, nb::handle dtype) {
  if (!x.is_none() && bytes.is_none() && shape.is_none() && dtype.is_none()) {
    return init_param(self, "Output", x, PTO_OUTPUT);
  }
  const nb::object described =
      nb::module_::import_("tilewise.runtime.params").attr("describe_output")(x, bytes, shape, dtype);
  new (self) Output{};
  self->native.mode = PTO_OUTPUT;
  self->native.bytes = nb::cast<uint64_t>(described.attr("num_bytes"));
  self->target = described;
}

void raise_task_error(const Task& task, int status) {
  task.core->has_told_failure = true;
  char text[512];
  pto_task_error(task.core->runtime, task.id, text, sizeof(text));
  raise_status(status, text);
}

void wait_task(const Task& task, nb::handle timeout) {
  const double seconds = seconds_of(timeout);
  const Call call(*task.core);
  drop_finished_records();
  PTORuntime* runtime = task.core->runtime;
  const int status = pto_is_complete(runtime, task.id) == 1
                         ? pto_task_status(runtime, task.id)
                         : without_gil([&] { return pto_wait(runtime, task.id, seconds); });
  drop_finished_records();
  if (status == PTO_TASK_FAILED || status == PTO_CANCELLED) raise_task_error(task, status);
  if (status == PTO_TIMEOUT) {
    const std::string text =
        "[runtime.wait] a task must end within the time given; got one that still runs or waits after " +
        std::to_string(seconds) + " s; wait longer, or cancel it";
    raise_status(status, text.c_str());
  }
  if (status == PTO_PEER_LOST) task.core->has_told_failure = true;
  check_status(status);
}

bool is_complete(const Task& task) {
  const Call call(*task.core);
  const int done = pto_is_complete(task.core->runtime, task.id);
  check_status(done);
  return done == 1;
}

/// The place of a task that has completed; None when the time is over.
std::optional<uint32_t> wait_any(Core& core, std::vector<uint64_t> tasks, nb::handle timeout) {
  const double seconds = seconds_of(timeout);
  const Call call(core);
  uint32_t first = 0;
  const int status = without_gil(
      [&] { return pto_wait_any(core.runtime, tasks.data(), static_cast<uint32_t>(tasks.size()), seconds, &first); });
  drop_finished_records();
  if (status == PTO_TIMEOUT) return std::nullopt;
  if (status != PTO_TASK_FAILED && status != PTO_CANCELLED) check_status(status);
  return first;
}

void wait_all(Core& core, nb::handle timeout) {
  const double seconds = seconds_of(timeout);
  const Call call(core);
  const int status = without_gil([&] { return pto_wait_all(core.runtime, seconds); });
  drop_finished_records();
  if (status == PTO_TIMEOUT) {
    raise_status(status,
                 "[runtime.wait_all] this thread's tasks must end within the time given; got some that still run; "
                 "wait longer, or cancel them");
  }
  if (status == PTO_TASK_FAILED || status == PTO_CANCELLED || status == PTO_PEER_LOST) core.has_told_failure = true;
  check_status(status);
}

/// Bytes of the runtime's own memory, or of a kernel's operand, as an array that keeps the memory mapped.
nb::object view(CoreRef self, uint64_t address, uint64_t bytes) {
  struct Held {
    Core* core;
    PyObject* object;
  };
  Core& core = *self.p;
  auto* held = new Held{&core, self.h.inc_ref().ptr()};
  ++core.num_views;
  nb::capsule owner(held, [](void* context) noexcept {
    auto* dropped = static_cast<Held*>(context);
    if (--dropped->core->num_views == 0 && dropped->core->is_waiting) dropped->core->close_now();
    Py_DECREF(dropped->object);
    delete dropped;
  });
  const size_t size = bytes;
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(reinterpret_cast<void*>(static_cast<uintptr_t>(address)),
                                                               {size}, owner));
}

nb::list addresses(uint64_t pointer, size_t count) {
  auto* const* buffers = reinterpret_cast<void* const*>(static_cast<uintptr_t>(pointer));
  nb::list result;
  for (size_t p = 0; p < count; ++p) result.append(reinterpret_cast<uintptr_t>(buffers[p]));
  return result;
}

void open(Core* self, nb::object task_type, std::optional<uint32_t> num_workers, uint32_t window, uint32_t max_lanes,
          uint32_t max_handles, uint32_t max_regions, uint32_t max_events, uint64_t heap_bytes,
          const std::vector<uint8_t>& worker_types, bool pin, const std::optional<std::string>& shared_path,
          double peer_timeout_s) {
  pto_config config;
  pto_config_init(&config);
  config.num_workers = !num_workers ? 0 : *num_workers == 0 ? PTO_NO_WORKERS : *num_workers;
  config.window = window;
  config.max_lanes = max_lanes;
  config.max_handles = max_handles;
  config.max_regions = max_regions;
  config.max_events = max_events;
  config.heap_bytes = heap_bytes;
  config.worker_types = worker_types.empty() ? nullptr : worker_types.data();
  config.flags = pin ? PTO_PIN : 0;
  config.shared_path = shared_path ? shared_path->c_str() : nullptr;
  config.peer_timeout_s = peer_timeout_s;
  PTORuntime* runtime = nullptr;
  const int status = without_gil([&] { return pto_runtime_open(&config, &runtime); });
  check_status(status);
  new (self) Core{};
  self->runtime = runtime;
  self->num_workers = num_workers.value_or(1);
  self->task_type = std::move(task_type);
  self->keep_alive = nb::none();
}

pto_kernel add_kernel(Core& core, const std::string& name, uint64_t address, bool submits) {
  const Call call(core);
  const pto_kernel_fn function =
      address == 0 ? run_python_kernel : reinterpret_cast<pto_kernel_fn>(static_cast<uintptr_t>(address));
  const pto_kernel kernel = pto_kernel_add(core.runtime, name.c_str(), function, submits ? PTO_SUBMITS : 0);
  check_status(kernel);
  return kernel;
}

template <class Result, Result (*function)(PTORuntime*, pto_handle, const pto_region*, double)>
uint64_t wait_for_buffer(Core& core, const Operand& operand, nb::handle timeout) {
  const double seconds = seconds_of(timeout);
  const Call call(core);
  const pto_region* region = operand.has_region ? &operand.region : nullptr;
  const Result address = without_gil([&] { return function(core.runtime, operand.handle, region, seconds); });
  drop_finished_records();
  if (address == nullptr) {
    core.has_told_failure = true;
    raise_status(pto_last_status());
  }
  return reinterpret_cast<uintptr_t>(address);
}

uint64_t id_or_raise(uint64_t id) {
  if (id == 0) raise_status(pto_last_status());
  return id;
}

void replay(Core& core, pto_recording recording, std::vector<uint64_t> from, std::vector<uint64_t> to) {
  const Call call(core);
  check_status(without_gil(
      [&] { return pto_replay(core.runtime, recording, from.data(), to.data(), static_cast<uint32_t>(from.size())); }));
}

void run_orchestration(Core& core, const std::string& path, const std::string& name, const nb::sequence& values) {
  const Call call(core);
  std::vector<uint64_t> args;
  for (nb::handle value : values) args.push_back(bits_of("run_orchestration", value));
  args.push_back(0);  // an address to pass also when there are none
  check_status(
      without_gil([&] { return pto_run_orchestration(core.runtime, path.c_str(), name.c_str(), args.data()); }));
}

nb::dict stats(Core& core) {
  const Call call(core);
  pto_stats s;
  check_status(pto_get_stats(core.runtime, &s));
  nb::dict d;
  d["num_submitted"] = s.num_submitted;
  d["num_completed"] = s.num_completed;
  d["num_failed"] = s.num_failed;
  d["num_helped"] = s.num_helped;
  d["stall_ns"] = s.stall_ns;
  d["num_stalls"] = s.num_stalls;
  d["window"] = s.window;
  d["window_high"] = s.window_high;
  d["heap_bytes"] = s.heap_bytes;
  d["heap_high_bytes"] = s.heap_high_bytes;
  d["handles"] = s.handles;
  d["handles_high"] = s.handles_high;
  d["regions"] = s.regions;
  d["regions_high"] = s.regions_high;
  d["metadata_bytes"] = s.metadata_bytes;
  return d;
}

nb::list trace_tasks(Core& core) {
  const Call call(core);
  std::vector<pto_trace_task> records(pto_trace_tasks(core.runtime, nullptr, 0));
  records.resize(std::min<uint64_t>(records.size(), pto_trace_tasks(core.runtime, records.data(), records.size())));
  nb::list result;
  for (const pto_trace_task& r : records) {
    result.append(nb::make_tuple(r.task, pto_kernel_name(core.runtime, r.kernel), r.worker, r.lane, r.scope_depth,
                                 r.status, r.priority, r.submit_ns, r.ready_ns, r.start_ns, r.end_ns));
  }
  return result;
}

nb::list trace_stalls(Core& core) {
  const Call call(core);
  std::vector<pto_trace_stall> records(pto_trace_stalls(core.runtime, nullptr, 0));
  records.resize(std::min<uint64_t>(records.size(), pto_trace_stalls(core.runtime, records.data(), records.size())));
  nb::list result;
  for (const pto_trace_stall& r : records) {
    result.append(nb::make_tuple(r.lane, r.cause, r.begin_ns, r.end_ns, r.live_tasks, r.heap_used_bytes));
  }
  return result;
}

int run_workers(const std::string& path, const std::vector<std::string>& libraries) {
  std::vector<const char*> paths;
  for (const std::string& library : libraries) paths.push_back(library.c_str());
  const int status =
      without_gil([&] { return pto_workers_run(path.c_str(), paths.data(), static_cast<uint32_t>(paths.size())); });
  if (status < 0 && status != PTO_PEER_LOST) raise_status(status);
  return status;
}

/// A method that calls pto_*(runtime, args...) with the GIL held and checks the status.
template <auto function, class... Args>
auto checked() {
  return [](Core& core, Args... args) {
    const Call call(core);
    check_status(function(core.runtime, args...));
  };
}

/// The same for calls that make an id.
template <auto function, class... Args>
auto made() {
  return [](Core& core, Args... args) {
    const Call call(core);
    return id_or_raise(function(core.runtime, args...));
  };
}

void bind_core(nb::module_& m) {
  nb::class_<Core>(m, "Core", "An open runtime.")
      .def("__init__", &open, nb::arg("task_type"), nb::arg("num_workers").none(), nb::arg("window"),
           nb::arg("max_lanes"), nb::arg("max_handles"), nb::arg("max_regions"), nb::arg("max_events"),
           nb::arg("heap_bytes"), nb::arg("worker_types"), nb::arg("pin"), nb::arg("shared_path").none(),
           nb::arg("peer_timeout_s"))
      .def("close", &Core::close)
      .def("close_at_exit", &Core::close_at_exit)
      .def_prop_ro("is_open",
                   [](const Core& core) { return core.runtime != nullptr && !core.is_closing && !core.is_inherited(); })
      .def_ro("has_told_failure", &Core::has_told_failure, "A wait or a read has raised a task's failure.")
      .def_prop_rw(
          "keep_alive", [](const Core& core) { return core.keep_alive; },
          [](Core& core, nb::object value) { core.keep_alive = std::move(value); })
      .def("submit", &submit, nb::arg("kernel"), nb::arg("worker_type").none(), nb::arg("params").none(),
           nb::arg("scalars").none(), nb::arg("extras").none(), "Submit a task; returns its handle.")
      .def("keep_until_done",
           [](Core& core, const Task& task, nb::object record) { keep_until_done(core, task.id, std::move(record)); })
      .def("wait_any", &wait_any, nb::arg("tasks"), nb::arg("timeout").none())
      .def("wait_all", &wait_all, nb::arg("timeout").none())
      .def("add_kernel", &add_kernel, "Address 0: the kernel that runs Python records.")
      .def("find_kernel",
           [](Core& core, const std::string& name) {
             const Call call(core);
             const pto_kernel kernel = pto_kernel_find(core.runtime, name.c_str());
             check_status(kernel);
             return kernel;
           })
      .def("load_library", checked<pto_library_load, const char*>())
      .def("register",
           [](Core& core, uint64_t address, uint64_t bytes) {
             const Call call(core);
             return id_or_raise(
                 pto_register(core.runtime, reinterpret_cast<void*>(static_cast<uintptr_t>(address)), bytes));
           })
      .def("alloc", made<pto_alloc, uint64_t>())
      .def(
          "unregister",
          [](Core& core, pto_handle handle, nb::handle timeout) {
            const double seconds = seconds_of(timeout);
            const Call call(core);
            check_status(without_gil([&] { return pto_unregister(core.runtime, handle, seconds); }));
          },
          nb::arg("handle"), nb::arg("timeout").none())
      .def("freeze",
           [](Core& core, pto_handle handle, bool frozen) {
             const Call call(core);
             check_status(without_gil([&] { return pto_freeze(core.runtime, handle, frozen ? 1 : 0); }));
           })
      .def("address",
           [](Core& core, pto_handle handle) {
             const Call call(core);
             return id_or_raise(reinterpret_cast<uintptr_t>(pto_address(core.runtime, handle)));
           })
      .def("read", &wait_for_buffer<const void*, pto_read>, nb::arg("operand"), nb::arg("timeout").none())
      .def("write", &wait_for_buffer<void*, pto_write>, nb::arg("operand"), nb::arg("timeout").none())
      .def("scope_begin",
           [](Core& core) {
             const Call call(core);
             pto_scope_begin(core.runtime);
             check_status(pto_last_status());
           })
      .def("scope_end", checked<pto_scope_end>())
      .def("task_complete",
           [](Core& core, pto_task task, int status) {
             const Call call(core, true);
             check_status(pto_task_complete(core.runtime, task, status));
           })
      .def("cancel_all", checked<pto_cancel_all>())
      .def("event_open", made<pto_event_open>())
      .def("event_raise",
           [](Core& core, pto_event event, uint64_t add) {
             const Call call(core, true);
             check_status(pto_event_raise(core.runtime, event, add));
           })
      .def("event_value",
           [](Core& core, pto_event event) {
             const Call call(core, true);
             return pto_event_value(core.runtime, event);
           })
      .def("record_begin", checked<pto_record_begin>())
      .def("record_end", made<pto_record_end>())
      .def("replay", &replay)
      .def("recording_free", checked<pto_recording_free, pto_recording>())
      .def("run_orchestration", &run_orchestration)
      .def("stats", &stats)
      .def("trace_enable", checked<pto_trace_enable, uint32_t>())
      .def("trace_tasks", &trace_tasks)
      .def("trace_stalls", &trace_stalls)
      .def("graph_begin", checked<pto_graph_begin>())
      .def("graph_end", checked<pto_graph_end, const char*>())
      .def("view", &view, "Bytes at an address as an array.");
}

void bind_params(nb::module_& m) {
  nb::class_<Operand>(m, "Operand", "A buffer or a region of one; base of Buffer and Region.")
      .def("__init__", &init_operand, nb::arg("core"), nb::arg("handle"), nb::arg("region") = nb::none())
      .def_ro("handle", &Operand::handle, "The runtime's id of the buffer.");
  nb::class_<Param>(m, "Param", "One parameter of a task.")
      .def(
          "__init__",
          [](Param* self, const char* call, nb::handle operand, int mode, pto_kernel combine) {
            init_param(self, call, operand, static_cast<pto_mode>(mode), combine);
          },
          nb::arg("call"), nb::arg("operand").none(), nb::arg("mode"), nb::arg("combine") = 0)
      .def(
          "__init__",
          [](Param* self, int mode, uint64_t bytes, uint64_t address, nb::object target) {
            new (self) Param{};
            self->native.mode = static_cast<pto_mode>(mode);
            self->native.bytes = bytes;
            self->native.address = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
            self->target = std::move(target);
          },
          nb::arg("mode"), nb::arg("bytes"), nb::arg("address"), nb::arg("target").none())
      .def_prop_ro("mode", [](const Param& param) { return static_cast<int>(param.native.mode); })
      .def_ro("target", &Param::target, "The operand, or what a new output looks like.");
  nb::class_<Input, Param>(m, "Input", "The task reads the operand; readers run beside each other.")
      .def("__init__", [](Input* self, nb::handle x) { init_param(self, "Input", x, PTO_INPUT); }, nb::arg("x").none());
  nb::class_<Output, Param>(m, "Output",
                            "The task overwrites all of the operand; without one, the runtime allocates the output, as "
                            "a number of `bytes` or "
                            "as an array of `shape` and `dtype`, and `TaskHandle.outputs` names it.")
      .def("__init__", &init_output, nb::arg("x") = nb::none(), nb::kw_only(), nb::arg("bytes") = nb::none(),
           nb::arg("shape") = nb::none(), nb::arg("dtype") = nb::none());
  nb::class_<InOut, Param>(m, "InOut", "The task reads and writes the operand.")
      .def("__init__", [](InOut* self, nb::handle x) { init_param(self, "InOut", x, PTO_INOUT); }, nb::arg("x").none());
  nb::class_<Commute, Param>(
      m, "Commute",
      "The task reads and writes the operand; neighbouring commuting tasks run one at a time in any order.")
      .def(
          "__init__", [](Commute* self, nb::handle x) { init_param(self, "Commute", x, PTO_COMMUTE); },
          nb::arg("x").none());
}

void bind_handles(nb::module_& m) {
  nb::class_<Task>(m, "Task", nb::is_weak_referenceable(), "A submitted task; base of TaskHandle.")
      .def_ro("id", &Task::id, "The runtime's id of the task; never used again.")
      .def_ro("core", &Task::owner, "The runtime's native object.")
      .def_ro("output_handles", &Task::outputs, "Of the outputs that the runtime made; None without any.")
      .def("wait", &wait_task, nb::arg("timeout") = nb::none(),
           "Wait until the task has ended; `timeout` in seconds, None for ever. Without one, the caller helps to run "
           "tasks.\n\nRaises:\n    TaskFailed: its kernel failed, or a task before it did.\n    "
           "concurrent.futures.CancelledError: it was cancelled.\n    TimeoutError: it still runs or waits.")
      .def("is_complete", &is_complete, "Whether the task has ended, well or not. Never blocks.")
      .def(
          "cancel",
          [](const Task& task) {
            const Call call(*task.core);
            check_status(pto_cancel(task.core->runtime, task.id));
          },
          "Skip the task if it has not started; tasks that depend on it are cancelled with it. It waits for no event "
          "any "
          "more.")
      .def(
          "detach",
          [](const Task& task) {
            const Call call(*task.core);
            pto_task_release(task.core->runtime, task.id);
          },
          "Nobody will ask for this task's error: the runtime may forget it.")
      .def(
          "notify",
          [](const Task& task, nb::object callback) {
            if (PyCallable_Check(callback.ptr()) == 0) checked_in_python("callback")("notify", callback);
            const Call call(*task.core);
            if (task.core->num_workers == 0) {
              raise_status(PTO_BAD_ARGUMENT,
                           "[runtime.await] an awaited task needs a worker to run it; got a runtime with none; "
                           "open it with workers, or use wait()");
            }
            notify(*task.core, task.id, std::move(callback));
          },
          nb::arg("callback").none(),
          "Call back once, from whichever thread ends the task, at once if it has ended. The callback must be short.");
}

}  // namespace

void bind_tasks(nb::module_& m) {
  nb::module_ tasks = m.def_submodule("tasks", "The task runtime's C interface.");
  install_hooks();
  bind_core(tasks);
  bind_params(tasks);
  bind_handles(tasks);
  tasks.def("addresses", &addresses, "The addresses that a kernel got, from the address of their table.");
  tasks.def("run_workers", &run_workers, "pto_workers_run; returns 0 or PTO_PEER_LOST.");
}

}  // namespace tilewise::bind
