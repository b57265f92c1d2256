// An optimizer's update of one parameter: a straight-line program of element-wise steps, run block by block.
//
// The program comes with the call (src/tilewise/optim/rule.py writes it): the weight, its states and its gradient in,
// the weight and its states out, in one pass over memory. A block of values stays in the first-level cache, so a
// step's dispatch is paid once per block and memory sets the pace. Nothing is written when the clipping scale is NaN.
#include "kernels/math.h"
#include "kernels/registry.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

constexpr int64_t kBlock = 64;  // values per step: whole pairs of panel rows

enum class Step : int64_t {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFused,
  kRoot,
  kNegate,
  kAbsolute,
  kSign,
  kMaximum,
  kMinimum
};

/// Operand layout: weight copy (or absent), weight, states..., gradient, hyper, clip.
/// Integers: packed, number of states, number of steps, then per step its kind and three operands, then per array
/// (weight, states) the value it is left with. Values are numbered: weight, states, gradient (scaled),
/// hyper-parameters, constants (the floats), results of steps.
struct Call {
  const KernelArgs& args;
  int64_t num_states, num_steps, num_arrays, num_hyper, first_constant, first_result, num_values;

  explicit Call(const KernelArgs& given) : args(given) {
    num_states = args.ints[1];
    num_steps = args.ints[2];
    num_arrays = num_states + 1;
    num_hyper = tile(num_arrays + 2).cols;
    first_constant = num_arrays + 1 + num_hyper;
    first_result = first_constant + args.num_floats;
    num_values = first_result + num_steps;
  }

  const TileView& tile(int64_t index) const { return args.tiles[index]; }
  const int64_t* step(int64_t index) const { return args.ints + 3 + 4 * index; }
  int64_t left(int64_t array) const { return args.ints[3 + 4 * num_steps + array]; }
  const float* hyper() const { return static_cast<const float*>(tile(num_arrays + 2).data); }
  float clip() const { return static_cast<const float*>(tile(num_arrays + 3).data)[1]; }
};

TILEWISE_INLINE Lanes sign_of(const Lanes& x) {
  const Lanes zero = set(0.0f);
  Lanes r = select(greater(x, zero), set(1.0f), select(greater(zero, x), set(-1.0f), zero));
  TILEWISE_EACH_PART r.part[p] = x.part[p] == x.part[p] ? r.part[p] : x.part[p];
  return r;
}

template <class F>
TILEWISE_INLINE void each(float* __restrict to, const float* a, const float* b, const float* c, F f) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kBlock; i += kLanes) store(to + i, f(load(a + i), load(b + i), load(c + i)));
}

void run_step(Step kind, float* to, const float* a, const float* b, const float* c) {
  using L = const Lanes&;
  switch (kind) {
    case Step::kAdd:
      return each(to, a, b, c, [](L x, L y, L) { return x + y; });
    case Step::kSubtract:
      return each(to, a, b, c, [](L x, L y, L) { return x - y; });
    case Step::kMultiply:
      return each(to, a, b, c, [](L x, L y, L) { return x * y; });
    case Step::kDivide:
      return each(to, a, b, c, [](L x, L y, L) { return x / y; });
    case Step::kFused:
      return each(to, a, b, c, [](L x, L y, L z) { return fused(x, y, z); });
    case Step::kRoot:
      return each(to, a, b, c, [](L x, L, L) { return square_root(x); });
    case Step::kNegate:
      return each(to, a, b, c, [](L x, L, L) { return negate(x); });
    case Step::kAbsolute:
      return each(to, a, b, c, [](L x, L, L) { return maximum(x, negate(x)); });
    case Step::kSign:
      return each(to, a, b, c, [](L x, L, L) { return sign_of(x); });
    case Step::kMaximum:
      return each(to, a, b, c, [](L x, L y, L) { return maximum(x, y); });
    case Step::kMinimum:
      return each(to, a, b, c, [](L x, L y, L) { return minimum(x, y); });
  }
}

TILEWISE_INLINE void fill(float* to, float value) {
  for (int64_t i = 0; i < kBlock; i += kLanes) store(to + i, set(value));
}

/// `count` of a block's values from memory; the rest is zero.
TILEWISE_INLINE void fetch(float* to, const float* from, int64_t count) {
  if (count == kBlock) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kBlock; i += kLanes) store(to + i, load(from + i));
    return;
  }
  for (int64_t i = 0; i < kBlock; i += kLanes) store(to + i, i < count ? load(from + i, count - i) : set(0.0f));
}

void put_copy(float* to, const float* values, int64_t count, bool) {
  if (count == kBlock) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kBlock; i += kLanes) store(to + i, load(values + i));
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(values + i), count - i);
}
/// bf16 panels pair neighbours along k: a row of 32 and the next one.
void put_copy(bf16* to, const float* values, int64_t count, bool packed) {
  if (!packed) {
    for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(values + i), count - i);
    return;
  }
  for (int64_t i = 0; i < count; i += 64)
    for (int64_t j = i; j < i + 32; j += kLanes) {
      const IntLanes even = round_to_bf16(load(values + j)), odd = round_to_bf16(load(values + j + 32));
      store_int(to + i + 2 * (j - i), even | shift_left<16>(odd));
    }
}

/// Values that no element changes: hyper-parameters, constants, and steps on such alone. Marks the others.
void prepare(const Call& call, float* const* values, bool* is_uniform) {
  for (int64_t v = 0; v <= call.num_arrays; ++v) is_uniform[v] = false;
  for (int64_t h = 0; h < call.num_hyper; ++h) fill(values[call.num_arrays + 1 + h], call.hyper()[h]);
  for (int64_t f = 0; f < call.args.num_floats; ++f)
    fill(values[call.first_constant + f], static_cast<float>(call.args.floats[f]));
  for (int64_t v = call.num_arrays + 1; v < call.first_result; ++v) is_uniform[v] = true;
  for (int64_t s = 0; s < call.num_steps; ++s) {
    const int64_t* step = call.step(s);
    const int64_t v = call.first_result + s;
    is_uniform[v] = is_uniform[step[1]] && is_uniform[step[2]] && is_uniform[step[3]];
    if (is_uniform[v])
      run_step(static_cast<Step>(step[0]), values[v], values[step[1]], values[step[2]], values[step[3]]);
  }
}

template <class T>
void update(const KernelArgs& args) {
  const Call call(args);
  const TileView& weight = call.tile(1);
  const float clip = call.clip();
  if (weight.rows == 0 || weight.cols == 0 || clip != clip) return;
  Carver carver(args.scratch);
  float** values = carver.take<float*>(call.num_values);
  bool* is_uniform = carver.take<bool>(call.num_values);
  for (int64_t v = 0; v < call.num_values; ++v) values[v] = carver.take<float>(kBlock);
  prepare(call, values, is_uniform);
  const bool packed = args.ints[0] != 0;
  const int64_t count =
      packed ? round_up(weight.rows, 32) * weight.stride : (weight.rows - 1) * weight.stride + weight.cols;
  auto* copy = static_cast<T*>(call.tile(0).data);
  const auto* gradient = static_cast<const float*>(call.tile(call.num_arrays + 1).data);
  float* const scaled = values[call.num_arrays];
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t n = smaller(kBlock, count - i);
    for (int64_t a = 0; a < call.num_arrays; ++a) fetch(values[a], static_cast<float*>(call.tile(1 + a).data) + i, n);
    fetch(scaled, gradient + i, n);
    for (int64_t j = 0; j < kBlock; j += kLanes) store(scaled + j, load(scaled + j) * set(clip));
    for (int64_t s = 0; s < call.num_steps; ++s) {
      const int64_t v = call.first_result + s;
      const int64_t* step = call.step(s);
      if (!is_uniform[v])
        run_step(static_cast<Step>(step[0]), values[v], values[step[1]], values[step[2]], values[step[3]]);
    }
    for (int64_t a = 0; a < call.num_arrays; ++a)
      put_copy(static_cast<float*>(call.tile(1 + a).data) + i, values[call.left(a)], n, packed);
    if (copy) put_copy(copy + i, values[call.left(0)], n, packed);
  }
}

constexpr Entry kEntries[] = {{"update_f32", update<float>}, {"update_bf16", update<bf16>}};

}  // namespace

EntryList update_entries() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
