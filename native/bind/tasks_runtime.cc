// Opening and closing a runtime, counting the calls in progress, and raising errors from statuses.
//
// Closing is the most delicate interaction with Python: other threads may be inside of calls, kernels may need the GIL,
// and arrays may use the runtime's memory. Everything except the waits runs with the GIL.
#include <time.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>

#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

/// The exception for a status. A long message is cut at a byte, possibly inside a character.
nb::object error_of(int status, const std::string& sentence) {
  const auto length = static_cast<Py_ssize_t>(sentence.size());
  const nb::object text = nb::steal(PyUnicode_DecodeUTF8(sentence.data(), length, "replace"));
  if (!text.is_valid()) throw nb::python_error();
  return nb::module_::import_("tilewise.runtime.failures").attr("error_of")(status, text);
}

[[noreturn]] void raise_again(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

}  // namespace

Task::~Task() {
  if (rt != nullptr && rt->runtime != nullptr) pto_task_release(rt->runtime, id);
}

Call::Call(OpenRuntime& rt, bool is_late) : rt_(rt), is_counted_(!is_late && !is_inside_python_kernel()) {
  if (rt.runtime == nullptr || rt.is_drained || (rt.is_closing && is_counted_)) {
    raise_status(PTO_CLOSED, "[runtime] the runtime must be open; got a call after its close; open a new one");
  }
  if (is_counted_) ++rt_.num_calls;
}

Call::~Call() {
  if (is_counted_) --rt_.num_calls;
}

// Rejects new calls except those that end tasks; waits for threads inside calls and for tasks; then rejects all calls.
void OpenRuntime::close(bool cancels) {
  if (runtime == nullptr || is_closing) return;
  if (is_inside_python_kernel()) {
    raise_status(PTO_BAD_ARGUMENT,
                 "[runtime.close] a runtime must be closed from outside its tasks; got a call inside one; "
                 "close it where it was opened");
  }
  is_closing = true;
  try {
    if (!is_inherited()) drain(cancels);
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
  } catch (...) {
    is_closing = false;  // a signal handler has raised: the runtime stays open
    throw;
  }
  is_drained = true;
  if (num_views > 0) {
    is_waiting = true;
  } else {
    close_now();
  }
}

// Called at interpreter exit; queued tasks still run. When no task runs any more, tasks that wait for events are
// cancelled, because threads that would post have ended. A first signal cancels tasks that have not started, a second
// one stops waiting. Returns false if tasks are left and none has ended for `patience_s`; then the process must end
// without waiting for its threads.
bool OpenRuntime::close_at_exit(double patience_s) {
  if (runtime == nullptr || is_closing || is_inherited()) return true;
  is_closing = true;
  using Clock = std::chrono::steady_clock;
  constexpr auto kQuiet = std::chrono::milliseconds(100);
  const auto patience = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(patience_s));
  auto last_end = Clock::now(), last_work = last_end;
  uint64_t num_ended = 0;
  bool cancels = false;
  nb::object interrupt;  // the exception of a signal handler
  ask_to_leave(true);  // makes the main thread's waits end after a while, also if it must run the tasks itself
  const auto leave = [](void*) { ask_to_leave(false); };
  const std::unique_ptr<void, decltype(leave)> guard(this, leave);
  while (true) {
    int status = PTO_OK;
    try {
      status = without_gil([&] {
        if (cancels) pto_cancel_all(runtime);
        const int waited = pto_wait_all(runtime, num_workers == 0 ? PTO_FOREVER : 0.02);
        const timespec nap{0, waited == PTO_OK ? 1'000'000 : 0};  // other threads' tasks may still run
        nanosleep(&nap, nullptr);
        return waited;
      });
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    } catch (nb::python_error& error) {
      const bool is_second = interrupt.is_valid();
      interrupt = nb::borrow(error.value());
      if (is_second) break;
      cancels = true;
    }
    drop_finished_records();
    if (status == PTO_TASK_FAILED && !has_reported_failure) {
      PySys_FormatStderr("%S\n", error_of(status, pto_last_error()).ptr());
    }
    pto_stats stats;
    pto_get_stats(runtime, &stats);
    // after a timed-out wait, tasks may have ended whose status was not reported
    const bool has_ended = status != PTO_TIMEOUT && num_calls == 0 && stats.num_submitted == stats.num_completed;
    if (status == PTO_PEER_LOST || has_ended) {
      close_now();
      if (interrupt.is_valid()) raise_again(interrupt);
      return true;
    }
    const auto now = Clock::now();
    const bool is_idle = pto_is_idle(runtime) == 1;
    if (stats.num_completed != num_ended) last_end = last_work = now;
    if (!is_idle) last_work = now;
    num_ended = stats.num_completed;
    if (!cancels && now - last_work > kQuiet) {
      cancels = true;
      PySys_FormatStderr(
          "[runtime.close] tasks must be able to end before the interpreter does; got %llu that wait for events or for "
          "a thread to end them when nothing runs; what has not started is cancelled: post the events, or cancel it\n",
          static_cast<unsigned long long>(stats.num_submitted - stats.num_completed));
    }
    if (now - last_end > patience) break;
  }
  char quiet[32];  // PySys_FormatStderr has no format for floats
  std::snprintf(quiet, sizeof(quiet), "%.3g", std::chrono::duration<double>(Clock::now() - last_end).count());
  PySys_FormatStderr(
      "[runtime.close] tasks must end before the interpreter does; some still run and none has ended for %s s; the "
      "process ends without them: end tasks that return LATER, and kernels that never return, or close the runtime to "
      "wait for them\n",
      quiet);
  return false;
}

// cancels: cancels tasks that have not started, and those that running tasks still submit. Otherwise waits for all.
void OpenRuntime::drain(bool cancels) {
  const auto is_busy = [&] {
    pto_stats stats;
    pto_get_stats(runtime, &stats);
    return num_calls > 0 || (num_workers > 0 && stats.num_submitted != stats.num_completed);
  };
  const double slice_s = cancels && num_workers > 0 ? 0.02 : PTO_FOREVER;
  const auto wait = [&] {
    if (cancels) pto_cancel_all(runtime);
    return pto_wait_all(runtime, slice_s);
  };
  int status = without_gil(wait);
  const auto is_interrupted = [] {
    return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
  };  // during the call, or now
  while ((is_busy() || status == PTO_TIMEOUT) && status != PTO_PEER_LOST && !is_interrupted()) {
    status = without_gil([&] {
      const timespec nap{0, 1'000'000};
      nanosleep(&nap, nullptr);
      return wait();
    });
  }
}

void OpenRuntime::close_now() {
  PTORuntime* closed = runtime;
  runtime = nullptr;  // before the GIL is released: a handle that is dropped meanwhile must not call a closed runtime
  is_waiting = false;
  without_gil([&] { return pto_runtime_close(closed); });
  drop_finished_records();
  keep_alive = nb::none();
}

// Python checks values that are neither None nor a float.
double seconds_of(nb::handle timeout) {
  if (timeout.is_none()) return PTO_FOREVER;
  double seconds = PyFloat_CheckExact(timeout.ptr()) ? PyFloat_AsDouble(timeout.ptr()) : NAN;
  if (std::isnan(seconds)) seconds = nb::cast<double>(checked_in_python("seconds")("wait", timeout));
  return seconds;
}

nb::object checked_in_python(const char* check) {
  PyErr_Clear();  // the conversion's error
  return nb::module_::import_("tilewise.runtime.checks").attr(check);
}

void raise_status(int status, const char* text) {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();  // a signal handler has raised
  raise_interrupt();
  const std::string sentence = text != nullptr ? text : pto_last_error();
  raise_again(error_of(status, sentence));
}

}  // namespace tilewise::bind
