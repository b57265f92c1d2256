// Python inside tasks: the GIL around waits, Python callables as kernels, callbacks at a task's end.
//
// A Python kernel is one C function whose first scalar is the address of a record (tilewise.runtime.python_tasks); the
// record runs the callable. References are dropped only with the GIL: the record of a completed task goes to a list,
// and the next thread that calls into the module drops it.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "bind/tasks.h"

#if defined(Py_LIMITED_API)
extern "C" void PyThreadState_DeleteCurrent();  // in the stable ABI, but not declared by its headers
#endif

namespace nb = nanobind;

namespace tilewise::bind {

uint64_t num_forks = 0;

namespace {

thread_local int python_kernel_depth = 0;
unsigned long main_thread = 0;
bool was_interrupted = false;  // read and written by the main thread
bool is_leaving = false;       // the same

std::mutex finished_mutex;  // never taken by a thread that then waits for the GIL
std::vector<PyObject*> finished_records;
std::atomic<bool> has_finished_records{false};

PyInterpreterState* interpreter = nullptr;  // the one that loaded the module
std::mutex states_mutex;  // locked while a thread state is created

/// Acquires the GIL, also on threads that Python did not create.
///
/// Like PyGILState_Ensure, but without forks while a thread state is created: that takes a lock of the interpreter
/// without the GIL, which the interpreter's fork does not reset, so the child would wait for ever.
class Gil {
 public:
  Gil() {
    if (PyGILState_GetThisThreadState() != nullptr) {
      state_ = PyGILState_Ensure();
      return;
    }
    {
      std::lock_guard guard(states_mutex);
      made_ = PyThreadState_New(interpreter);
    }
    PyEval_RestoreThread(made_);
  }
  ~Gil() {
    if (made_ == nullptr) {
      PyGILState_Release(state_);
    } else {
      PyThreadState_Clear(made_);
      PyThreadState_DeleteCurrent();
    }
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyThreadState* made_ = nullptr;
  PyGILState_STATE state_ = PyGILState_UNLOCKED;
};

bool has_gil() {
#if defined(Py_LIMITED_API)
  return PyThreadState_GetDict() != nullptr;  // null if the calling thread has no attached thread state
#else
  return PyGILState_Check() != 0;
#endif
}

void* leave_python() { return Py_IsInitialized() != 0 && has_gil() ? PyEval_SaveThread() : nullptr; }

// During finalization, taking the GIL would end this thread by unwinding it, through frames that must not be unwound.
// So the thread pauses until the process ends.
void enter_python(void* state) {
  while (Py_IsInitialized() == 0) pause();
  PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

// A handler's exception stays in the thread's state; raise_status finds it there.
int has_signal() {
  if (PyThread_get_thread_ident() != main_thread) return 0;
  if (was_interrupted) return 1;  // raise_interrupt raises it
  const Gil gil;
  return PyErr_CheckSignals() != 0 || is_leaving ? 1 : 0;
}

void finish_record(void* record) {
  std::lock_guard guard(finished_mutex);
  finished_records.push_back(static_cast<PyObject*>(record));
  has_finished_records.store(true, std::memory_order_release);
}

void call_back(void* callback) {
  const Gil gil;
  PyObject* function = static_cast<PyObject*>(callback);
  PyObject* result = PyObject_CallNoArgs(function);
  if (result == nullptr) PyErr_WriteUnraisable(function);
  Py_XDECREF(result);
  Py_DECREF(function);
}

// A forked child has only this thread, possibly with another id, and must find all locks free.
void before_fork() {
  states_mutex.lock();
  finished_mutex.lock();
}
void after_fork() {
  finished_mutex.unlock();
  states_mutex.unlock();
}
void after_fork_in_child() {
  after_fork();
  main_thread = PyThread_get_thread_ident();
  python_kernel_depth = 0;
  ++num_forks;
}

/// Ends a forked child at the end of the kernel in which it was forked: the worker, the runtime and its other tasks
/// belong to the parent.
[[noreturn]] void end_child(PyObject* result) {
  const bool is_ok = result != nullptr && PyLong_Check(result);
  if (!is_ok) PySys_FormatStderr("a forked child left the kernel in which it was forked: %S\n", result);
  _exit(is_ok ? 0 : 1);
}

}  // namespace

void raise_interrupt() {
  if (!was_interrupted || PyThread_get_thread_ident() != main_thread) return;
  was_interrupted = false;
  if (PyErr_Occurred() == nullptr) PyErr_SetNone(PyExc_KeyboardInterrupt);
  throw nb::python_error();
}

void note_interrupt() {
  if (PyThread_get_thread_ident() == main_thread) was_interrupted = true;
}

void ask_to_leave(bool leaves) { is_leaving = leaves; }

bool is_inside_python_kernel() { return python_kernel_depth > 0; }

void install_hooks() {
  interpreter = PyInterpreterState_Get();
  main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  pthread_atfork(before_fork, after_fork, after_fork_in_child);
  pto_set_hooks(leave_python, enter_python, has_signal);
}

int run_python_kernel(void* const* buffers, const uint64_t* scalars) {
  const Gil gil;
  ++python_kernel_depth;
  const uint64_t forks = num_forks;
  int status = PTO_TASK_FAILED;
  {
    PyObject* record = reinterpret_cast<PyObject*>(static_cast<uintptr_t>(scalars[0]));
    PyObject* result = PyObject_CallMethod(record, "run", "K", reinterpret_cast<unsigned long long>(buffers));
    if (num_forks != forks) end_child(result);
    if (result == nullptr) {  // the record itself failed
      PyErr_WriteUnraisable(record);
      pto_fail("the interpreter could not run it");
    } else if (PyUnicode_Check(result)) {
      const char* text = PyUnicode_AsUTF8AndSize(result, nullptr);
      pto_fail(text != nullptr ? text : "a Python exception");
      PyErr_Clear();
      if (was_interrupted && PyThread_get_thread_ident() == main_thread) status = PTO_INTERRUPTED;
    } else {
      status = static_cast<int>(PyLong_AsLong(result));
    }
    Py_XDECREF(result);
  }
  --python_kernel_depth;
  return status;
}

void keep_until_done(OpenRuntime& rt, pto_task task, nb::object record) {
  check_status(pto_notify(rt.runtime, task, finish_record, record.release().ptr()));
}

void drop_finished_records() {
  if (!has_finished_records.load(std::memory_order_acquire)) return;
  std::vector<PyObject*> dropped;
  {
    std::lock_guard guard(finished_mutex);
    dropped.swap(finished_records);
    has_finished_records.store(false, std::memory_order_release);
  }
  for (PyObject* record : dropped) Py_DECREF(record);
}

void notify(OpenRuntime& rt, pto_task task, nb::object callback) {
  PyObject* function = callback.release().ptr();
  const int status = pto_notify(rt.runtime, task, call_back, function);
  if (status < 0) {
    Py_DECREF(function);
    raise_status(status);
  }
}

}  // namespace tilewise::bind
