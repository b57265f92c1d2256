// The Python module: a list of binders, one per native package.
#include <nanobind/nanobind.h>

#include "bind/bind.h"

NB_MODULE(_native, m) {
  // What a daemon thread's frames or a kept traceback hold, the interpreter never lets go: at exit nanobind would print
  // every such object, and every type with it, below the program's own error. Tests look for leaks of ours instead.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native module of Tilewise. Private: use tilewise.kernels and tilewise.runtime.";
  tilewise::bind::bind_kernels(m);
  tilewise::bind::bind_programs(m);
  tilewise::bind::bind_sampling(m);
  tilewise::bind::bind_tasks(m);
  tilewise::bind::bind_weights(m);
  tilewise::bind::bind_connection(m);
}
