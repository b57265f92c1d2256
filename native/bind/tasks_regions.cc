// Buffers as arrays: from a NumPy index, or a box in bytes, to a region; grids of tiles.
//
// Programs index buffers as often as they submit, so regions are made in native code; only errors are raised by Python
// code (tilewise.runtime.checks). A region always lies inside its buffer. Memory: a region keeps its buffer
// alive; a grid keeps its buffer and the regions requested so far. Both take part in Python's garbage collection,
// because a buffer keeps its grids.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "bind/fields.h"
#include "bind/items.h"
#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

constexpr uint64_t kMaxTiles = uint64_t{1} << 24;

/// A buffer with the shape that indexing uses.
struct BufferBase : Operand {
  nb::object owner;  // the OpenRuntime's object
  std::vector<int64_t> lengths;  // per dimension
  std::vector<int64_t> strides;  // bytes
  int64_t item = 1;  // bytes of an element
  pto_type type = PTO_OTHER;
  int64_t num_bytes = 0;
};

/// A box of a buffer, and the array that a Python kernel sees.
struct Region : Operand {
  nb::object buffer;
  nb::object index;  // None: it was defined in bytes
  uint32_t num_dims = 0;
  int64_t lengths[PTO_MAX_DIMS];
  int64_t strides[PTO_MAX_DIMS];
};

/// Tiles of a buffer, each made at its first use.
struct TileGrid {
  nb::object buffer;
  std::vector<int64_t> tile;  // elements per dimension
  std::vector<int64_t> counts;  // tiles per dimension
  std::vector<nb::object> regions;
};

/// The range that one entry of an index selects.
struct Range {
  int64_t start, count, step;
  bool is_point;  // an integer: the array has no such dimension
};

nb::tuple tuple_of(const int64_t* values, size_t count) {
  nb::list list;
  for (size_t i = 0; i < count; ++i) list.append(values[i]);
  return nb::tuple(list);
}

/// Whether a bound is an integer. NumPy treats True as a mask and an array as a list of rows, and both have __index__.
bool is_whole(PyObject* bound) {
  if (PyLong_CheckExact(bound)) return true;
  static PyObject* const array_type = nb::module_::import_("numpy").attr("ndarray").ptr();
  if (PyBool_Check(bound) || !PyIndex_Check(bound)) return false;
  return !is_numpy_bool(bound) && PyObject_IsInstance(bound, array_type) == 0;
}

[[noreturn]] void refuse_entry(nb::handle index, int64_t length) {
  checked_in_python("region_entry")(index, length);
  throw nb::python_error();
}

Range range_of(PyObject* entry, int64_t length, nb::handle index) {
  if (PySlice_Check(entry)) {
#if defined(Py_LIMITED_API)
    const nb::handle slice = entry;
    const nb::object start_of = nb::getattr(slice, interned<"start">()),
                     stop_of = nb::getattr(slice, interned<"stop">()), step_of = nb::getattr(slice, interned<"step">());
    PyObject* const bounds[] = {start_of.ptr(), stop_of.ptr(), step_of.ptr()};
#else
    const auto* slice = reinterpret_cast<PySliceObject*>(entry);
    PyObject* const bounds[] = {slice->start, slice->stop, slice->step};
#endif
    for (PyObject* bound : bounds) {
      if (bound != Py_None && !is_whole(bound)) refuse_entry(index, length);
    }
    Py_ssize_t start, stop, step;
    if (PySlice_Unpack(entry, &start, &stop, &step) < 0) refuse_entry(index, length);
    const Py_ssize_t count = PySlice_AdjustIndices(length, &start, &stop, step);
    if (count <= 0 || step <= 0) refuse_entry(index, length);
    return {start, count, count == 1 ? 1 : step, false};
  }
  if (!is_whole(entry)) refuse_entry(index, length);
  const Py_ssize_t at = PyNumber_AsSsize_t(entry, nullptr);  // clipped
  if (at == -1 && PyErr_Occurred() != nullptr) refuse_entry(index, length);
  if (at < -length || at >= length) checked_in_python("region_place")(nb::handle(entry), length);
  return {at < 0 ? at + length : at, 1, 1, true};
}

using BufferRef = nb::pointer_and_handle<BufferBase>;

const BufferBase& base_of(nb::handle buffer) { return *nb::inst_ptr<BufferBase>(buffer); }

Region* new_region(nb::handle buffer, nb::object& made) {
  static const nb::handle type = nb::type<Region>();
  made = nb::inst_alloc(type);
  auto* region = new (nb::inst_ptr<Region>(made)) Region{};
  nb::inst_mark_ready(made);
  const BufferBase& base = base_of(buffer);
  region->rt = base.rt;
  region->handle = base.handle;
  region->has_region = true;
  region->buffer = nb::borrow(buffer);
  return region;
}

/// The region of one range per dimension.
nb::object region_of(nb::handle buffer, nb::handle index, const Range* ranges) {
  const BufferBase& base = base_of(buffer);
  const size_t num_dims = base.lengths.size();
  const bool is_packed = num_dims > 0 && ranges[num_dims - 1].step == 1;  // the last dimension is a run of bytes
  const size_t box_dims = num_dims + (is_packed ? 0 : 1);
  if (box_dims > PTO_MAX_DIMS) checked_in_python("region_dimensions")(index, box_dims);
  nb::object made;
  Region& region = *new_region(buffer, made);
  pto_region& box = region.region;
  box.ndim = static_cast<uint32_t>(box_dims);
  for (size_t d = 0; d < num_dims; ++d) {
    const Range& range = ranges[d];
    box.offset += static_cast<uint64_t>(range.start * base.strides[d]);
    box.size[d] = static_cast<uint64_t>(range.count);
    box.stride[d] = static_cast<uint64_t>(range.step * base.strides[d]);
    if (range.is_point) continue;
    region.lengths[region.num_dims] = range.count;
    region.strides[region.num_dims++] = range.step * base.strides[d];
  }
  if (is_packed) {
    box.size[num_dims - 1] *= static_cast<uint64_t>(base.item);
    box.stride[num_dims - 1] = 1;
  } else {
    box.size[num_dims] = static_cast<uint64_t>(base.item);
    box.stride[num_dims] = 1;
  }
  if (region.num_dims == 0 && num_dims > 0) {  // a single element becomes an array of one, so that kernels can write it
    region.lengths[0] = 1;
    region.strides[0] = base.item;
    region.num_dims = 1;
  }
  region.index = nb::borrow(index);
  return made;
}

nb::object index_buffer(BufferRef self, nb::handle index) {
  const BufferBase& base = *self.p;
  const nb::handle buffer = self.h;
  const size_t num_dims = base.lengths.size();
  PyObject* const key = index.ptr();
  const Items entries = Items::of_key(&key);
  const auto count = static_cast<size_t>(entries.size());
  const auto num_dots = static_cast<size_t>(std::count(entries.begin(), entries.end(), Py_Ellipsis));
  if (num_dots > 1) refuse_entry(index, num_dims == 0 ? 1 : base.lengths[0]);
  if (count - num_dots > num_dims) checked_in_python("region_entries")(index, num_dims);
  Range few[PTO_MAX_DIMS];
  std::vector<Range> many;
  Range* ranges = few;
  if (num_dims > PTO_MAX_DIMS) {
    many.resize(num_dims);
    ranges = many.data();
  }
  size_t d = 0;
  const auto take_all = [&](size_t end) {
    for (; d < end; ++d) ranges[d] = {0, base.lengths[d], 1, false};
  };
  for (size_t e = 0; e < count; ++e) {
    PyObject* const entry = entries[static_cast<Py_ssize_t>(e)];
    if (entry == Py_Ellipsis) {
      take_all(num_dims - (count - 1 - e));
    } else {
      ranges[d] = range_of(entry, base.lengths[d], index);
      ++d;
    }
  }
  take_all(num_dims);
  return region_of(buffer, index, ranges);
}

/// A box in bytes; Python has checked each number.
nb::object byte_region(BufferRef self, uint64_t offset, const std::vector<uint64_t>& size,
                       const std::vector<uint64_t>& stride) {
  const BufferBase& base = *self.p;
  uint64_t end = offset;
  bool is_inside = !size.empty() && size.size() == stride.size() && size.size() <= PTO_MAX_DIMS &&
                   std::count(size.begin(), size.end(), 0) == 0;
  for (size_t d = 0; d < size.size() && is_inside; ++d) {
    uint64_t span = 0;
    is_inside = !__builtin_mul_overflow(size[d] - 1, stride[d], &span) && !__builtin_add_overflow(end, span, &end);
  }
  if (!is_inside || end >= static_cast<uint64_t>(base.num_bytes)) {
    checked_in_python("region_bytes")(offset, size, stride, base.num_bytes);
  }
  nb::object made;
  Region& region = *new_region(self.h, made);
  region.index = nb::none();
  region.num_dims = static_cast<uint32_t>(size.size());
  region.region.offset = offset;
  region.region.ndim = region.num_dims;
  for (size_t d = 0; d < size.size(); ++d) {
    region.region.size[d] = size[d];
    region.region.stride[d] = stride[d];
    region.lengths[d] = static_cast<int64_t>(size[d]);
    region.strides[d] = static_cast<int64_t>(stride[d]);
  }
  return made;
}

void init_buffer(BufferBase* self, OpenRuntimeRef rt, pto_handle handle, std::vector<int64_t> shape, int64_t item,
                 int type) {
  new (self) BufferBase{};
  self->rt = rt.p;
  self->owner = nb::borrow(rt.h);
  self->handle = handle;
  self->item = item;
  self->type = static_cast<pto_type>(type);
  self->lengths = std::move(shape);
  self->strides.resize(self->lengths.size());
  self->num_bytes = item;
  for (size_t d = self->lengths.size(); d-- > 0;) {
    self->strides[d] = self->num_bytes;
    self->num_bytes *= self->lengths[d];
  }
}

// Grids of tiles.

nb::object tile_at(const TileGrid& grid, size_t number) {
  const BufferBase& base = base_of(grid.buffer);
  Range ranges[PTO_MAX_DIMS];
  nb::list index;
  for (size_t d = grid.counts.size(); d-- > 0;) {
    const auto at = static_cast<int64_t>(number % static_cast<size_t>(grid.counts[d]));
    number /= static_cast<size_t>(grid.counts[d]);
    const int64_t start = at * grid.tile[d];
    ranges[d] = {start, std::min(grid.tile[d], base.lengths[d] - start), 1, false};
  }
  for (size_t d = 0; d < base.lengths.size(); ++d) {
    if (d >= grid.counts.size()) ranges[d] = {0, base.lengths[d], 1, false};
    index.append(nb::steal(
        PySlice_New(nb::int_(ranges[d].start).ptr(), nb::int_(ranges[d].start + ranges[d].count).ptr(), nullptr)));
  }
  return region_of(grid.buffer, nb::tuple(index), ranges);
}

/// The tile's number in C order; -1: Python raises the error.
int64_t number_of(const TileGrid& grid, PyObject* key) {
  const Items entries = Items::of_key(&key);
  const Py_ssize_t count = entries.size();
  if (count != static_cast<Py_ssize_t>(grid.counts.size())) return -1;
  int64_t number = 0;
  for (Py_ssize_t d = 0; d < count; ++d) {
    const int64_t length = grid.counts[static_cast<size_t>(d)];
    if (!is_whole(entries[d])) return -1;
    int64_t at = PyNumber_AsSsize_t(entries[d], nullptr);
    if (at < 0) at += length;
    if (at < 0 || at >= length || PyErr_Occurred() != nullptr) return -1;
    number = number * length + at;
  }
  return number;
}

PyObject* tile_of(PyObject* self, PyObject* key) {
  try {
    if (!nb::inst_ready(self)) throw nb::type_error("a grid must be made by Buffer.tiles");
    TileGrid& grid = *nb::inst_ptr<TileGrid>(nb::handle(self));
    const int64_t number = number_of(grid, key);
    if (number < 0) {
      checked_in_python("tile")(nb::handle(key), tuple_of(grid.counts.data(), grid.counts.size()));
      throw nb::python_error();
    }
    nb::object& region = grid.regions[static_cast<size_t>(number)];
    if (!region.is_valid()) {
      nb::object made = tile_at(grid, static_cast<size_t>(number));
      if (!region.is_valid()) region = std::move(made);
    }
    return region.inc_ref().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const nb::builtin_exception& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  }
  return nullptr;
}

nb::object make_grid(BufferRef buffer, std::vector<int64_t> tile) {
  const std::vector<int64_t>& lengths = buffer.p->lengths;
  std::vector<int64_t> counts;
  uint64_t num_tiles = tile.empty() || tile.size() > lengths.size() || lengths.size() > PTO_MAX_DIMS ? 0 : 1;
  for (size_t d = 0; d < tile.size() && num_tiles != 0; ++d) {
    counts.push_back(tile[d] < 1 ? 0 : (lengths[d] - 1) / tile[d] + 1);
    if (__builtin_mul_overflow(num_tiles, static_cast<uint64_t>(counts[d]), &num_tiles)) num_tiles = UINT64_MAX;
  }
  if (num_tiles == 0 || num_tiles > kMaxTiles) {
    checked_in_python("tiles")(tuple_of(tile.data(), tile.size()), buffer.h.attr("shape"), kMaxTiles);
  }
  nb::object made = nb::inst_alloc(nb::type<TileGrid>());
  new (nb::inst_ptr<TileGrid>(made))
      TileGrid{nb::borrow(buffer.h), std::move(tile), std::move(counts), std::vector<nb::object>(num_tiles)};
  nb::inst_mark_ready(made);
  return made;
}

// Garbage collection.

int traverse_region(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Region& region = *nb::inst_ptr<Region>(nb::handle(self));
  Py_VISIT(region.buffer.ptr());
  Py_VISIT(region.index.ptr());
  return 0;
}

int clear_region(PyObject* self) {
  Region& region = *nb::inst_ptr<Region>(nb::handle(self));
  region.buffer.reset();
  region.index.reset();
  return 0;
}

int traverse_grid(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const TileGrid& grid = *nb::inst_ptr<TileGrid>(nb::handle(self));
  Py_VISIT(grid.buffer.ptr());
  for (const nb::object& region : grid.regions) Py_VISIT(region.ptr());
  return 0;
}

int clear_grid(PyObject* self) {
  TileGrid& grid = *nb::inst_ptr<TileGrid>(nb::handle(self));
  for (nb::object& region : grid.regions) region.reset();
  grid.buffer.reset();
  return 0;
}

PyType_Slot region_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_region)},
                              {Py_tp_clear, reinterpret_cast<void*>(clear_region)},
                              {0, nullptr}};
PyType_Slot grid_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_grid)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear_grid)},
                            {Py_mp_subscript, reinterpret_cast<void*>(tile_of)},
                            {0, nullptr}};

nb::object of_region(const char* function, nb::handle region) {
  return nb::module_::import_("tilewise.runtime.buffers").attr(function)(region);
}

}  // namespace

bool describe_tile(nb::handle operand, pto_tile& tile) {
  static const nb::handle region_type = nb::type<Region>(), buffer_type = nb::type<BufferBase>();
  const auto is_a = [&](nb::handle type) {
    return PyObject_TypeCheck(operand.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr())) && nb::inst_ready(operand);
  };
  const int64_t *lengths = nullptr, *strides = nullptr;
  size_t num_dims = 0;
  const BufferBase* base = nullptr;
  tile = {};
  if (is_a(region_type)) {
    const Region& region = *nb::inst_ptr<Region>(operand);
    if (region.index.is_none()) return false;  // bytes
    base = &base_of(region.buffer);
    lengths = region.lengths;
    strides = region.strides;
    num_dims = region.num_dims;
    tile.offset = region.region.offset;
  } else if (is_a(buffer_type)) {
    base = &base_of(operand);
    lengths = base->lengths.data();
    strides = base->strides.data();
    num_dims = base->lengths.size();
  } else {
    return false;
  }
  if (num_dims < 1 || num_dims > 2 || base->type == PTO_OTHER) return false;
  const int64_t last = lengths[num_dims - 1];
  if (last > 1 && strides[num_dims - 1] != base->item) return false;
  tile.buffer = base->handle;
  tile.rows = num_dims == 2 ? lengths[0] : 1;
  tile.cols = last;
  tile.stride = tile.rows > 1 ? strides[0] / base->item : last;
  tile.type = base->type;
  return true;
}

void bind_regions(nb::module_& m) {
  nb::class_<BufferBase, Operand>(m, "BufferBase", "The native part of Buffer.")
      .def("__init__", &init_buffer, nb::arg("native"), nb::arg("handle"), nb::arg("shape"), nb::arg("item_bytes"),
           nb::arg("type"))
      .def_prop_ro(
          "shape", [](const BufferBase& buffer) { return tuple_of(buffer.lengths.data(), buffer.lengths.size()); },
          "Elements per dimension.", nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_ro("native", &BufferBase::owner, "The runtime's native object.")
      .def_ro("num_bytes", &BufferBase::num_bytes, "Size in bytes.")
      .def("__getitem__", &index_buffer, nb::arg("index").none(),
           "A box of the buffer, by a NumPy index of integers and slices.",
           nb::sig("def __getitem__(self, index: object, /) -> Region"))
      .def("byte_region", &byte_region, nb::arg("offset"), nb::arg("size"), nb::arg("stride"),
           nb::sig("def byte_region(self, offset: int, size: collections.abc.Sequence[int], stride: "
                   "collections.abc.Sequence[int]) -> Region"))
      .def("make_grid", &make_grid, nb::arg("tile"),
           nb::sig("def make_grid(self, tile: collections.abc.Sequence[int]) -> TileGrid"));
  nb::class_<Region, Operand>(m, "Region",
                              "A strided box of a buffer, made by indexing it. Tasks get the address of its first "
                              "byte, Python kernels its array.",
                              nb::type_slots(region_slots), nb::is_weak_referenceable())
      .def_ro("buffer", &Region::buffer, "The buffer that contains it.")
      .def_ro("index", &Region::index, "The index that made it; None: the box was defined in bytes.")
      .def_prop_ro(
          "native", [](const Region& region) { return base_of(region.buffer).owner; }, "The runtime's native object.")
      .def_prop_ro(
          "offset", [](const Region& region) { return region.region.offset; }, "Bytes from the buffer's start.")
      .def_prop_ro(
          "shape", [](const Region& region) { return tuple_of(region.lengths, region.num_dims); },
          "Shape of `array`: an integer in the index removes its dimension.",
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "strides", [](const Region& region) { return tuple_of(region.strides, region.num_dims); },
          "Strides of `array`, in bytes.", nb::sig("def strides(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "dtype",
          [](const Region& region) {
            return region.index.is_none() ? nb::module_::import_("numpy").attr("dtype")("u1")
                                          : region.buffer.attr("dtype");
          },
          "Dtype of `array`: the buffer's, or bytes if the box was defined in bytes.",
          nb::sig("def dtype(self) -> numpy.dtype[typing.Any]"))
      .def_prop_ro(
          "array", [](nb::handle self) { return of_region("array_of_region", self); },
          "The box as an array that shares the buffer's memory. Does not wait: for a finished value use "
          "`Runtime.read`.",
          nb::sig("def array(self) -> typing.Any"))
      .def(
          "__repr__", [](nb::handle self) { return of_region("text_of_region", self); },
          nb::sig("def __repr__(self) -> str"));
  nb::class_<TileGrid>(
      m, "TileGrid",
      "Tiles of a buffer: `grid[i, j]` is the region of one, made once. Iterating gives all of them, the "
      "last index fastest; tiles at the end are smaller when the sizes do not divide.",
      nb::type_slots(grid_slots))
      .def_ro("buffer", &TileGrid::buffer, "The buffer that is divided into tiles.")
      .def_prop_ro(
          "shape", [](const TileGrid& grid) { return tuple_of(grid.counts.data(), grid.counts.size()); },
          "Tiles per dimension.", nb::sig("def shape(self) -> tuple[int, ...]"))
      .def("__len__", [](const TileGrid& grid) { return grid.regions.size(); })
      .def(
          "__iter__", [](nb::handle self) { return of_region("iterate_grid", self); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[Region]"));
}

}  // namespace tilewise::bind
