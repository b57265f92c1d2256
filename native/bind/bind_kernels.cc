// Python binding of the tile kernels, for tests, benchmarks and users: one call runs one kernel on NumPy arrays.
//
// The checks are here, not in the kernels: valid name, valid level, numbers of operands and attributes. The caller is
// responsible for shapes and dtypes (tilewise.kernels.table has them). The GIL is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "bind/bind.h"
#include "bind/fields.h"
#include "kernels/isa.h"

namespace nb = nanobind;

namespace tilewise::bind {
namespace {

using Array = nb::ndarray<nb::ndim<2>, nb::device::cpu>;

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};

kernels::Scratch thread_scratch(int64_t bytes) {
  thread_local std::unique_ptr<std::byte, Free> memory;
  thread_local int64_t capacity = 0;
  check<ArgumentError>(bytes >= 0, "[kernels.run] scratch_bytes must not be negative; got ", bytes,
                       "; pass 0 or more.");
  if (bytes > capacity) {
    capacity = 0;
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(4096, (static_cast<size_t>(bytes) + 4095) / 4096 * 4096)));
    check<ResourceError>(memory != nullptr, "[kernels.run] scratch memory must be available; got none for ",
                         ByteCount(static_cast<uint64_t>(bytes)), "; free some memory.");
    capacity = bytes;
  }
  return {memory.get(), bytes};
}

kernels::TileView view_of(const Array& array) {
  check<ArgumentError>(array.size() == 0 || array.shape(1) == 1 || array.stride(1) == 1,
                       "[kernels.run] a tile's columns must be contiguous; got a stride of ", array.stride(1),
                       " elements; copy the array first.");
  return {array.data(), static_cast<int64_t>(array.shape(0)), static_cast<int64_t>(array.shape(1)), array.stride(0)};
}

/// None, a 2-D array, or (packed array [1, elements], rows, cols).
kernels::TileView tile_of(nb::handle operand) {
  if (operand.is_none()) return {nullptr, 0, 0, 0};
  if (!nb::isinstance<nb::tuple>(operand)) return view_of(nb::cast<Array>(operand));
  const auto packed = nb::cast<nb::tuple>(operand);
  const auto rows = nb::cast<int64_t>(packed[1]), cols = nb::cast<int64_t>(packed[2]);
  kernels::TileView view = view_of(nb::cast<Array>(packed[0]));
  const int64_t k_pad = (cols + 1) / 2 * 2, needed = (rows + 31) / 32 * 32 * k_pad;
  check<ArgumentError>(view.rows * view.cols >= needed, "[kernels.run] a packed operand of ", rows, " x ", cols,
                       " needs ", needed, " elements; got ", view.rows * view.cols, "; use pack_weight.");
  return {view.data, rows, cols, k_pad};
}

void run(const std::string& name, const nb::sequence& tiles, const nb::kwargs& options) {
  std::vector<int64_t> ints;
  std::vector<double> floats;
  std::string isa;
  int64_t row_begin = 0, repeat = 1, scratch_bytes = kernels::kScratchBytes;
  Keywords(options)
      .set<"ints">(ints)
      .set<"floats">(floats)
      .set<"row_begin">(row_begin)
      .set<"isa">(isa)
      .set<"repeat">(repeat)
      .set<"scratch_bytes">(scratch_bytes)
      .done();
  const kernels::Entry* const kernel = isa.empty() ? kernels::find_kernel(name) : kernels::find_kernel_at(isa, name);
  check<ArgumentError>(kernel != nullptr, "[kernels.run] name must be a kernel; got '", name, "'; see kernel_names().");
  std::vector<kernels::TileView> views;
  for (nb::handle operand : tiles) views.push_back(tile_of(operand));
  const kernels::KernelArgs args = {
      views.data(),  static_cast<int64_t>(views.size()),  ints.data(), static_cast<int64_t>(ints.size()),
      floats.data(), static_cast<int64_t>(floats.size()), row_begin,   thread_scratch(scratch_bytes)};
  check<ArgumentError>(kernel->fits(args),
                       "[kernels.run] a call must have the operands and attributes that the kernel ", "declares; got ",
                       args.num_tiles, " operands, ", args.num_ints, " integers and ", args.num_floats, " floats for '",
                       name, "'; see tilewise.kernels.KERNELS.");
  nb::gil_scoped_release unlocked;
  for (int64_t i = 0; i < repeat; ++i) kernel->fn(args);
}

std::vector<std::string> strings(const std::vector<std::string_view>& views) { return {views.begin(), views.end()}; }

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::module_ sub = m.def_submodule("kernels", "Tile kernels, one call at a time.");
  sub.def(
      "run", &run, nb::arg("name"), nb::arg("tiles"), nb::arg("options"),
      "Run one kernel on tiles: None, 2-D arrays or (packed, rows, cols). Keyword arguments: ints, floats, row_begin, "
      "isa (empty: the one in use), repeat, scratch_bytes.");
  sub.def("kernel_names", [] { return strings(kernels::kernel_names()); }, "All kernels, sorted.");
  sub.def(
      "isa_levels", [] { return strings(kernels::available_levels()); },
      "Levels that this build has and this machine can run, weakest first.");
  sub.def(
      "isa_missing", [] { return strings(kernels::missing_levels()); },
      "Levels that this machine can run and that are better than every level of this build, weakest first.");
  sub.def("isa_in_use", [] { return std::string(kernels::level_in_use()); }, "The level that find_kernel uses.");
}

}  // namespace tilewise::bind
