// A matrix product as an orchestration in C++: C = A B in float32, tile by tile, loaded by path.
//
// args: handles of A [M, K], B [K, N] and C [M, N], then M, K, N (multiples of 64). The first task of a tile of C
// overwrites it, the others add to it, so the runtime lets them wait for each other and runs different tiles in
// parallel. docs/runtime.md says how to build it; Runtime.run_orchestration("matmul.so", "matmul_orchestration", [...])
// runs it.
#include <cstdint>

#include "tilewise/pto_api.h"

namespace {

constexpr uint64_t kTile = 64;

// scalars: floats per row of A, B and C; whether C is overwritten.
int gemm(void* const* buffers, const uint64_t* scalars) {
  const auto* a = static_cast<const float*>(buffers[0]);
  const auto* b = static_cast<const float*>(buffers[1]);
  auto* c = static_cast<float*>(buffers[2]);
  for (uint64_t i = 0; i < kTile; ++i) {
    float* row = c + i * scalars[2];
    for (uint64_t j = 0; scalars[3] != 0 && j < kTile; ++j) row[j] = 0;
    for (uint64_t k = 0; k < kTile; ++k) {
      const float factor = a[i * scalars[0] + k];
      for (uint64_t j = 0; j < kTile; ++j) row[j] += factor * b[k * scalars[1] + j];
    }
  }
  return PTO_OK;
}

// The tile at (row, col) of a matrix with `width` columns.
pto_region tile(uint64_t row, uint64_t col, uint64_t width) {
  return {(row * width + col) * sizeof(float), 2, {kTile, kTile * sizeof(float)}, {width * sizeof(float), 1}};
}

}  // namespace

extern "C" PTO_CALL int matmul_orchestration(PTORuntime* rt, const uint64_t* args) {
  const uint64_t m = args[3], k = args[4], n = args[5];
  const pto_kernel kernel = pto_kernel_add(rt, "gemm", gemm, 0);
  if (kernel < 0) return kernel;
  for (uint64_t i = 0; i < m; i += kTile) {
    for (uint64_t j = 0; j < n; j += kTile) {
      const pto_region c = tile(i, j, n);
      for (uint64_t p = 0; p < k; p += kTile) {
        const pto_region a = tile(i, p, k), b = tile(p, j, n);
        pto_param params[] = {{PTO_INPUT, 0, args[0], 0, &a, nullptr},
                              {PTO_INPUT, 0, args[1], 0, &b, nullptr},
                              {p == 0 ? PTO_OUTPUT : PTO_INOUT, 0, args[2], 0, &c, nullptr}};
        const uint64_t scalars[] = {k, n, n, p == 0};
        pto_task_spec spec{};
        spec.kernel = kernel;
        spec.worker_type = PTO_CUBE;
        spec.params = params;
        spec.num_params = 3;
        spec.scalars = scalars;
        spec.num_scalars = 4;
        if (pto_submit(rt, &spec) == 0) return pto_last_status();
      }
    }
  }
  return 0;
}
