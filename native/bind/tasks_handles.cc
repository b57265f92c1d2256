// Handles of submitted tasks: their end, their failure, and callbacks.
#include <string>

#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

void raise_task_error(const Task& task, int status) {
  task.rt->has_reported_failure = true;
  char text[512];
  pto_task_error(task.rt->runtime, task.id, text, sizeof(text));
  raise_status(status, text);
}

void wait_task(const Task& task, nb::handle timeout) {
  const double seconds = seconds_of(timeout);
  const Call call(*task.rt);
  drop_finished_records();
  PTORuntime* runtime = task.rt->runtime;
  const int status = pto_is_complete(runtime, task.id) == 1
                         ? pto_wait(runtime, task.id, 0)
                         : without_gil([&] { return pto_wait(runtime, task.id, seconds); });
  drop_finished_records();
  if (status == PTO_TASK_FAILED || status == PTO_CANCELLED) raise_task_error(task, status);
  if (status == PTO_TIMEOUT) {
    const std::string text =
        std::string("[runtime.wait] a task must end within the timeout; got one that still runs or waits after ") +
        nb::repr(timeout).c_str() + " s; wait longer, or cancel it";
    raise_status(status, text.c_str());
  }
  if (status == PTO_PEER_LOST) task.rt->has_reported_failure = true;
  check_status(status);
}

bool is_complete(const Task& task) {
  const Call call(*task.rt);
  const int done = pto_is_complete(task.rt->runtime, task.id);
  check_status(done);
  return done == 1;
}

}  // namespace

void bind_handles(nb::module_& m) {
  nb::class_<Task>(m, "Task", nb::is_weak_referenceable(), "A submitted task; base of TaskHandle.")
      .def_ro("id", &Task::id, "The runtime's id of the task; never used again.")
      .def_ro("native", &Task::owner, "The runtime's native object.")
      .def_ro("output_handles", &Task::outputs, "Handles of runtime-owned outputs; None without such outputs.")
      .def("wait", &wait_task, nb::arg("timeout") = nb::none(),
           "Wait until the task has ended; `timeout` in seconds, None for ever. Without one, the caller helps to run "
           "tasks.\n\nRaises:\n    TaskFailed: its kernel failed, or a task that it depends on did.\n    "
           "concurrent.futures.CancelledError: it was cancelled.\n    TimeoutError: it still runs or waits.")
      .def("is_complete", &is_complete, "Whether the task has ended, successfully or not. Never blocks.")
      .def(
          "cancel",
          [](const Task& task) {
            const Call call(*task.rt);
            check_status(pto_cancel(task.rt->runtime, task.id));
          },
          "Skip the task if it has not started; tasks that depend on it are cancelled with it. It waits for no event "
          "any "
          "more.")
      .def(
          "detach",
          [](const Task& task) {
            const Call call(*task.rt);
            pto_task_release(task.rt->runtime, task.id);
          },
          "Report that the handle is destroyed: the runtime may drop the task's error.")
      .def(
          "notify",
          [](const Task& task, nb::object callback) {
            if (PyCallable_Check(callback.ptr()) == 0) checked_in_python("callback")("notify", callback);
            const Call call(*task.rt);
            if (task.rt->num_workers == 0) {
              raise_status(PTO_BAD_ARGUMENT,
                           "[runtime.await] an awaited task needs a worker to run it; got a runtime with none; "
                           "open it with workers, or use wait()");
            }
            notify(*task.rt, task.id, std::move(callback));
          },
          nb::arg("callback").none(),
          "Call back once, on the thread that ends the task; at once if it has ended. The callback must be short.");
}

}  // namespace tilewise::bind
