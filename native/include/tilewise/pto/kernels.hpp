/// Kernels of tilewise/pto.hpp: converts a function of the program to the function type of the C interface.
///
/// Include tilewise/pto.hpp. A function that the C interface can call is used as it is. A capture-free lambda with
/// another return type gets a wrapper at compile time. A pointer to such a function gets one of a fixed number of
/// wrappers that call it and return a status.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "tilewise/pto/params.hpp"

namespace tilewise::pto::detail {

/// The status of a kernel that returns a Result.
template <class Result, class Function>
int status_of_kernel(Function&& function, void* const* buffers, const uint64_t* scalars) {
  if constexpr (std::is_void_v<Result>) {
    function(buffers, scalars);
    return PTO_OK;
  } else {
    return static_cast<int>(function(buffers, scalars));
  }
}

/// Functions that call a pointer known only at run time. Each is bound to its pointer for ever.
template <class Result>
class Adapters {
 public:
  using Function = Result (*)(void* const*, const uint64_t*);

  static pto_kernel_fn adapter_of(Function function) {
    for (size_t at = 0; at < kCount; ++at) {
      Function bound = nullptr;
      if (functions[at].compare_exchange_strong(bound, function) || bound == function) return kAdapters[at];
    }
    refuse(
        "[pto.kernel] a program must have at most 256 kernels whose functions return neither int nor a status; got "
        "more; "
        "let it return int");
  }

 private:
  static constexpr size_t kCount = 256;
  template <size_t at>
  static int call(void* const* buffers, const uint64_t* scalars) {
    return status_of_kernel<Result>(functions[at].load(std::memory_order_relaxed), buffers, scalars);
  }
  template <size_t... places>
  static constexpr std::array<pto_kernel_fn, kCount> adapters(std::index_sequence<places...>) {
    return {&call<places>...};
  }

  static inline std::array<std::atomic<Function>, kCount> functions{};
  static constexpr std::array<pto_kernel_fn, kCount> kAdapters = adapters(std::make_index_sequence<kCount>());
};

/// The address that pto_kernel_add takes.
template <class Callable>
pto_kernel_fn kernel_function(Callable callable) {
  using Result = std::invoke_result_t<Callable, void* const*, const uint64_t*>;
  if constexpr (std::is_convertible_v<Callable, pto_kernel_fn>) {
    return callable;
  } else if constexpr (std::is_pointer_v<Callable>) {
    return Adapters<Result>::adapter_of(callable);
  } else {
    static_assert(std::is_empty_v<Callable> && std::is_default_constructible_v<Callable>,
                  "a kernel must not capture: pass what it needs as scalars");
    return [](void* const* buffers, const uint64_t* scalars) -> int {
      return status_of_kernel<Result>(Callable{}, buffers, scalars);
    };
  }
}

}  // namespace tilewise::pto::detail
