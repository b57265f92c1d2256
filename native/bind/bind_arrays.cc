// Arrays of other libraries by DLPack, with the one element type that NumPy's own DLPack does not know: bf16.
//
// Nothing is copied. The result of either function keeps the memory of its argument alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <vector>

#include "base/check.h"
#include "bind/bind.h"

namespace nb = nanobind;

namespace tilewise::bind {
namespace {

using Shared = nb::ndarray<nb::ro>;  // of any shape, element type and device
using Bits = nb::ndarray<nb::ro, uint16_t, nb::device::cpu>;

constexpr nb::dlpack::dtype kBF16{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};

/// Whether NumPy has the element type.
bool is_numpy(nb::dlpack::dtype type) {
  using enum nb::dlpack::dtype_code;
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  const bool is_number = code == Int || code == UInt || code == Float || code == Complex;
  return type.lanes == 1 && (code == Bool || (is_number && type.bits >= 8));
}

/// The memory of `array`, seen through another array of class `View`; `owner` keeps it alive.
template <typename View, typename Array>
nb::object view(const Array& array, nb::handle owner, nb::dlpack::dtype type) {
  std::vector<size_t> shape(array.ndim());
  std::vector<int64_t> strides(array.ndim());
  for (size_t dim = 0; dim < array.ndim(); ++dim) {
    shape[dim] = array.shape(dim);
    strides[dim] = array.stride(dim);
  }
  // The exported array says by its own class whether it may be written.
  auto* data = const_cast<void*>(static_cast<const void*>(array.data()));
  return nb::cast(View(data, array.ndim(), shape.data(), owner, strides.data(), type, nb::device::cpu::value));
}

/// A read-only NumPy array over another library's, and whether its 16-bit integers are bf16.
nb::tuple read(const Shared& source) {
  check<ArgumentError>(source.device_type() == nb::device::cpu::value,
                       "[kernels.dlpack] an array must be in the memory of the CPU; got one of another device; copy it "
                       "to the CPU");
  const bool is_bf16 = source.dtype() == kBF16;
  check<ArgumentError>(is_bf16 || is_numpy(source.dtype()),
                       "[kernels.dlpack] elements must be bf16 or of a type of NumPy; got DLPack's type ",
                       static_cast<int>(source.dtype().code), " of ", static_cast<int>(source.dtype().bits),
                       " bits; convert the array");
  const nb::capsule owner(new Shared(source), [](void* owned) noexcept { delete static_cast<Shared*>(owned); });
  const auto type = is_bf16 ? nb::dtype<uint16_t>() : source.dtype();
  return nb::make_tuple(view<nb::ndarray<nb::numpy, nb::ro>>(source, owner, type), is_bf16);
}

/// An object with `__dlpack__` over a NumPy array of bf16, given as 16-bit integers.
nb::object share_bf16(const nb::object& bits, bool is_writable) {
  const auto array = nb::cast<Bits>(bits, false);
  if (is_writable) return view<nb::ndarray<nb::array_api>>(array, bits, kBF16);
  return view<nb::ndarray<nb::array_api, nb::ro>>(array, bits, kBF16);
}

}  // namespace

void bind_arrays(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("arrays", "Arrays of other libraries by DLPack.");
  m.def("read", &read, nb::arg("source").noconvert(),
        "A read-only NumPy array over an object with `__dlpack__`, and whether its 16-bit integers are bf16.");
  m.def("share_bf16", &share_bf16, nb::arg("bits"), nb::arg("is_writable"),
        "An object with `__dlpack__` over bf16 numbers, given as an array of 16-bit integers.");
}

}  // namespace tilewise::bind
