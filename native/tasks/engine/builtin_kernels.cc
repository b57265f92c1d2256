// See builtin_kernels.h.
#include "tasks/engine/builtin_kernels.h"

#include <algorithm>
#include <cstring>

namespace tilewise::tasks {

namespace {

template <class Element, class Combine>
int combine(void* const* buffers, const uint64_t* scalars, Combine&& op) {
  auto* target = static_cast<Element*>(buffers[0]);
  const auto* source = static_cast<const Element*>(buffers[1]);
  for (uint64_t i = 0; i < scalars[0] / sizeof(Element); ++i) target[i] = op(target[i], source[i]);
  return PTO_OK;
}

template <class Element>
int sum(void* const* buffers, const uint64_t* scalars) {
  return combine<Element>(buffers, scalars, [](Element a, Element b) { return static_cast<Element>(a + b); });
}

int max_f32(void* const* buffers, const uint64_t* scalars) {
  return combine<float>(buffers, scalars, [](float a, float b) { return std::max(a, b); });
}

int min_f32(void* const* buffers, const uint64_t* scalars) {
  return combine<float>(buffers, scalars, [](float a, float b) { return std::min(a, b); });
}

int copy(void* const* buffers, const uint64_t* scalars) {
  std::memmove(buffers[0], buffers[1], scalars[0]);
  return PTO_OK;
}

int fill(void* const* buffers, const uint64_t* scalars) {
  std::memset(buffers[0], static_cast<int>(scalars[1] & 0xFF), scalars[0]);
  return PTO_OK;
}

constexpr BuiltinKernel kKernels[] = {
    {"copy", copy, 2, 1, 1, false},
    {"fill", fill, 1, 2, 1, false},
    {"sum_f32", sum<float>, 2, 1, sizeof(float), true},
    {"sum_f64", sum<double>, 2, 1, sizeof(double), true},
    {"sum_i64", sum<int64_t>, 2, 1, sizeof(int64_t), true},
    {"max_f32", max_f32, 2, 1, sizeof(float), true},
    {"min_f32", min_f32, 2, 1, sizeof(float), true},
};

}  // namespace

std::span<const BuiltinKernel> builtin_kernels() { return kKernels; }

}  // namespace tilewise::tasks
