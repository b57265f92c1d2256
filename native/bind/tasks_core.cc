// Opening, counting and closing of calls into the task runtime, and what its statuses raise.
//
// Close is where Python and the runtime meet most closely: other threads may be inside, kernels may need the GIL, and
// arrays may lie on the runtime's memory. All of it runs under the GIL except the waits.
#include <time.h>

#include <chrono>
#include <cmath>
#include <string>

#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

Task::~Task() {
  if (core != nullptr && core->runtime != nullptr) pto_task_release(core->runtime, id);
}

Call::Call(Core& core, bool is_late) : core_(core), is_counted_(!is_late && !is_inside_python_kernel()) {
  if (core.runtime == nullptr || core.is_drained || (core.is_closing && is_counted_)) {
    raise_status(PTO_CLOSED, "[runtime] the runtime must be open; got a call after its close; open a new one");
  }
  if (is_counted_) ++core_.num_calls;
}

Call::~Call() {
  if (is_counted_) --core_.num_calls;
}

// Nobody may come but who ends tasks; whoever is inside leaves; the tasks end; then nobody may come at all.
void Core::close() {
  if (runtime == nullptr || is_closing) return;
  if (is_inside_python_kernel()) {
    raise_status(PTO_BAD_ARGUMENT,
                 "[runtime.close] a runtime is closed from outside its tasks; got a call inside one; "
                 "close it where it was opened");
  }
  is_closing = true;
  if (!is_inherited()) drain();
  if (PyErr_Occurred() != nullptr) {
    is_closing = false;  // a signal's handler has spoken: the runtime is as open as before
    throw nb::python_error();
  }
  is_drained = true;
  if (num_views > 0) {
    is_waiting = true;
  } else {
    close_now();
  }
}

// The interpreter ends: nothing new begins, what waits is cancelled again and again (a thread may still be inside
// submit), and a task that only somebody outside could end is left behind after ten seconds.
void Core::close_at_exit() {
  if (runtime == nullptr || is_closing || is_inherited()) return;
  is_closing = true;
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (std::chrono::steady_clock::now() < patience) {
    const int status = without_gil([&] {
      pto_cancel_all(runtime);
      const int waited = pto_wait_all(runtime, 0.05);
      const timespec nap{0, waited == PTO_TIMEOUT ? 0 : 5'000'000};  // only this thread's tasks were waited for
      nanosleep(&nap, nullptr);
      return waited;
    });
    pto_stats stats;
    pto_get_stats(runtime, &stats);
    if (status == PTO_PEER_LOST || (num_calls == 0 && stats.num_submitted == stats.num_completed)) return close_now();
    if (num_workers == 0 && status != PTO_TIMEOUT && num_calls == 0) return close_now();
  }
  PySys_WriteStderr(
      "[runtime.close] tasks must end before the interpreter does; some still run after 10 s; end tasks that "
      "return LATER, and kernels that never return\n");
  runtime = nullptr;  // its threads go with the process
}

void Core::drain() {
  const auto is_busy = [&] {
    pto_stats stats;
    pto_get_stats(runtime, &stats);
    return num_calls > 0 || (num_workers > 0 && stats.num_submitted != stats.num_completed);
  };
  const auto wait = [&] {
    const int status = pto_wait_all(runtime, PTO_FOREVER);
    const timespec nap{0, 1'000'000};
    nanosleep(&nap, nullptr);
    return status;
  };
  int status = without_gil([&] { return pto_wait_all(runtime, PTO_FOREVER); });
  while (is_busy() && status != PTO_PEER_LOST && PyErr_CheckSignals() == 0) status = without_gil(wait);
}

void Core::close_now() {
  PTORuntime* closed = runtime;
  runtime = nullptr;  // before the GIL is let go: a handle that is dropped meanwhile must not ask a closed runtime
  is_waiting = false;
  without_gil([&] { return pto_runtime_close(closed); });
  drop_finished_records();
  keep_alive = nb::none();
}

// What is neither None nor a float is Python's to judge.
double seconds_of(nb::handle timeout) {
  if (timeout.is_none()) return PTO_FOREVER;
  double seconds = PyFloat_CheckExact(timeout.ptr()) ? PyFloat_AS_DOUBLE(timeout.ptr()) : NAN;
  if (std::isnan(seconds)) seconds = nb::cast<double>(checked_in_python("seconds")("wait", timeout));
  return seconds < 0 ? 0.0 : seconds;
}

nb::object checked_in_python(const char* check) {
  PyErr_Clear();  // what the conversion said of the value
  return nb::module_::import_("tilewise.runtime.checks").attr(check);
}

void raise_status(int status, const char* text) {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();  // a signal's handler has spoken
  const std::string sentence = text != nullptr ? text : pto_last_error();
  const nb::object error = nb::module_::import_("tilewise.runtime.failures").attr("error_of")(status, sentence.c_str());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

}  // namespace tilewise::bind
