// Shared by the tests of the task runtime: a runtime that closes itself, short parameters, plain kernels.
//
// Who may call: tests only. Blocks: Gate kernels until they are opened. Memory: of the test.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "tilewise/pto_api.h"

namespace tilewise::tasks::testing {

#if defined(__SANITIZE_THREAD__)
inline constexpr int kSlowdown = 20;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowdown = 4;
#else
inline constexpr int kSlowdown = 1;
#endif

inline pto_param in(pto_handle handle, const pto_region* region = nullptr) {
  return {PTO_INPUT, 0, handle, 0, region, nullptr};
}
inline pto_param out(pto_handle handle, const pto_region* region = nullptr) {
  return {PTO_OUTPUT, 0, handle, 0, region, nullptr};
}
inline pto_param inout(pto_handle handle, const pto_region* region = nullptr) {
  return {PTO_INOUT, 0, handle, 0, region, nullptr};
}
inline pto_param commute(pto_handle handle) { return {PTO_COMMUTE, 0, handle, 0, nullptr, nullptr}; }
inline pto_param reduce(pto_handle handle, pto_kernel combine) {
  return {PTO_REDUCE, combine, handle, 0, nullptr, nullptr};
}
inline pto_param fresh(uint64_t bytes) { return {PTO_OUTPUT, 0, 0, bytes, nullptr, nullptr}; }
inline pto_param no_dep(pto_handle handle) { return {PTO_NO_DEP, 0, handle, 0, nullptr, nullptr}; }
inline pto_param raw(void* address) { return {PTO_NO_DEP, 0, 0, {.address = address}, nullptr, nullptr}; }

template <class Value>
uint64_t scalar(Value* address) {
  return reinterpret_cast<uint64_t>(address);
}
inline uint64_t scalar(uint64_t value) { return value; }
template <class Value>
Value* pointer(uint64_t word) {
  return reinterpret_cast<Value*>(word);
}

/// The options of a submission besides kernel and parameters.
struct Extra {
  std::vector<uint64_t> scalars = {};
  std::vector<pto_task> after = {};
  std::vector<pto_wait_for> waits = {};
  int32_t priority = 0;
  int32_t target_worker = 0;
  pto_handle predicate = 0;
  uint32_t flags = 0;
  pto_worker_type type = PTO_VECTOR;
};

class Runtime {
 public:
  explicit Runtime(const pto_config& config) { EXPECT_EQ(pto_runtime_open(&config, &runtime_), 0); }
  explicit Runtime(uint32_t workers = 1, uint32_t window = 0) : Runtime(config(workers, window)) {}
  ~Runtime() {
    if (runtime_ != nullptr) EXPECT_EQ(pto_runtime_close(runtime_), 0);
  }
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  operator PTORuntime*() const { return runtime_; }

  static pto_config config(uint32_t workers, uint32_t window = 0) {
    pto_config config;
    pto_config_init(&config);
    config.num_workers = workers == 0 ? PTO_NO_WORKERS : workers;
    config.window = window;
    return config;
  }

  pto_kernel kernel(const char* name, pto_kernel_fn function, uint32_t flags = 0) {
    const pto_kernel id = pto_kernel_add(runtime_, name, function, flags);
    EXPECT(id >= 0);
    return id;
  }
  template <class Value>
  pto_handle add(Value& value) {
    return pto_register(runtime_, &value, sizeof(value));
  }
  template <class Value>
  pto_handle add(std::vector<Value>& values) {
    return pto_register(runtime_, values.data(), values.size() * sizeof(Value));
  }
  /// Runtime-owned outputs get their handles in `params`.
  pto_task submit(pto_kernel kernel, std::vector<pto_param>& params, const Extra& extra = {}) {
    pto_task_spec spec{};
    spec.kernel = kernel;
    spec.worker_type = extra.type;
    spec.params = params.data();
    spec.num_params = static_cast<uint32_t>(params.size());
    spec.scalars = extra.scalars.data();
    spec.num_scalars = static_cast<uint32_t>(extra.scalars.size());
    spec.after = extra.after.data();
    spec.num_after = static_cast<uint32_t>(extra.after.size());
    spec.waits = extra.waits.data();
    spec.num_waits = static_cast<uint32_t>(extra.waits.size());
    spec.priority = extra.priority;
    spec.target_worker = extra.target_worker;
    spec.predicate = extra.predicate;
    spec.flags = extra.flags;
    return pto_submit(runtime_, &spec);
  }
  pto_task submit(pto_kernel kernel, std::initializer_list<pto_param> params, const Extra& extra = {}) {
    std::vector<pto_param> copy(params);
    return submit(kernel, copy, extra);
  }
  /// A task whose first parameter is a new runtime-owned buffer; returns the buffer.
  pto_handle make(pto_kernel kernel, uint64_t bytes, std::initializer_list<pto_param> others = {},
                  const Extra& extra = {}) {
    std::vector<pto_param> params{fresh(bytes)};
    params.insert(params.end(), others);
    submit(kernel, params, extra);
    return params[0].handle;
  }
  pto_stats stats() const {
    pto_stats stats{};
    EXPECT_EQ(pto_get_stats(runtime_, &stats), 0);
    return stats;
  }

 private:
  PTORuntime* runtime_ = nullptr;
};

/// Blocks tasks until it is opened: scalars = {address of the gate}.
struct Gate {
  std::atomic<int> is_open{0};
  std::atomic<int> num_inside{0};
  void open() { is_open.store(1); }
  void await_inside(int count) {
    while (num_inside.load() < count) std::this_thread::yield();
  }
  static int kernel(void* const*, const uint64_t* scalars) {
    Gate* gate = pointer<Gate>(scalars[0]);
    gate->num_inside.fetch_add(1);
    while (gate->is_open.load() == 0) std::this_thread::yield();
    return PTO_OK;
  }
};

// Plain kernels on int64_t buffers.
inline int64_t& value_of(void* buffer) { return *static_cast<int64_t*>(buffer); }

/// target = scalars[0]
inline int set_kernel(void* const* buffers, const uint64_t* scalars) {
  value_of(buffers[0]) = static_cast<int64_t>(scalars[0]);
  return PTO_OK;
}
/// target += source
inline int add_kernel(void* const* buffers, const uint64_t*) {
  value_of(buffers[0]) += value_of(buffers[1]);
  return PTO_OK;
}
/// target = target * 3 + scalars[0]: shows the order
inline int step_kernel(void* const* buffers, const uint64_t* scalars) {
  value_of(buffers[0]) = value_of(buffers[0]) * 3 + static_cast<int64_t>(scalars[0]);
  return PTO_OK;
}
/// target = source
inline int copy_kernel(void* const* buffers, const uint64_t*) {
  value_of(buffers[0]) = value_of(buffers[1]);
  return PTO_OK;
}
inline int fail_kernel(void* const*, const uint64_t*) {
  pto_fail("planted failure");
  return 7;
}
inline int empty_kernel(void* const*, const uint64_t*) { return PTO_OK; }
/// Counts itself: scalars[0] is the address of an atomic int.
inline int count_kernel(void* const*, const uint64_t* scalars) {
  pointer<std::atomic<int>>(scalars[0])->fetch_add(1);
  return PTO_OK;
}
/// Runs for scalars[0] microseconds.
inline int busy_kernel(void* const*, const uint64_t* scalars) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(scalars[0]);
  while (std::chrono::steady_clock::now() < end) {
  }
  return PTO_OK;
}

inline bool has(const char* text, const char* part) { return std::string(text).find(part) != std::string::npos; }
inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace tilewise::tasks::testing
