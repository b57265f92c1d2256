/// The arguments of a task of tilewise/pto.hpp: kernels and parameters.
///
/// Include tilewise/pto.hpp, which says who may call and gives the units. Parameters are plain values: nothing here
/// blocks, and only an Error allocates.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tilewise/pto/buffers.hpp"

namespace tilewise::pto {

/// A kernel of a runtime. The default one is empty: its tasks only define an order.
struct Kernel {
  pto_kernel id = PTO_NO_KERNEL;
};

/// How a task uses one buffer, or a box of it. Made by input, output, inout, commute, reduce and no_dep below, which
/// correspond to the modes of pto_api.h. May be stored and reused.
class Param {
 public:
  Param(pto_mode mode, const BufferRef& buffer, pto_kernel combine = 0)
      : runtime_(buffer.runtime()), raw_{mode, combine, buffer.handle(), {0}, nullptr, nullptr} {}
  Param(pto_mode mode, const BufferRef& buffer, const Region& box) : Param(mode, buffer) { set_box(box); }
  explicit Param(Output& output)
      : runtime_(output.runtime_),
        raw_{PTO_OUTPUT, 0, output.handle_, {output.wanted_bytes_}, nullptr, nullptr},
        output_(&output) {}
  explicit Param(void* address) : runtime_(nullptr), raw_{PTO_NO_DEP, 0, 0, {.address = address}, nullptr, nullptr} {}
  Param(const Param& other) : runtime_(other.runtime_), raw_(other.raw_), output_(other.output_) { take_places(other); }
  Param& operator=(const Param& other) {  // NOLINT(bugprone-unhandled-self-assignment): copies a box onto itself
    runtime_ = other.runtime_;
    raw_ = other.raw_;
    output_ = other.output_;
    take_places(other);
    return *this;
  }
  /// For a kernel with PTO_VIEWS: the elements, `sizes` of them, contiguous or `strides` bytes apart.
  template <class T>
  Param as(List<uint64_t> sizes, List<uint64_t> strides = {}) const {
    static_assert(std::is_trivially_copyable_v<T>, "tasks work on bytes");
    if (sizes.size() > PTO_MAX_DIMS || (strides.size() != 0 && strides.size() != sizes.size())) {
      detail::refuse(
          "[pto.Param.as] a view must have at most 4 sizes, and as many strides or none; got other numbers; correct "
          "them");
    }
    Param made(*this);
    made.view_ = {nullptr, sizes.size(), detail::type_of<T>(), sizeof(T), {}, {}};
    uint64_t step = sizeof(T);
    for (uint32_t d = sizes.size(); d-- > 0;) {
      made.view_.size[d] = sizes.begin()[d];
      made.view_.stride[d] = strides.size() != 0 ? strides.begin()[d] : step;
      step *= made.view_.size[d];
    }
    made.raw_.view = &made.view_;
    return made;
  }
  /// The same with the sizes of the box, which the parameter must have.
  template <class T>
  Param as() const {
    const Region* box = raw_.region;
    if (box == nullptr || box->ndim == 0 || box->ndim > PTO_MAX_DIMS || box->size[box->ndim - 1] % sizeof(T) != 0) {
      detail::refuse(
          "[pto.Param.as] a view without sizes must have a box whose rows are whole elements; got another; pass "
          "the sizes");
    }
    Param made = as<T>({});
    made.view_.ndim = box->ndim;
    for (uint32_t d = 0; d < box->ndim; ++d) {
      made.view_.size[d] = box->size[d];
      made.view_.stride[d] = box->stride[d];
    }
    made.view_.size[box->ndim - 1] /= sizeof(T);
    made.view_.stride[box->ndim - 1] = sizeof(T);
    return made;
  }

 private:
  friend class Runtime;
  void set_box(const Region& box) {
    box_ = box;
    raw_.region = &box_;
  }
  void take_places(const Param& other) {
    if (other.raw_.region != nullptr) set_box(other.box_);
    if (other.raw_.view != nullptr) {
      view_ = other.view_;
      raw_.view = &view_;
    }
  }
  PTORuntime* runtime_;
  pto_param raw_;
  Output* output_ = nullptr;  // receives the new handle
  Region box_;  // set only with raw_.region, so that whole buffers cost nothing
  pto_view view_;  // with raw_.view
};

/// The kernel reads it; readers run in parallel.
inline Param input(const BufferRef& buffer) { return {PTO_INPUT, buffer}; }
inline Param input(const BufferRef& buffer, const Region& box) { return {PTO_INPUT, buffer, box}; }
/// The kernel overwrites all of it. An Output: the runtime allocates it first.
inline Param output(const BufferRef& buffer) { return {PTO_OUTPUT, buffer}; }
inline Param output(const BufferRef& buffer, const Region& box) { return {PTO_OUTPUT, buffer, box}; }
inline Param output(Output& fresh) { return Param(fresh); }
/// The kernel reads and writes it.
inline Param inout(const BufferRef& buffer) { return {PTO_INOUT, buffer}; }
inline Param inout(const BufferRef& buffer, const Region& box) { return {PTO_INOUT, buffer, box}; }
/// The same; commuting neighbours run one at a time in any order.
inline Param commute(const BufferRef& buffer) { return {PTO_COMMUTE, buffer}; }
inline Param commute(const BufferRef& buffer, const Region& box) { return {PTO_COMMUTE, buffer, box}; }
/// The kernel overwrites its own partial value, as large as the buffer; `combine` adds these in order of submission.
inline Param reduce(const BufferRef& buffer, Kernel combine) { return {PTO_REDUCE, buffer, combine.id}; }
/// The kernel gets the address and the runtime sees no access: the caller is responsible for the order.
inline Param no_dep(const BufferRef& buffer) { return {PTO_NO_DEP, buffer}; }
inline Param no_dep(const BufferRef& buffer, const Region& box) { return {PTO_NO_DEP, buffer, box}; }
inline Param no_dep(void* address) { return Param(address); }

}  // namespace tilewise::pto
