// One binder per native package; module.cc calls each once.
#pragma once
#include <nanobind/nanobind.h>

namespace tilewise::bind {
void bind_arrays(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_programs(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_tasks(nanobind::module_& m);
void bind_tiles(nanobind::module_& m);
void bind_weights(nanobind::module_& m);
void bind_connection(nanobind::module_& m);
}  // namespace tilewise::bind
