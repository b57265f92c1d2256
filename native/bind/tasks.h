// Shared by the files of the task runtime's Python binding: the runtime as an object, its parameters, its tasks.
//
// Only the C interface (tilewise/pto_api.h) is used, so Python, C and C++ programs see one library. Everything here is
// accessed with the GIL. Failures become Python exceptions in one place: tilewise.runtime.failures.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tilewise/tile.h"

namespace tilewise::bind {

extern uint64_t num_forks;  // since the process that loaded the module

/// An open runtime. Its memory stays mapped while arrays use it; the last array then closes it.
struct OpenRuntime {
  PTORuntime* runtime = nullptr;
  nanobind::object task_type;    // the Python class of task handles
  nanobind::object keep_alive;   // objects that must outlive the runtime: registered arrays, kernels
  bool is_closing = false;       // close was called: threads outside tasks may only make calls that end tasks
  bool is_drained = false;       // every task has ended: all calls are refused
  bool is_waiting = false;       // closed, except that arrays still use its memory
  bool has_reported_failure = false;
  uint32_t num_workers = 0;
  int num_calls = 0;             // calls in progress of threads outside tasks
  int num_views = 0;             // arrays that use its memory
  uint64_t made_after_forks = num_forks;

  bool is_inherited() const { return made_after_forks != num_forks; }  // it belongs to the parent process
  void close(bool cancels);
  bool close_at_exit(double patience_s);
  void close_now();
  void drain(bool cancels);
};

/// A buffer, or a box of one, as an operand of tasks. Subclassed in Python.
struct Operand {
  OpenRuntime* rt = nullptr;
  pto_handle handle = 0;
  bool has_region = false;
  pto_region region{};
};

/// One parameter of a task. `target` is for Python kernels: the operand, or the description of an output.
struct Param {
  OpenRuntime* rt = nullptr;  // nullptr: belongs to any runtime
  pto_param native{};
  bool has_region = false;
  pto_region region{};
  nanobind::object target;
};

/// A submitted task, the native part of its Python handle. Dropping it never blocks.
struct Task {
  OpenRuntime* rt = nullptr;
  nanobind::object owner;    // the OpenRuntime's object
  nanobind::object outputs;  // handles of runtime-owned outputs; None: no such outputs
  pto_task id = 0;
  ~Task();
};

/// Counts a call into the runtime, and rejects it if the runtime is closed.
class Call {
 public:
  /// is_late: the call is also allowed while closing, because the last tasks may wait for it. It keeps the GIL.
  explicit Call(OpenRuntime& rt, bool is_late = false);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  OpenRuntime& rt_;
  bool is_counted_;
};

/// Raises the exception for a status; the message is `text`, or this thread's last error.
[[noreturn]] void raise_status(int status, const char* text = nullptr);
inline void check_status(int status) {
  if (status < 0) raise_status(status);
}

inline uint64_t id_or_raise(uint64_t id) {
  if (id == 0) raise_status(pto_last_status());
  return id;
}

/// A method that calls pto_*(runtime, args...) with the GIL held and checks the status.
template <auto function, class... Args>
auto checked() {
  return [](OpenRuntime& rt, Args... args) {
    const Call call(rt);
    check_status(function(rt.runtime, args...));
  };
}

/// The same for calls that return an id.
template <auto function, class... Args>
auto made() {
  return [](OpenRuntime& rt, Args... args) {
    const Call call(rt);
    return id_or_raise(function(rt.runtime, args...));
  };
}

/// A function of tilewise.runtime.checks, which raises the error for a value that could not be converted here.
nanobind::object checked_in_python(const char* check);

/// Raises KeyboardInterrupt if it ended a kernel on this thread, because the user wants to end the wait that ran the
/// kernel. Only for waits of the main thread, which receives signals.
void raise_interrupt();

/// Runs a call without the GIL and returns its result.
template <class Body>
auto without_gil(Body&& body) {
  const auto result = [&] {
    nanobind::gil_scoped_release release;
    return body();
  }();
  raise_interrupt();
  return result;
}

// tasks_runtime.cc
double seconds_of(nanobind::handle timeout);  // for the C interface

/// A buffer or region of up to two dimensions as a tile of a kernel: one dimension is one row. Returns false for
/// anything else, for elements that have no pto_type, and for columns that are not contiguous.
bool describe_tile(nanobind::handle operand, pto_tile& tile);

// tasks_params.cc, tasks_regions.cc, tasks_handles.cc, tasks_trace.cc
void bind_params(nanobind::module_& m);
void bind_regions(nanobind::module_& m);
void bind_handles(nanobind::module_& m);
void bind_trace(nanobind::class_<OpenRuntime>& rt);

using OpenRuntimeRef = nanobind::pointer_and_handle<OpenRuntime>;

/// Rare attributes of tasks, which a specification refers to.
struct More {
  std::vector<pto_task> after;
  std::vector<pto_wait_for> waits;
  std::string name;
  std::vector<pto_view> views;
};

// tasks_submit.cc
pto_worker_type worker_type_of(const char* call, nanobind::handle worker_type);
/// Sets the attributes that tilewise.runtime.extras describes. `params`: to which its views belong.
void read_extras(nanobind::handle values, pto_task_spec& spec, More& more, pto_param* params);
/// The Python handle of a submitted task without outputs of the runtime.
nanobind::object handle_of(OpenRuntimeRef self, pto_task task);
bool is_numpy_bool(PyObject* value);
uint64_t bits_of(const char* call, nanobind::handle value);  // an integer, or a float as a double
nanobind::object submit(OpenRuntimeRef self, pto_kernel kernel, nanobind::handle worker_type, nanobind::handle params,
                        nanobind::handle scalars, nanobind::handle extras);
nanobind::object submit_python(OpenRuntimeRef self, pto_kernel kernel, nanobind::handle worker_type,
                               const nanobind::tuple& params, nanobind::handle record, nanobind::handle extras);

// python_kernels.cc
int run_python_kernel(void* const* buffers, const uint64_t* scalars);
bool is_inside_python_kernel();
void install_hooks();
void note_interrupt();              // called when KeyboardInterrupt has ended a Python kernel
void ask_to_leave(bool is_leaving);  // at exit: every wait of the main thread ends after a while
void keep_until_done(OpenRuntime& rt, pto_task task, nanobind::object record);
void drop_finished_records();
void notify(OpenRuntime& rt, pto_task task, nanobind::object callback);

}  // namespace tilewise::bind
