// Python binding of native/weights: one call reads a rectangle of a file, or stores one from memory, into parts. The
// GIL is released meanwhile.
//
// It checks that a part's array has the part's size; native/weights checks the rest.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "bind/bind.h"
#include "weights/read.h"

namespace nb = nanobind;

namespace tilewise::bind {
namespace {

using kernels::Stored;
using kernels::WeightPart;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PartTuple = std::tuple<Bytes, std::string, bool, int64_t, int64_t>;
// Named tuples of tilewise/kernels/loading.py, whose fields have this order.
using IntoTuple = std::tuple<PartTuple, int64_t, int64_t, int64_t, int64_t>;
using FromTuple = std::tuple<int, int64_t, int64_t, int64_t, int64_t, std::string, bool>;

constexpr int64_t kMostElements = int64_t{1} << 46;  // so that the padded size in bytes does not overflow

Stored stored_of(const std::string& name) {
  if (name == "f32") return Stored::kF32;
  if (name == "bf16") return Stored::kBF16;
  if (name == "f16") return Stored::kF16;
  check<ArgumentError>(name == "f64", "[weights.read] a stored dtype must be f32, bf16, f16 or f64; got '", name,
                       "'; convert the file");
  return Stored::kF64;
}

WeightPart part_of(const PartTuple& part) {
  const auto& [bytes, dtype, packed, rows, cols] = part;
  check<ArgumentError>(dtype == "f32" || dtype == "bf16", "[weights.read] a part's dtype must be f32 or bf16; got '",
                       dtype, "'; correct the plan");
  check<ArgumentError>(rows >= 0 && cols >= 0 && (cols == 0 || rows <= kMostElements / (cols + 1)),
                       "[weights.read] a part must have a valid shape; got ", rows, " x ", cols, "; correct it");
  const DType type = dtype == "f32" ? DType::kF32 : DType::kBF16;
  const int64_t elements = packed ? (rows + 31) / 32 * 32 * ((cols + 1) / 2 * 2) : rows * cols;
  check<ArgumentError>(static_cast<int64_t>(bytes.size()) == elements * size_of(type),
                       "[weights.read] a part's memory must have its size; got ", bytes.size(), " bytes for ", elements,
                       " elements of ", dtype, "; pass the whole part");
  return {reinterpret_cast<std::byte*>(bytes.data()), type, packed, rows, cols};
}

std::vector<weights::Destination> destinations_of(const std::vector<IntoTuple>& into) {
  std::vector<weights::Destination> destinations;
  for (const auto& [part, row, col, first, count] : into)
    destinations.push_back({part_of(part), row, col, first, count});
  return destinations;
}

nb::tuple read(const FromTuple& from, const std::vector<IntoTuple>& into, const std::string& isa) {
  const auto& [file, begin, row_bytes, rows, cols, dtype, transposed] = from;
  const std::vector<weights::Destination> destinations = destinations_of(into);
  const kernels::StoreFn store = isa.empty() ? kernels::find_store() : kernels::find_store_at(isa);
  const weights::Rectangle rectangle = {file, begin, row_bytes, rows, cols, stored_of(dtype)};
  const weights::Outcome outcome = [&] {
    nb::gil_scoped_release unlocked;
    return weights::read_weights(rectangle, transposed, destinations, store);
  }();
  return nb::make_tuple(outcome.bytes_read, outcome.is_finite, outcome.is_whole, outcome.system_error);
}

using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;

/// rows: bytes, each row contiguous.
bool store(const Rows& rows, const std::string& dtype, const std::vector<IntoTuple>& into, const std::string& isa) {
  const Stored type = stored_of(dtype);
  const int64_t num_rows = static_cast<int64_t>(rows.shape(0)), row_bytes = static_cast<int64_t>(rows.shape(1));
  check<ArgumentError>(row_bytes % size_of(type) == 0 && (row_bytes <= 1 || rows.stride(1) == 1) &&
                           (num_rows <= 1 || rows.stride(0) >= row_bytes) &&
                           reinterpret_cast<uintptr_t>(rows.data()) % size_of(type) == 0 &&
                           rows.stride(0) % size_of(type) == 0,
                       "[weights.store] rows must be whole, contiguous and aligned; got ", row_bytes, " bytes of ",
                       dtype, " each; copy the array first");
  const kernels::StoreFn fn = isa.empty() ? kernels::find_store() : kernels::find_store_at(isa);
  const int64_t stride = num_rows <= 1 ? row_bytes : rows.stride(0);
  const kernels::StoredBlock block = {reinterpret_cast<const std::byte*>(rows.data()), stride, num_rows,
                                      row_bytes / size_of(type), type};
  const std::vector<weights::Destination> destinations = destinations_of(into);
  nb::gil_scoped_release unlocked;
  return weights::store_block(block, false, destinations, fn);
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::module_ sub = m.def_submodule("weights", "Weights from files into devices' memory.");
  sub.def(
      "read", &read, nb::arg("rectangle"), nb::arg("into"), nb::arg("isa") = "",
      "Read a rectangle (file, begin, row_bytes, rows, cols, dtype, transposed), its columns [first, first + count) "
      "from [row][col] of each destination ((bytes, dtype, packed, rows, cols), row, col, first, count) on; returns "
      "(bytes read, all finite, file whole, errno).");
  sub.def("store", &store, nb::arg("rows"), nb::arg("dtype"), nb::arg("into"), nb::arg("isa") = "",
          "The same with rows in memory, as bytes; returns whether all numbers are finite.");
}

}  // namespace tilewise::bind
