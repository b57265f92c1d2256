/// Views of tilewise/pto.hpp: the parameters of a kernel with PTO_VIEWS.
///
/// Include tilewise/pto.hpp. A View is made inside a kernel from its `buffers`; it is three words and a pointer, owns
/// nothing and must not outlive the kernel. A wrong element type throws, which fails the task.
#pragma once

#include <complex>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tilewise/pto/params.hpp"

namespace tilewise::pto {

/// The elements of one parameter, indexed like an array: `View<float> a(buffers[0]); a(i, j) = 1;`. Of constant
/// elements: only read. Indices are not checked.
template <class T>
class View {
 public:
  explicit View(const void* argument) : view_(static_cast<const pto_view*>(argument)) {
    if (view_->type != detail::type_of<std::remove_cv_t<T>>()) {
      detail::refuse(
          "[pto.View] a view must have the type of the elements that were submitted; got another; submit the parameter "
          "with as<T>() of the same T, or correct the kernel");
    }
  }
  T* data() const { return static_cast<T*>(view_->data); }
  uint32_t ndim() const { return view_->ndim; }
  uint64_t size(uint32_t dim) const { return view_->size[dim]; }
  /// Bytes from one element to the next.
  uint64_t stride(uint32_t dim) const { return view_->stride[dim]; }
  const pto_view& raw() const { return *view_; }

  template <std::integral... Index>
    requires(sizeof...(Index) <= PTO_MAX_DIMS)
  T& operator()(Index... index) const {
    uint64_t offset = 0;
    uint32_t dim = 0;
    ((offset += static_cast<uint64_t>(index) * view_->stride[dim++]), ...);
    return *reinterpret_cast<T*>(static_cast<std::byte*>(view_->data) + offset);
  }

 private:
  const pto_view* view_;
};

/// Inside a kernel: whether its result is no longer needed, see pto_should_stop.
inline bool should_stop() noexcept { return pto_should_stop() != 0; }

}  // namespace tilewise::pto
