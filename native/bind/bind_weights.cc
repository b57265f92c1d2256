// Python binding of native/weights: one call reads a rectangle of a file, or stores one from memory, into parts. The
// GIL is released meanwhile.
//
// It checks that a part's array has the part's size; native/weights checks the rest.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "bind/bind.h"
#include "kernels/quantised/blocks.h"
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

/// A quantised part: panels of words of 32 bits, a row as many as its blocks need, rounded up to an even number.
struct QuantisedPart {
  kernels::QuantisedFns fns;
  int64_t number = 0, blocks = 0, block_bytes = 0, panel_bytes = 0;
};

QuantisedPart quantised_part(const std::string& format, const Bytes& memory, int64_t rows, int64_t cols,
                             const std::string& isa) {
  QuantisedPart part;
  part.fns = isa.empty() ? kernels::find_quantised() : kernels::find_quantised_at(isa);
  while (part.number < part.fns.num_formats && format != part.fns.format(part.number).name) ++part.number;
  check<ArgumentError>(part.number < part.fns.num_formats,
                       "[weights.quantised] a format must be one of this build; got '", format, "'; choose another");
  const kernels::QuantisedBlock block = part.fns.format(part.number);
  check<ArgumentError>(rows > 0 && cols > 0 && cols % block.block == 0 && rows <= kMostElements / cols,
                       "[weights.quantised] a part must have whole blocks; got ", rows, " x ", cols, " in blocks of ",
                       block.block, "; correct the plan");
  part.blocks = cols / block.block;
  part.block_bytes = block.bytes;
  part.panel_bytes = (part.blocks * block.bytes + 7) / 8 * 8 * 32;
  check<ArgumentError>(static_cast<int64_t>(memory.size()) == (rows + 31) / 32 * part.panel_bytes,
                       "[weights.quantised] a part's memory must have its size; got ", memory.size(), " bytes for ",
                       rows, " x ", cols, " in ", format, "; pass the whole part");
  return part;
}

/// blocks: uint8 [count, bytes of the file's row], for rows [row, row + count) of the part, whose blocks begin at
/// block `first` of the file's row.
bool store_quantised(const Rows& blocks, const std::string& format, const Bytes& memory, int64_t rows, int64_t cols,
                     int64_t row, int64_t first, const std::string& isa) {
  const QuantisedPart part = quantised_part(format, memory, rows, cols, isa);
  const int64_t count = static_cast<int64_t>(blocks.shape(0)), width = static_cast<int64_t>(blocks.shape(1));
  check<ArgumentError>(row >= 0 && row % 32 == 0 && count >= 0 && count <= rows - row &&
                           (count % 32 == 0 || row + count == rows) && first >= 0 &&
                           first <= width / part.block_bytes - part.blocks && (width <= 1 || blocks.stride(1) == 1) &&
                           (count <= 1 || blocks.stride(0) >= width),
                       "[weights.quantised] blocks must be whole panels of the part; got ", count, " rows of ", width,
                       " bytes at row ", row, " of ", rows, "; cut them at multiples of 32 rows");
  const auto* from = reinterpret_cast<const std::byte*>(blocks.data()) + first * part.block_bytes;
  auto* to = reinterpret_cast<std::byte*>(memory.data()) + row / 32 * part.panel_bytes;
  const int64_t stride = count <= 1 ? width : blocks.stride(0);
  nb::gil_scoped_release unlocked;
  bool is_finite = true;
  for (int64_t r = 0; r < count; r += 32, to += part.panel_bytes)
    is_finite &=
        part.fns.pack(part.number, from + r * stride, stride, std::min<int64_t>(32, count - r), part.blocks, to);
  return is_finite;
}

using Numbers = nb::ndarray<uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

/// The part's numbers as bf16 [rows, cols].
void read_quantised(const std::string& format, const Bytes& memory, const Numbers& to, const std::string& isa) {
  const int64_t rows = static_cast<int64_t>(to.shape(0)), cols = static_cast<int64_t>(to.shape(1));
  const QuantisedPart part = quantised_part(format, memory, rows, cols, isa);
  const auto* from = reinterpret_cast<const std::byte*>(memory.data());
  uint16_t* const numbers = to.data();
  nb::gil_scoped_release unlocked;
  for (int64_t r = 0; r < rows; ++r)
    part.fns.read_row(part.number, from + r / 32 * part.panel_bytes, r % 32, cols, numbers + r * cols);
}

std::vector<std::tuple<std::string, int64_t, int64_t>> quantised_formats() {
  const kernels::QuantisedFns fns = kernels::find_quantised();
  std::vector<std::tuple<std::string, int64_t, int64_t>> formats;
  for (int64_t i = 0; i < fns.num_formats; ++i)
    formats.emplace_back(fns.format(i).name, fns.format(i).block, fns.format(i).bytes);
  return formats;
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
  sub.def("store_quantised", &store_quantised, nb::arg("blocks"), nb::arg("format"), nb::arg("memory"), nb::arg("rows"),
          nb::arg("cols"), nb::arg("row"), nb::arg("first_block"), nb::arg("isa") = "",
          "Pack rows of blocks into a part `rows` x `cols` from a row on; returns whether all scales are finite.");
  sub.def("read_quantised", &read_quantised, nb::arg("format"), nb::arg("memory"), nb::arg("numbers"),
          nb::arg("isa") = "", "The numbers of a part as bf16 [rows, cols].");
  sub.def("quantised_formats", &quantised_formats, "Name, elements of a block and its bytes, per format's number.");
}

}  // namespace tilewise::bind
