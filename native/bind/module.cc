// The Python module: a list of binders, one per native package.
#include <nanobind/nanobind.h>

#include "bind/bind.h"

NB_MODULE(_native, m) {
  m.doc() = "Native core of Tilewise. Private: use tilewise.kernels and tilewise.runtime.";
  tilewise::bind::bind_kernels(m);
  tilewise::bind::bind_runtime(m);
  tilewise::bind::bind_tasks(m);
}
