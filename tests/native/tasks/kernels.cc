// Kernels for the tests of the task runtime, as a user's library exports them.
#include <time.h>

#include <cstdint>
#include <stdexcept>

#include "tilewise/pto_api.h"

extern "C" {

struct Operand {
  uint64_t mode, rows, cols, stride;
};
struct Work {
  uint64_t seed, fails, delay_ns, num_operands;
  Operand operands[8];
};

static int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

/// Hashes every byte it may read into what it writes, so that a wrong order changes bytes. scalars[0]: a Work.
PTO_CALL int mix(void* const* buffers, const uint64_t* scalars) {
  const Work& work = *reinterpret_cast<const Work*>(scalars[0]);
  for (const int64_t end = now_ns() + static_cast<int64_t>(work.delay_ns); now_ns() < end;) {
  }
  if (work.fails != 0) {
    pto_fail("failed as requested");
    return 7;
  }
  uint64_t hash = work.seed;
  const auto each = [&](uint64_t index, auto&& body) {
    const Operand& operand = work.operands[index];
    auto* bytes = static_cast<uint8_t*>(buffers[index]);
    for (uint64_t r = 0; r < operand.rows; ++r) {
      for (uint64_t c = 0; c < operand.cols; ++c) body(bytes[r * operand.stride + c], r * 31 + c);
    }
  };
  for (uint64_t i = 0; i < work.num_operands; ++i) {
    if (work.operands[i].mode != PTO_INPUT && work.operands[i].mode != PTO_INOUT) continue;
    each(i, [&](uint8_t& byte, uint64_t) { hash = (hash ^ byte) * 0x100000001b3ull; });
  }
  for (uint64_t i = 0; i < work.num_operands; ++i) {
    if (work.operands[i].mode == PTO_OUTPUT || work.operands[i].mode == PTO_INOUT) {
      each(i, [&](uint8_t& byte, uint64_t place) { byte = static_cast<uint8_t>((hash >> (place % 56)) + place); });
    } else if (work.operands[i].mode == PTO_COMMUTE) {
      each(i, [&](uint8_t& byte, uint64_t place) { byte = static_cast<uint8_t>(byte + hash + place); });
    } else if (work.operands[i].mode == PTO_REDUCE) {
      auto* sums = static_cast<uint64_t*>(buffers[i]);
      for (uint64_t k = 0; k < work.operands[i].rows * work.operands[i].cols / 8; ++k) sums[k] = hash * (k + 1);
    }
  }
  return PTO_OK;
}

/// buffers[0][0] += scalars[0], as int64.
PTO_CALL int add_i64(void* const* buffers, const uint64_t* scalars) {
  *static_cast<int64_t*>(buffers[0]) += static_cast<int64_t>(scalars[0]);
  return PTO_OK;
}

/// Adds a double that came as bits.
PTO_CALL int add_f64(void* const* buffers, const uint64_t* scalars) {
  double value;
  __builtin_memcpy(&value, &scalars[0], sizeof(value));
  *static_cast<double*>(buffers[0]) += value;
  return PTO_OK;
}

/// Takes scalars[0] ms.
PTO_CALL int nap(void* const*, const uint64_t* scalars) {
  const timespec time{static_cast<time_t>(scalars[0] / 1000), static_cast<long>(scalars[0] % 1000 * 1'000'000)};
  nanosleep(&time, nullptr);
  return PTO_OK;
}

/// Another thread will complete it.
PTO_CALL int later(void* const*, const uint64_t*) { return PTO_LATER; }

/// buffers[0][0] = buffers[1][0] + 1, as int64.
PTO_CALL int next_i64(void* const* buffers, const uint64_t*) {
  *static_cast<int64_t*>(buffers[0]) = *static_cast<const int64_t*>(buffers[1]) + 1;
  return PTO_OK;
}

/// Submits args[1] additions of args[2] to the buffer args[0]; returns 5 when args[3] says so.
PTO_CALL int orchestrate(PTORuntime* runtime, const uint64_t* args) {
  const pto_kernel add = pto_kernel_add(runtime, "add_i64", add_i64, 0);
  for (uint64_t n = 0; n < args[1]; ++n) {
    pto_param param{};
    param.mode = PTO_INOUT;
    param.handle = args[0];
    pto_task_spec spec{};
    spec.kernel = add;
    spec.worker_type = PTO_VECTOR;
    spec.params = &param;
    spec.num_params = 1;
    spec.scalars = &args[2];
    spec.num_scalars = 1;
    if (pto_submit(runtime, &spec) == 0) return pto_last_status();
  }
  return args[3] != 0 ? 5 : 0;
}

/// Opens two scopes, takes half of the heap that args[0] names in each, and throws.
PTO_CALL int throw_in_scopes(PTORuntime* runtime, const uint64_t* args) {
  for (int n = 0; n < 2; ++n) {
    pto_scope_begin(runtime);
    if (pto_alloc(runtime, args[0] / 2) == 0) return pto_last_status();
  }
  throw std::runtime_error("thrown on purpose");
}

/// An orchestration that ends with a status of its own, after a call that fails or after none.
PTO_CALL int orchestrate_status(PTORuntime* runtime, const uint64_t* args) {
  if (args[0] != 0) (void)pto_scope_end(nullptr);
  return args[0] == 2 ? pto_runtime_close(runtime) : 5;
}

/// With views: multiplies a matrix of float, of any strides, by scalars[0], a double.
PTO_CALL int scale_view(void* const* buffers, const uint64_t* scalars) {
  const pto_view& view = *static_cast<const pto_view*>(buffers[0]);
  if (view.type != PTO_F32 || view.ndim != 2) {
    pto_fail("it works on matrices of float");
    return 7;
  }
  double factor;
  __builtin_memcpy(&factor, &scalars[0], sizeof(factor));
  for (uint64_t i = 0; i < view.size[0]; ++i) {
    for (uint64_t j = 0; j < view.size[1]; ++j) {
      auto* at = reinterpret_cast<float*>(static_cast<char*>(view.data) + i * view.stride[0] + j * view.stride[1]);
      *at = static_cast<float>(*at * factor);
    }
  }
  return PTO_OK;
}
}
