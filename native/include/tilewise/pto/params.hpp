/// What a task of tilewise/pto.hpp takes: errors, lists in braces, scalars, buffers and parameters.
///
/// Include tilewise/pto.hpp, which says who may call and what the units are. Names of buffers own nothing; a Buffer
/// owns its registration and nothing else. Only the C interface is called, and only an Error allocates: its text.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <complex>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "tilewise/pto_api.h"

namespace tilewise::pto {

inline constexpr double kForever = PTO_FOREVER;

/// A call that failed. status(): a pto_status, PTO_TASK_FAILED, PTO_CANCELLED and PTO_TIMEOUT above all.
class Error : public std::runtime_error {
 public:
  Error(int status, const std::string& text) : std::runtime_error(text), status_(status) {}
  int status() const noexcept { return status_; }

 private:
  int status_;
};

namespace detail {

[[noreturn]] inline void raise_last() { throw Error(pto_last_status(), pto_last_error()); }
[[noreturn]] inline void refuse(const char* text) { throw Error(PTO_BAD_ARGUMENT, text); }
[[noreturn]] inline void raise_timeout(const char* call, double timeout_s) {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", timeout_s);
  throw Error(PTO_TIMEOUT, std::string("[pto.") + call + "] tasks must end within the time given; got one that goes " +
                               "on after " + seconds + " s; wait longer, or cancel it");
}
inline void check(int status) {
  if (status < 0) raise_last();
}
template <class Id>
Id check_id(Id id) {
  if (id == Id{}) raise_last();
  return id;
}

/// What is left of a timeout that several waits share.
class Deadline {
 public:
  explicit Deadline(double timeout_s) : timeout_s_(timeout_s) {}
  double left_s() const {
    if (timeout_s_ <= 0) return timeout_s_;
    return std::max(0.0, timeout_s_ - std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count());
  }
  double timeout_s() const { return timeout_s_; }

 private:
  double timeout_s_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace detail

/// What a call takes in braces, or any contiguous container of exactly T. Only a view: braces live as long as the call.
template <class T>
class List {
 public:
  List() = default;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winit-list-lifetime"
#endif
  List(std::initializer_list<T> items) : data_(items.begin()), size_(items.size()) {}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
  template <std::ranges::contiguous_range Items>
    requires std::same_as<std::ranges::range_value_t<Items>, T>
  List(const Items& items) : data_(std::ranges::data(items)), size_(std::ranges::size(items)) {}
  const T* data() const { return data_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  uint32_t size() const { return static_cast<uint32_t>(size_); }

 private:
  const T* data_ = nullptr;
  size_t size_ = 0;
};

/// 64 bits for a kernel: integers in two's complement, addresses, floating numbers as the bits of a double.
struct Scalar {
  template <std::integral T>
  Scalar(T value) : bits(static_cast<uint64_t>(value)) {}
  template <std::floating_point T>
  Scalar(T value) : bits(std::bit_cast<uint64_t>(static_cast<double>(value))) {}
  template <class T>
  Scalar(T* address) : bits(reinterpret_cast<uintptr_t>(address)) {}
  uint64_t bits;
};

/// Inside a kernel: one of its scalars as it was given, T an integer, double, float or pointer.
template <class T>
T scalar(uint64_t bits) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<uintptr_t>(bits));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(std::bit_cast<double>(bits));
  } else {
    return static_cast<T>(bits);
  }
}

/// A strided box inside a buffer, in bytes; see pto_api.h.
using Region = pto_region;

/// `num_bytes` from byte `offset`.
inline Region range(uint64_t offset, uint64_t num_bytes) { return {offset, 1, {num_bytes}, {1}}; }
/// The rows x cols elements at (row, col) of a matrix with `width` elements of `item_bytes` per row.
inline Region tile(uint64_t row, uint64_t col, uint64_t rows, uint64_t cols, uint64_t width, uint64_t item_bytes) {
  return {(row * width + col) * item_bytes, 2, {rows, cols * item_bytes}, {width * item_bytes, 1}};
}

namespace detail {

/// Bytes from the first of a box to its last.
inline uint64_t span_of(const Region& box) {
  uint64_t num_bytes = 1;
  for (uint32_t d = 0; d < box.ndim; ++d) {
    if (box.size[d] == 0) return 0;
    num_bytes += (box.size[d] - 1) * box.stride[d];
  }
  return num_bytes;
}

/// The pto_type of an element; PTO_OTHER: none of the others.
template <class T>
constexpr pto_type type_of() {
  if constexpr (std::is_same_v<T, bool>) {
    return PTO_BOOL;
  } else if constexpr (std::is_integral_v<T> || std::is_same_v<T, std::byte>) {
    constexpr int kind = std::countr_zero(sizeof(T)) * 2 + (std::is_signed_v<T> ? 1 : 0);
    return static_cast<pto_type>(kind);
  } else if constexpr (std::is_same_v<T, float>) {
    return PTO_F32;
  } else if constexpr (std::is_same_v<T, double>) {
    return PTO_F64;
  } else if constexpr (std::is_same_v<T, std::complex<float>>) {
    return PTO_C64;
  } else if constexpr (std::is_same_v<T, std::complex<double>>) {
    return PTO_C128;
  } else {
    return PTO_OTHER;
  }
}

}  // namespace detail

/// The name of a buffer: copied freely, owns nothing. Stale use is an Error.
class BufferRef {
 public:
  BufferRef(PTORuntime* runtime, pto_handle handle) : runtime_(runtime), handle_(handle) {}
  /// Throws when it names nothing: moved from, unregistered, or an Output of no task yet.
  pto_handle handle() const {
    if (handle_ == 0) {
      detail::refuse(
          "[pto.BufferRef] a buffer must be known to its runtime; got one that was moved from or "
          "unregistered, or an output that no task has written; register it, or submit its task first");
    }
    return handle_;
  }
  PTORuntime* runtime() const { return runtime_; }
  uint64_t num_bytes() const { return detail::check_id(pto_bytes(runtime_, handle())); }
  /// Does not wait.
  void* address() const { return detail::check_id(pto_address(runtime_, handle())); }
  /// Waits for the writers; what they wrote, in place. Throws when the task that should have written failed.
  template <class T = std::byte>
  std::span<const T> read(double timeout_s = kForever) const {
    const void* data = detail::check_id(pto_read(runtime_, handle(), nullptr, timeout_s));
    return {static_cast<const T*>(data), num_bytes() / sizeof(T)};
  }
  /// The same for a box: only its writers count. From its first byte to its last, also where it is strided.
  template <class T = std::byte>
  std::span<const T> read(const Region& box, double timeout_s = kForever) const {
    const void* data = detail::check_id(pto_read(runtime_, handle(), &box, timeout_s));
    return {static_cast<const T*>(data), detail::span_of(box) / sizeof(T)};
  }
  /// Waits for readers and writers; then the caller may write until its next task on the buffer. What it writes counts
  /// as all of it: failures of earlier writers end here.
  template <class T = std::byte>
  std::span<T> write(double timeout_s = kForever) const {
    void* data = detail::check_id(pto_write(runtime_, handle(), nullptr, timeout_s));
    return {static_cast<T*>(data), num_bytes() / sizeof(T)};
  }
  /// The same for a box, from its first byte to its last; only the bytes of the box may be written.
  template <class T = std::byte>
  std::span<T> write(const Region& box, double timeout_s = kForever) const {
    void* data = detail::check_id(pto_write(runtime_, handle(), &box, timeout_s));
    return {static_cast<T*>(data), detail::span_of(box) / sizeof(T)};
  }
  /// Frozen: only read, and its readers are not tracked (weights). Waits for its writers.
  void freeze(bool frozen = true) const { detail::check(pto_freeze(runtime_, handle(), frozen ? 1 : 0)); }

 protected:
  PTORuntime* runtime_;
  pto_handle handle_;
};

/// Memory of the caller, made by Runtime::buffer. Its end waits for its tasks, since the memory may be freed then: a
/// task that waits for an event which nobody raises any more must be cancelled first. Move-only.
class Buffer : public BufferRef {
 public:
  using BufferRef::BufferRef;
  Buffer(Buffer&& other) noexcept : BufferRef(other.runtime_, std::exchange(other.handle_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer taken(std::move(other));  // ends as the old one
    std::swap(runtime_, taken.runtime_);
    std::swap(handle_, taken.handle_);
    return *this;
  }
  ~Buffer() {
    if (handle_ != 0) pto_unregister(runtime_, handle_, kForever);
  }
  /// Waits for its tasks, then forgets it. After an Error it is still registered.
  void unregister(double timeout_s = kForever) {
    detail::check(pto_unregister(runtime_, handle(), timeout_s));
    handle_ = 0;
  }
};

/// `num_bytes` that the runtime allocates for the task whose output() names it; they live as long as that task's scope.
/// Names them from then on. Must stay in place until submit has returned.
class Output : public BufferRef {
 public:
  explicit Output(uint64_t num_bytes) : BufferRef(nullptr, 0), wanted_bytes_(num_bytes) {}

 private:
  friend class Runtime;
  friend class Param;
  uint64_t wanted_bytes_;
};

/// A kernel that a runtime knows. The default one is empty: its tasks stand for their order alone.
struct Kernel {
  pto_kernel id = PTO_NO_KERNEL;
};

/// How a task uses one buffer, or a box of it: made by input, output, inout, commute, reduce and no_dep below, which
/// mean what the modes of pto_api.h say. May be kept and used again.
class Param {
 public:
  Param(pto_mode mode, const BufferRef& buffer, pto_kernel combine = 0)
      : runtime_(buffer.runtime()), raw_{mode, combine, buffer.handle(), 0, nullptr, nullptr, nullptr} {}
  Param(pto_mode mode, const BufferRef& buffer, const Region& box) : Param(mode, buffer) { set_box(box); }
  explicit Param(Output& output)
      : runtime_(output.runtime_), raw_{PTO_OUTPUT, 0, output.handle_, output.wanted_bytes_, nullptr, &output, nullptr} {}
  explicit Param(void* address) : runtime_(nullptr), raw_{PTO_NO_DEP, 0, 0, 0, nullptr, address, nullptr} {}
  Param(const Param& other) : runtime_(other.runtime_), raw_(other.raw_) {
    take_places(other);
  }
  Param& operator=(const Param& other) {  // NOLINT(bugprone-unhandled-self-assignment): copies a box onto itself
    runtime_ = other.runtime_;
    raw_ = other.raw_;
    take_places(other);
    return *this;
  }
  /// For a kernel with PTO_VIEWS: its elements, so many of them in rows that lie one behind the other, or `strides`
  /// bytes apart.
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
          "[pto.Param.as] a view without sizes must be one of a box whose rows hold whole elements; got another; pass "
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
  Region box_;  // set only with raw_.region, so that whole buffers cost nothing
  pto_view view_;  // with raw_.view
};

/// The kernel reads it; readers run beside each other.
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
/// The kernel overwrites a partial of its own, as large as the buffer; `combine` adds them in order of submission.
inline Param reduce(const BufferRef& buffer, Kernel combine) { return {PTO_REDUCE, buffer, combine.id}; }
/// The kernel gets the address and the runtime sees no access: the caller answers for the order.
inline Param no_dep(const BufferRef& buffer) { return {PTO_NO_DEP, buffer}; }
inline Param no_dep(const BufferRef& buffer, const Region& box) { return {PTO_NO_DEP, buffer, box}; }
inline Param no_dep(void* address) { return Param(address); }

}  // namespace tilewise::pto
