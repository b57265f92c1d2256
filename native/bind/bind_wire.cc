// The Python face of native/comm's wire: the processes that mpiexec has started, and frames between them.
//
// Checks nothing that the native side checks itself. What waits does so with the GIL released, in slices between which
// Python sees its signals.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

#include "base/clock.h"
#include "bind/bind.h"
#include "comm/mpi_library.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

using comm::Wire;

constexpr int64_t kSliceNs = 50'000'000;

int64_t in_ns(double seconds) { return static_cast<int64_t>(std::min(seconds, 1e9) * 1e9); }

bool send_frame(Wire& wire, int64_t to, const nb::bytes& frame, double limit_s) {
  std::string bytes(frame.c_str(), frame.size());
  nb::gil_scoped_release release;
  return wire.send_frame(to, std::move(bytes), in_ns(limit_s));
}

nb::object receive_frame(Wire& wire, int64_t from, double limit_s) {
  const int64_t until = now_ns() + in_ns(limit_s);
  std::optional<std::string> frame;
  do {
    {
      nb::gil_scoped_release release;
      frame = wire.receive_frame(from, std::clamp<int64_t>(until - now_ns(), 0, kSliceNs));
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  } while (!frame && !wire.has_failed() && now_ns() < until);
  if (!frame) return nb::none();
  return nb::bytes(frame->data(), frame->size());
}

double probe(Wire& wire, int64_t from, int64_t bytes, double limit_s) {
  nb::gil_scoped_release release;
  return static_cast<double>(wire.probe(from, bytes, in_ns(limit_s))) * 1e-9;
}

nb::dict traffic(const Wire& wire) {
  nb::dict result;
  result["bytes_sent"] = wire.traffic().bytes_sent;
  result["bytes_received"] = wire.traffic().bytes_received;
  return result;
}

}  // namespace

void bind_wire(nb::module_& m) {
  nb::module_ wire = m.def_submodule("wire", "Messages between processes that share no memory, over MPI.");
  nb::class_<Wire>(wire, "Wire", "This process among those that mpiexec has started together.")
      .def_prop_ro("rank", &Wire::rank)
      .def_prop_ro("size", &Wire::size)
      .def("send_frame", &send_frame, nb::arg("to"), nb::arg("frame"), nb::arg("limit_s"),
           "False: the other process did not take it in time, or the wire has failed.")
      .def("receive_frame", &receive_frame, nb::arg("source"), nb::arg("limit_s"),
           nb::sig("def receive_frame(self, source: int, limit_s: float) -> bytes | None"),
           "The next frame of a process; None: there was none in time, or the wire has failed.")
      .def_prop_ro("cause", &Wire::cause, "Why it has failed or ended; empty while it goes well.")
      .def(
          "quiet_s",
          [](const Wire& self, int64_t process) { return static_cast<double>(self.quiet_ns(process)) * 1e-9; },
          nb::arg("process"), "For how long nothing was heard of a process, in seconds.")
      .def("probe", &probe, nb::arg("source"), nb::arg("num_bytes"), nb::arg("limit_s"),
           "Seconds until so many bytes have come from a process; negative: longer than that.")
      .def("fail", &Wire::fail, nb::arg("cause"), "A process is lost: nothing is handed to MPI from now on.")
      .def("finish", &Wire::finish, nb::call_guard<nb::gil_scoped_release>(),
           "End MPI, together with all other processes.")
      .def("traffic", &traffic, "bytes_sent and bytes_received: of payloads, frames among them.");
  wire.def("join_world", &comm::join_world, nb::arg("table"), nb::arg("library"),
           nb::call_guard<nb::gil_scoped_release>(),
           "Start MPI: a file of its functions, and the library to load before it, or ''.");
  wire.def("describe_library", &comm::describe_library, nb::arg("table"), nb::arg("library"),
           "Which MPI that is, in a line.");
}

}  // namespace tilewise::bind
