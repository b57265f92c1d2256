// Tile calls from Python (tilewise.runtime.tile_calls): operands of buffers and regions, blocking and asynchronous
// calls.
//
// The native library checks each call against its kernel's declaration. Every tile call uses this path, so it allocates
// only for lists and rare options. It keeps the GIL; the runtime's hook releases it while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <memory>
#include <string>

#include "bind/bind.h"
#include "bind/fields.h"
#include "bind/items.h"
#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

/// A weight in panels: a flat buffer and the weight's rows and columns.
struct PackedTile {
  nb::object buffer;
  pto_tile tile;
};

void init_packed(PackedTile* self, nb::handle buffer, int64_t rows, int64_t cols) {
  pto_tile tile;
  if (!describe_tile(buffer, tile) || tile.rows != 1) checked_in_python("packed_buffer")(buffer);
  const auto num_elements = static_cast<int64_t>(pto_tile_packed_elements(rows, cols));
  if (num_elements == 0 || tile.cols != num_elements) {
    checked_in_python("packed_sizes")(rows, cols, num_elements, tile.cols);
  }
  tile.rows = rows;
  tile.cols = cols;
  tile.is_packed = 1;
  new (self) PackedTile{nb::borrow(buffer), tile};
}

/// The converted operands and attributes, on the stack.
struct Arguments {
  pto_tile tiles[PTO_MAX_TILES];
  int64_t ints[PTO_MAX_TILE_INTS];
  double floats[PTO_MAX_TILE_INTS];
  pto_tile_call call;
  OpenRuntimeRef rt{};
};

/// The native object of an operand's runtime.
OpenRuntimeRef runtime_of(nb::handle operand) {
  const nb::object owner = nb::getattr(operand, interned<"native">());
  return {nb::inst_ptr<OpenRuntime>(owner), owner};  // the operand keeps it alive
}

void read_tiles(PyObject* values, Arguments& args) {
  static const nb::handle packed_type = nb::type<PackedTile>();
  const Items items(values);
  args.call.num_tiles = static_cast<uint32_t>(items.size());
  args.call.tiles = args.tiles;
  if (items.size() > PTO_MAX_TILES) return;  // the native library reports the error
  const OpenRuntime* owner = nullptr;
  for (Py_ssize_t t = 0; t < items.size(); ++t) {
    nb::handle item = items[t];
    pto_tile& tile = args.tiles[t];
    if (item.is_none()) {
      tile = {};
      continue;
    }
    if (PyObject_TypeCheck(item.ptr(), reinterpret_cast<PyTypeObject*>(packed_type.ptr()))) {
      const PackedTile& packed = *nb::inst_ptr<PackedTile>(item);
      tile = packed.tile;
      item = packed.buffer;
    } else if (!describe_tile(item, tile)) {
      checked_in_python("tile_operand")(item);
    }
    const OpenRuntime* rt = nb::inst_ptr<Operand>(item)->rt;
    if (owner == nullptr) {
      owner = rt;
      args.rt = runtime_of(item);
    } else if (rt != owner) {
      checked_in_python("tile_runtime")(item);
    }
  }
}

void read_numbers(PyObject* ints, PyObject* floats, Arguments& args) {
  const Items whole(ints), real(floats);
  args.call.num_ints = static_cast<uint32_t>(whole.size());
  args.call.num_floats = static_cast<uint32_t>(real.size());
  args.call.ints = args.ints;
  args.call.floats = args.floats;
  if (whole.size() > PTO_MAX_TILE_INTS || real.size() > PTO_MAX_TILE_INTS) return;  // reported by the native library
  for (Py_ssize_t i = 0; i < whole.size(); ++i) {
    const Py_ssize_t value = PyNumber_AsSsize_t(whole[i], PyExc_OverflowError);
    if (value == -1 && PyErr_Occurred() != nullptr) checked_in_python("tile_integer")(nb::handle(whole[i]));
    args.ints[i] = value;
  }
  for (Py_ssize_t f = 0; f < real.size(); ++f) {
    args.floats[f] = PyFloat_AsDouble(real[f]);
    if (args.floats[f] == -1.0 && PyErr_Occurred() != nullptr) checked_in_python("tile_float")(nb::handle(real[f]));
  }
}

/// Reads a call; `args.rt` is its runtime. A call without any operand is rejected.
void read(pto_tile_kernel kernel, const nb::tuple& tiles, const nb::tuple& ints, const nb::tuple& floats,
          Arguments& args) {
  args.call.kernel = kernel;
  args.call.options = nullptr;
  read_tiles(tiles.ptr(), args);
  read_numbers(ints.ptr(), floats.ptr(), args);
  if (args.rt.p == nullptr) checked_in_python("tile_operand")(nb::none());
}

void run_tile(pto_tile_kernel kernel, const nb::tuple& tiles, const nb::tuple& ints, const nb::tuple& floats) {
  Arguments args;
  read(kernel, tiles, ints, floats, args);
  OpenRuntime& rt = *args.rt.p;
  const Call call(rt);
  drop_finished_records();
  const int status = pto_tile_run(rt.runtime, &args.call);
  drop_finished_records();
  raise_interrupt();
  if (status == PTO_OK) [[likely]]
    return;
  if (status == PTO_TASK_FAILED || status == PTO_CANCELLED || status == PTO_PEER_LOST) rt.has_reported_failure = true;
  raise_status(status);
}

nb::object submit_tile(pto_tile_kernel kernel, const nb::tuple& tiles, const nb::tuple& ints, const nb::tuple& floats,
                       nb::handle worker_type, nb::handle extras) {
  Arguments args;
  read(kernel, tiles, ints, floats, args);
  const Call call(*args.rt.p);
  drop_finished_records();
  pto_task_spec spec;
  std::memset(&spec, 0, sizeof(spec));
  More more;
  spec.worker_type = worker_type_of("tile", worker_type);
  spec.flags = PTO_KEEP;
  if (!extras.is_none()) [[unlikely]]
    read_extras(extras, spec, more, nullptr);
  args.call.options = &spec;
  const pto_task task = pto_tile_submit(args.rt.p->runtime, &args.call);
  if (task == 0) raise_status(pto_last_status());
  raise_interrupt();
  return handle_of(args.rt, task);
}

pto_tile_kernel find_tile_kernel(const char* name) {
  const pto_tile_kernel kernel = pto_tile_kernel_find(name);
  check_status(kernel);
  return kernel;
}

}  // namespace

void bind_tiles(nb::module_& m) {
  nb::module_ sub = m.def_submodule("tiles", "Tile kernels as tasks.");
  nb::class_<PackedTile>(sub, "PackedTile",
                         "A weight in panels, as an operand of tile calls: a buffer of one dimension and the weight's "
                         "rows and columns.")
      .def("__init__", &init_packed, nb::arg("buffer"), nb::arg("rows"), nb::arg("cols"))
      .def_prop_ro(
          "buffer", [](const PackedTile& packed) { return packed.buffer; }, "The flat buffer.",
          nb::sig("def buffer(self) -> typing.Any"))
      .def_prop_ro(
          "shape", [](const PackedTile& packed) { return nb::make_tuple(packed.tile.rows, packed.tile.cols); },
          "Rows and columns of the weight.", nb::sig("def shape(self) -> tuple[int, int]"))
      .def_prop_ro(
          "dtype", [](const PackedTile& packed) { return packed.buffer.attr("dtype"); }, "The buffer's dtype.",
          nb::sig("def dtype(self) -> numpy.dtype[typing.Any]"))
      .def_prop_ro(
          "native", [](const PackedTile& packed) { return packed.buffer.attr("native"); },
          "The runtime's native object.");
  sub.def("find", &find_tile_kernel, nb::arg("name"), "The number of a kernel, from its name without dtype.");
  sub.def("run", &run_tile, nb::arg("kernel"), nb::arg("tiles"), nb::arg("ints"), nb::arg("floats"),
          "Run a kernel as a task, and wait for it.");
  sub.def("submit", &submit_tile, nb::arg("kernel"), nb::arg("tiles"), nb::arg("ints"), nb::arg("floats"),
          nb::arg("worker_type"), nb::arg("extras").none(), "Submit a kernel as a task; returns its handle.",
          nb::sig("def submit(kernel: int, tiles: tuple, ints: tuple, floats: tuple, worker_type: object, extras: "
                  "object) -> typing.Any"));
}

}  // namespace tilewise::bind
