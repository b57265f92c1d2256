// The Python module: a list of binders, one per native package.
#include <nanobind/nanobind.h>

#include "bind/bind.h"

NB_MODULE(_native, m) {
  // The interpreter never frees objects of a daemon thread's frames or of a stored traceback. At exit nanobind would
  // report each of them, and all their types, after the program's own error. Tests check for leaks instead.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native module of Tilewise. Private: use tilewise.kernels and tilewise.runtime.";
  tilewise::bind::bind_arrays(m);
  tilewise::bind::bind_kernels(m);
  tilewise::bind::bind_programs(m);
  tilewise::bind::bind_sampling(m);
  tilewise::bind::bind_tasks(m);
  tilewise::bind::bind_tiles(m);
  tilewise::bind::bind_weights(m);
  tilewise::bind::bind_connection(m);
}
