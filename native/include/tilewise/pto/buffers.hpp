/// Buffers of tilewise/pto.hpp: boxes, names of buffers, registered memory, outputs allocated by the runtime.
///
/// Include tilewise/pto.hpp, which says who may call and gives the units. Names of buffers own nothing; a Buffer owns
/// only its registration. Blocks: read, write, and the destructor of a Buffer.
#pragma once

#include <bit>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "tilewise/pto/basics.hpp"

namespace tilewise::pto {

/// A strided box inside a buffer, in bytes; see pto_api.h.
using Region = pto_region;

/// `num_bytes` from byte `offset`.
inline Region range(uint64_t offset, uint64_t num_bytes) { return {offset, 1, {num_bytes}, {1}}; }
/// The rows x cols elements at (row, col) of a matrix with `width` elements of `item_bytes` per row.
inline Region tile(uint64_t row, uint64_t col, uint64_t rows, uint64_t cols, uint64_t width, uint64_t item_bytes) {
  return {(row * width + col) * item_bytes, 2, {rows, cols * item_bytes}, {width * item_bytes, 1}};
}

namespace detail {

/// The number of bytes from the first byte of a box to its last.
inline uint64_t span_of(const Region& box) {
  uint64_t num_bytes = 1;
  for (uint32_t d = 0; d < box.ndim; ++d) {
    if (box.size[d] == 0) return 0;
    num_bytes += (box.size[d] - 1) * box.stride[d];
  }
  return num_bytes;
}

/// The pto_type of an element; PTO_OTHER for other types.
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
  /// Throws if it refers to no buffer: moved from, unregistered, or an Output without a task.
  pto_handle handle() const {
    if (handle_ == 0) {
      detail::refuse(
          "[pto.BufferRef] a buffer must be registered; got one that was moved from or "
          "unregistered, or an output that no task has written; register it, or submit its task first");
    }
    return handle_;
  }
  PTORuntime* runtime() const { return runtime_; }
  uint64_t num_bytes() const { return detail::check_id(pto_bytes(runtime_, handle())); }
  /// Does not wait.
  void* address() const { return detail::check_id(pto_address(runtime_, handle())); }
  /// Waits for the writers; returns the data in place. Throws if a writer failed.
  template <class T = std::byte>
  std::span<const T> read(double timeout_s = kForever) const {
    const void* data = detail::check_id(pto_read(runtime_, handle(), nullptr, timeout_s));
    return {static_cast<const T*>(data), num_bytes() / sizeof(T)};
  }
  /// The same for a box: only its writers count. The span is from its first byte to its last, also if it is strided.
  template <class T = std::byte>
  std::span<const T> read(const Region& box, double timeout_s = kForever) const {
    const void* data = detail::check_id(pto_read(runtime_, handle(), &box, timeout_s));
    return {static_cast<const T*>(data), detail::span_of(box) / sizeof(T)};
  }
  /// Waits for readers and writers; then the caller may write until its next task on the buffer. The write
  /// counts for the whole buffer: it clears failures of earlier writers.
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
  /// Freezes the buffer: tasks only read it, and readers are not tracked (for weights). Waits for its writers.
  void freeze(bool frozen = true) const { detail::check(pto_freeze(runtime_, handle(), frozen ? 1 : 0)); }

 protected:
  PTORuntime* runtime_;
  pto_handle handle_;
};

/// Memory of the caller, registered by Runtime::buffer. The destructor waits for its tasks, because the memory may be
/// freed afterwards: cancel a task that waits for an event that is never posted first. Move-only.
class Buffer : public BufferRef {
 public:
  using BufferRef::BufferRef;
  Buffer(Buffer&& other) noexcept : BufferRef(other.runtime_, std::exchange(other.handle_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer taken(std::move(other));  // its destructor unregisters the old buffer
    std::swap(runtime_, taken.runtime_);
    std::swap(handle_, taken.handle_);
    return *this;
  }
  ~Buffer() {
    if (handle_ != 0) pto_unregister(runtime_, handle_, kForever);
  }
  /// Waits for its tasks, then unregisters it. After an Error it is still registered.
  void unregister(double timeout_s = kForever) {
    detail::check(pto_unregister(runtime_, handle(), timeout_s));
    handle_ = 0;
  }
};

/// `num_bytes` bytes that the runtime allocates for the task whose output() uses it; they live as long as that task's
/// scope. From then on it refers to them. It must not move until submit has returned.
class Output : public BufferRef {
 public:
  explicit Output(uint64_t num_bytes) : BufferRef(nullptr, 0), wanted_bytes_(num_bytes) {}

 private:
  friend class Runtime;
  friend class Param;
  uint64_t wanted_bytes_;
};

}  // namespace tilewise::pto
