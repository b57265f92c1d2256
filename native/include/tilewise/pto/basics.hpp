/// Shared by the headers of tilewise/pto.hpp: errors, braced lists, scalars.
///
/// Include tilewise/pto.hpp, which says who may call and gives the units. Only an Error allocates, for its text.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <ranges>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "tilewise/pto_api.h"

namespace tilewise::pto {

inline constexpr double kForever = PTO_FOREVER;

/// A failed call. status(): a pto_status, usually PTO_TASK_FAILED, PTO_CANCELLED or PTO_TIMEOUT.
class Error : public std::runtime_error {
 public:
  Error(int status, const std::string& text) : std::runtime_error(text), status_(status) {}
  int status() const noexcept { return status_; }

 private:
  int status_;
};

namespace detail {

[[noreturn]] inline void throw_last() { throw Error(pto_last_status(), pto_last_error()); }
[[noreturn]] inline void refuse(const char* text) { throw Error(PTO_BAD_ARGUMENT, text); }
[[noreturn]] inline void raise_timeout(const char* call, double timeout_s) {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", timeout_s);
  throw Error(PTO_TIMEOUT, std::string("[pto.") + call + "] tasks must end within the timeout; got one that still " +
                               "runs or waits after " + seconds + " s; wait longer, or cancel it");
}
inline void check(int status) {
  if (status < 0) throw_last();
}
template <class Id>
Id check_id(Id id) {
  if (id == Id{}) throw_last();
  return id;
}

/// The rest of a timeout that several waits share.
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

/// A braced list, or any contiguous container of exactly T. Only a view: braced elements live as long as the call.
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

/// Inside a kernel: one of its scalars as submitted; T is an integer, double, float or pointer.
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

}  // namespace tilewise::pto
