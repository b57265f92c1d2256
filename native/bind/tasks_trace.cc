// Inspecting a runtime from Python: its counters, its trace, its dependency graph.
#include <algorithm>
#include <vector>

#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

nb::dict stats(OpenRuntime& rt) {
  const Call call(rt);
  pto_stats s;
  check_status(pto_get_stats(rt.runtime, &s));
  nb::dict d;
  d["num_submitted"] = s.num_submitted;
  d["num_completed"] = s.num_completed;
  d["num_failed"] = s.num_failed;
  d["num_helped"] = s.num_helped;
  d["stall_ns"] = s.stall_ns;
  d["num_stalls"] = s.num_stalls;
  d["window"] = s.window;
  d["window_high"] = s.window_high;
  d["heap_bytes"] = s.heap_bytes;
  d["heap_high_bytes"] = s.heap_high_bytes;
  d["handles"] = s.handles;
  d["handles_high"] = s.handles_high;
  d["regions"] = s.regions;
  d["regions_high"] = s.regions_high;
  d["metadata_bytes"] = s.metadata_bytes;
  return d;
}

nb::list trace_tasks(OpenRuntime& rt) {
  const Call call(rt);
  std::vector<pto_trace_task> records(pto_trace_tasks(rt.runtime, nullptr, 0));
  records.resize(std::min<uint64_t>(records.size(), pto_trace_tasks(rt.runtime, records.data(), records.size())));
  nb::list result;
  for (const pto_trace_task& r : records) {
    result.append(nb::make_tuple(r.task, pto_kernel_name(rt.runtime, r.kernel), r.worker, r.submitter, r.scope_depth,
                                 r.status, r.priority, r.submit_ns, r.ready_ns, r.start_ns, r.end_ns,
                                 r.name[0] != 0 ? nb::object(nb::str(r.name)) : nb::none()));
  }
  return result;
}

nb::list trace_stalls(OpenRuntime& rt) {
  const Call call(rt);
  std::vector<pto_trace_stall> records(pto_trace_stalls(rt.runtime, nullptr, 0));
  records.resize(std::min<uint64_t>(records.size(), pto_trace_stalls(rt.runtime, records.data(), records.size())));
  nb::list result;
  for (const pto_trace_stall& r : records) {
    result.append(nb::make_tuple(r.submitter, r.cause, r.begin_ns, r.end_ns, r.live_tasks, r.heap_used_bytes));
  }
  return result;
}

}  // namespace

void bind_trace(nb::class_<OpenRuntime>& rt) {
  rt.def("stats", &stats)
      .def("trace_enable", checked<pto_trace_enable, uint32_t>())
      .def("trace_tasks", &trace_tasks)
      .def("trace_stalls", &trace_stalls)
      .def("graph_begin", checked<pto_graph_begin>())
      .def("graph_end", checked<pto_graph_end, const char*>());
}

}  // namespace tilewise::bind
