// Python binding of the task runtime's C interface, as submodule `tasks`.
//
// A thin layer: it converts Python values to pto_* calls and statuses to exceptions; tilewise.runtime has the public
// classes. submit() keeps the GIL unless it must block; waits, replays, orchestrations and close() release it.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "bind/bind.h"
#include "bind/fields.h"
#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

/// The index of a task that has completed; None after the timeout.
std::optional<uint32_t> wait_any(OpenRuntime& rt, std::vector<uint64_t> tasks, nb::handle timeout) {
  const double seconds = seconds_of(timeout);
  const Call call(rt);
  uint32_t first = 0;
  const int status = without_gil(
      [&] { return pto_wait_any(rt.runtime, tasks.data(), static_cast<uint32_t>(tasks.size()), seconds, &first); });
  drop_finished_records();
  if (status == PTO_TIMEOUT) return std::nullopt;
  if (status != PTO_TASK_FAILED && status != PTO_CANCELLED) check_status(status);
  return first;
}

void wait_all(OpenRuntime& rt, nb::handle timeout) {
  const double seconds = seconds_of(timeout);
  const Call call(rt);
  const int status = without_gil([&] { return pto_wait_all(rt.runtime, seconds); });
  drop_finished_records();
  if (status == PTO_TIMEOUT) {
    raise_status(status,
                 "[runtime.wait_all] this thread's tasks must end within the timeout; got some that still run; "
                 "wait longer, or cancel them");
  }
  if (status == PTO_TASK_FAILED || status == PTO_CANCELLED || status == PTO_PEER_LOST) rt.has_reported_failure = true;
  check_status(status);
}

/// Bytes of the runtime's own memory, or of a kernel's operand, as an array that keeps the memory mapped.
nb::object view(OpenRuntimeRef self, uint64_t address, uint64_t bytes) {
  struct Owner {
    OpenRuntime* rt;
    PyObject* object;
  };
  OpenRuntime& rt = *self.p;
  auto* reference = new Owner{&rt, self.h.inc_ref().ptr()};
  ++rt.num_views;
  nb::capsule owner(reference, [](void* context) noexcept {
    auto* dropped = static_cast<Owner*>(context);
    if (--dropped->rt->num_views == 0 && dropped->rt->is_waiting) dropped->rt->close_now();
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

void open(OpenRuntime* self, nb::object task_type, const nb::kwargs& options) {
  std::optional<uint32_t> num_workers;
  std::vector<uint8_t> worker_types;
  std::optional<std::string> shared_path;
  bool pin = false;
  pto_config config;
  pto_config_init(&config);
  Keywords(options)
      .set<"num_workers">(num_workers)
      .set<"window">(config.window)
      .set<"max_submitters">(config.max_submitters)
      .set<"max_handles">(config.max_handles)
      .set<"max_regions">(config.max_regions)
      .set<"max_events">(config.max_events)
      .set<"heap_bytes">(config.heap_bytes)
      .set<"worker_types">(worker_types)
      .set<"pin">(pin)
      .set<"shared_path">(shared_path)
      .set<"peer_timeout_s">(config.peer_timeout_s)
      .done();
  config.num_workers = !num_workers ? 0 : *num_workers == 0 ? PTO_NO_WORKERS : *num_workers;
  config.worker_types = worker_types.empty() ? nullptr : worker_types.data();
  config.flags = pin ? PTO_PIN : 0;
  config.shared_path = shared_path ? shared_path->c_str() : nullptr;
  PTORuntime* runtime = nullptr;
  const int status = without_gil([&] { return pto_runtime_open(&config, &runtime); });
  check_status(status);
  new (self) OpenRuntime{};
  self->runtime = runtime;
  self->num_workers = num_workers.value_or(1);
  self->task_type = std::move(task_type);
  self->keep_alive = nb::none();
}

pto_kernel add_kernel(OpenRuntime& rt, const std::string& name, uint64_t address, uint32_t flags) {
  const Call call(rt);
  const pto_kernel_fn function =
      address == 0 ? run_python_kernel : reinterpret_cast<pto_kernel_fn>(static_cast<uintptr_t>(address));
  const pto_kernel kernel = pto_kernel_add(rt.runtime, name.c_str(), function, flags);
  check_status(kernel);
  return kernel;
}

template <class Result, Result (*function)(PTORuntime*, pto_handle, const pto_region*, double)>
uint64_t wait_for_buffer(OpenRuntime& rt, const Operand& operand, nb::handle timeout) {
  const double seconds = seconds_of(timeout);
  const Call call(rt);
  const pto_region* region = operand.has_region ? &operand.region : nullptr;
  const Result address = without_gil([&] { return function(rt.runtime, operand.handle, region, seconds); });
  drop_finished_records();
  if (address == nullptr) {
    rt.has_reported_failure = true;
    raise_status(pto_last_status());
  }
  return reinterpret_cast<uintptr_t>(address);
}

void replay(OpenRuntime& rt, pto_recording recording, std::vector<uint64_t> from, std::vector<uint64_t> to) {
  const Call call(rt);
  check_status(without_gil(
      [&] { return pto_replay(rt.runtime, recording, from.data(), to.data(), static_cast<uint32_t>(from.size())); }));
}

void run_orchestration(OpenRuntime& rt, const std::string& path, const std::string& name, const nb::sequence& values) {
  const Call call(rt);
  std::vector<uint64_t> args;
  for (nb::handle value : values) args.push_back(bits_of("run_orchestration", value));
  args.push_back(0);  // so that data() is valid also for an empty list
  check_status(without_gil([&] { return pto_run_orchestration(rt.runtime, path.c_str(), name.c_str(), args.data()); }));
}

int run_workers(const std::string& path, const std::vector<std::string>& libraries) {
  std::vector<const char*> paths;
  for (const std::string& library : libraries) paths.push_back(library.c_str());
  const int status =
      without_gil([&] { return pto_workers_run(path.c_str(), paths.data(), static_cast<uint32_t>(paths.size())); });
  if (status < 0 && status != PTO_PEER_LOST) raise_status(status);
  return status;
}

void bind_open_runtime(nb::class_<OpenRuntime>& rt) {
  rt.def("__init__", &open, nb::arg("task_type"), nb::arg("options"), "Keyword arguments: members of pto_config.")
      .def("close", &OpenRuntime::close, nb::arg("cancels") = false,
           "Wait for every task, or cancel what has not started.")
      .def("close_at_exit", &OpenRuntime::close_at_exit, nb::arg("patience_s"),
           "Returns False if tasks are left that do not end.")
      .def_prop_ro("is_open",
                   [](const OpenRuntime& rt) { return rt.runtime != nullptr && !rt.is_closing && !rt.is_inherited(); })
      .def_ro("has_reported_failure", &OpenRuntime::has_reported_failure,
              "Whether a wait or a read has raised a task's failure.")
      .def_prop_rw(
          "keep_alive", [](const OpenRuntime& rt) { return rt.keep_alive; },
          [](OpenRuntime& rt, nb::object value) { rt.keep_alive = std::move(value); })
      .def("submit", &submit, nb::arg("kernel"), nb::arg("worker_type").none(), nb::arg("params").none(),
           nb::arg("scalars").none(), nb::arg("extras").none(), "Submit a task; returns its handle.")
      .def("submit_python", &submit_python, nb::arg("kernel"), nb::arg("worker_type").none(), nb::arg("params"),
           nb::arg("record"), nb::arg("extras").none(), "Submit a task that runs a record and keeps it until its end.")
      .def("wait_any", &wait_any, nb::arg("tasks"), nb::arg("timeout").none())
      .def("wait_all", &wait_all, nb::arg("timeout").none())
      .def("add_kernel", &add_kernel, "Address 0: the kernel that runs Python records.")
      .def(
          "find_kernel",
          [](OpenRuntime& rt, const std::string& name, uint32_t flags) {
            const Call call(rt);
            const pto_kernel kernel = pto_kernel_find_as(rt.runtime, name.c_str(), flags);
            check_status(kernel);
            return kernel;
          },
          nb::arg("name"), nb::arg("flags") = 0)
      .def("load_library", checked<pto_library_load, const char*>())
      .def("register",
           [](OpenRuntime& rt, uint64_t address, uint64_t bytes) {
             const Call call(rt);
             return id_or_raise(
                 pto_register(rt.runtime, reinterpret_cast<void*>(static_cast<uintptr_t>(address)), bytes));
           })
      .def("alloc", made<pto_alloc, uint64_t>())
      .def(
          "unregister",
          [](OpenRuntime& rt, pto_handle handle, nb::handle timeout) {
            const double seconds = seconds_of(timeout);
            const Call call(rt);
            check_status(without_gil([&] { return pto_unregister(rt.runtime, handle, seconds); }));
          },
          nb::arg("handle"), nb::arg("timeout").none())
      .def("freeze",
           [](OpenRuntime& rt, pto_handle handle, bool frozen) {
             const Call call(rt);
             check_status(without_gil([&] { return pto_freeze(rt.runtime, handle, frozen ? 1 : 0); }));
           })
      .def("address",
           [](OpenRuntime& rt, pto_handle handle) {
             const Call call(rt);
             return id_or_raise(reinterpret_cast<uintptr_t>(pto_address(rt.runtime, handle)));
           })
      .def("read", &wait_for_buffer<const void*, pto_read>, nb::arg("operand"), nb::arg("timeout").none())
      .def("write", &wait_for_buffer<void*, pto_write>, nb::arg("operand"), nb::arg("timeout").none())
      .def("scope_begin",
           [](OpenRuntime& rt) {
             const Call call(rt);
             pto_scope_begin(rt.runtime);
             check_status(pto_last_status());
           })
      .def("scope_end", checked<pto_scope_end>())
      .def("task_complete",
           [](OpenRuntime& rt, pto_task task, int status) {
             const Call call(rt, true);
             check_status(pto_task_complete(rt.runtime, task, status));
           })
      .def("cancel_all", checked<pto_cancel_all>())
      .def("event_open", made<pto_event_open>())
      .def("event_post",
           [](OpenRuntime& rt, pto_event event, uint64_t add) {
             const Call call(rt, true);
             check_status(pto_event_post(rt.runtime, event, add));
           })
      .def("event_value",
           [](OpenRuntime& rt, pto_event event) {
             const Call call(rt, true);
             return pto_event_value(rt.runtime, event);
           })
      .def("record_begin", checked<pto_record_begin>())
      .def("record_end", made<pto_record_end>())
      .def("replay", &replay)
      .def("recording_free", checked<pto_recording_free, pto_recording>())
      .def("run_orchestration", &run_orchestration)
      .def("view", &view, "Bytes at an address as an array.");
}

}  // namespace

void bind_tasks(nb::module_& m) {
  nb::module_ tasks = m.def_submodule("tasks", "The task runtime's C interface.");
  install_hooks();
  nb::class_<OpenRuntime> rt(tasks, "OpenRuntime", "An open runtime.");
  bind_open_runtime(rt);
  bind_trace(rt);
  bind_params(tasks);
  bind_regions(tasks);
  bind_handles(tasks);
  tasks.def("note_interrupt", &note_interrupt, "Report that KeyboardInterrupt has ended a kernel on this thread.");
  tasks.def("addresses", &addresses, "The addresses in a kernel's table of buffers, given the table's address.");
  tasks.def("should_stop", [] { return pto_should_stop() != 0; });
  tasks.def("run_workers", &run_workers, "pto_workers_run; returns 0 or PTO_PEER_LOST.");
}

}  // namespace tilewise::bind
