// Python binding of native/comm's connection: the processes that mpiexec started, and frames between them.
//
// It checks nothing that the native side checks itself. Waiting functions release the GIL, and return to Python in
// intervals so that signals are handled.
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

using comm::World;

constexpr int64_t kSliceNs = 50'000'000;

int64_t in_ns(double seconds) { return static_cast<int64_t>(std::min(seconds, 1e9) * 1e9); }

bool send_frame(World& world, int64_t to, const nb::bytes& frame, double limit_s) {
  std::string bytes(frame.c_str(), frame.size());
  nb::gil_scoped_release release;
  return world.frames().send(to, std::move(bytes), in_ns(limit_s));
}

nb::object receive_frame(World& world, int64_t from, double limit_s) {
  const int64_t until = now_ns() + in_ns(limit_s);
  std::optional<std::string> frame;
  do {
    {
      nb::gil_scoped_release release;
      frame = world.frames().receive(from, std::clamp<int64_t>(until - now_ns(), 0, kSliceNs));
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  } while (!frame && !world.connection()->has_failed() && now_ns() < until);
  if (!frame) return nb::none();
  return nb::bytes(frame->data(), frame->size());
}

double probe(World& world, int64_t from, int64_t bytes, double limit_s) {
  nb::gil_scoped_release release;
  return static_cast<double>(world.probes().measure(from, bytes, in_ns(limit_s))) * 1e-9;
}

double quiet_s(const World& world, int64_t process) {
  return static_cast<double>(world.heartbeat().quiet_ns(process)) * 1e-9;
}

}  // namespace

void bind_connection(nb::module_& m) {
  nb::module_ connection = m.def_submodule("connection", "Messages between processes that share no memory, over MPI.");
  // NOLINTNEXTLINE(bugprone-unused-raii): Python only passes it on
  nb::class_<comm::Connection>(connection, "Connection", "The connection of a world, for executors.");
  nb::class_<World>(connection, "World", "The processes that a launcher has started together.")
      .def_prop_ro("connection", &World::connection)
      .def_prop_ro("rank", [](const World& self) { return self.connection()->rank(); })
      .def_prop_ro("size", [](const World& self) { return self.connection()->size(); })
      .def("send_frame", &send_frame, nb::arg("to"), nb::arg("frame"), nb::arg("limit_s"),
           "Returns False if the other process did not take it in time, or the connection has failed.")
      .def("receive_frame", &receive_frame, nb::arg("source"), nb::arg("limit_s"),
           nb::sig("def receive_frame(self, source: int, limit_s: float) -> bytes | None"),
           "The next frame of a process; None if there was none in time, or the connection has failed.")
      .def("probe", &probe, nb::arg("source"), nb::arg("num_bytes"), nb::arg("limit_s"),
           "Seconds to request and receive `num_bytes` bytes from a process; negative: more than `limit_s`.")
      .def("quiet_s", &quiet_s, nb::arg("process"), "How long a process has been silent, in seconds.")
      .def_prop_ro(
          "cause", [](const World& self) { return self.connection()->cause(); },
          "Why it has failed or ended; empty while it works.")
      .def(
          "fail", [](const World& self, const std::string& cause) { self.connection()->fail(cause); }, nb::arg("cause"),
          "Report that a process is lost: no MPI call is made from now on.")
      .def("leave", &World::leave, nb::call_guard<nb::gil_scoped_release>(), "End MPI, together with all others.");
  connection.def("join_world", &comm::join_world, nb::arg("table"), nb::arg("library"), nb::arg("ending"),
                 nb::call_guard<nb::gil_scoped_release>(),
                 "Start MPI. `table`: the file with its functions; `library`: the library to load before it, or ''; "
                 "`ending`: a line "
                 "to print if MPI ends the process instead.");
}

}  // namespace tilewise::bind
