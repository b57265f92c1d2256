// An optimizer's update of one parameter: a program of element-wise steps without branches.
//
// The call contains the program (src/tilewise/optim/rule.py writes it). It reads the weight, its states and its
// gradient and writes the weight and its states, in one pass over memory. A program of a known shape (update_shapes.h)
// is one loop in registers. Any other is run block by block: a block of values stays in the L1 cache, so a step is
// dispatched once per block. Nothing is written if the clipping scale is NaN.
#include "kernels/declared/update.h"

#include "kernels/kernel.h"
#include "kernels/tree.h"
#include "kernels/update_shapes.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

constexpr int64_t kBlock = 64;  // values per step: whole pairs of panel rows

/// A call of the kernel, whatever the dtype of the weight's copy is. Values are numbered: weight, states, gradient
/// (scaled), hyper-parameters, constants, results of steps.
struct Call {
  Tile<float> master;
  Tiles<float, 1> state;
  Tile<const float> grad, hyper, clip;
  Span<int64_t> steps, left;
  Span<double> constants;
  bool packed;
  int64_t num_states, num_steps, num_arrays, num_hyper, first_constant, first_result, num_values;

  template <class T>
  explicit Call(const UpdateKernel<T>& call)
      : master(call.master),
        state(call.state),
        grad(call.grad),
        hyper(call.hyper),
        clip(call.clip),
        steps(call.step),
        left(call.left),
        constants(call.constant),
        packed(call.packed),
        num_states(call.num_states),
        num_steps(call.num_steps),
        num_arrays(num_states + 1),
        num_hyper(hyper.cols),
        first_constant(num_arrays + 1 + num_hyper),
        first_result(first_constant + constants.size),
        num_values(first_result + num_steps) {}

  /// The kind of a step and its three operands.
  const int64_t* step(int64_t index) const { return steps.data + 4 * index; }
  Step kind(int64_t index) const { return static_cast<Step>(step(index)[0]); }
  float clip_scale() const { return clip.elements()[1]; }
  /// The weight, or one of its states.
  float* array(int64_t index) const { return index == 0 ? master.elements() : state[index - 1].elements(); }
  /// Elements in memory, including the padding of panels and rows.
  int64_t count() const {
    return packed ? round_up(master.rows, 32) * master.stride : (master.rows - 1) * master.stride + master.cols;
  }
};

/// bf16 panels pair neighbours along k: a row of 32 and the next one.
TILEWISE_INLINE void put_pair(bf16* to, const Lanes& even, const Lanes& odd) {
  stream(to, round_to_bf16(even) | shift_left<16>(round_to_bf16(odd)));
}

/// Values that are the same for all elements: hyper-parameters, constants, and results of steps on only these. `places`
/// marks them, and numbers the others as a shape does.
struct Prepared {
  Lanes* uniform;
  int64_t* places;

  Prepared(const Call& call, Carver& carver)
      : uniform(carver.take<Lanes>(call.num_values)), places(carver.take<int64_t>(call.num_values)) {
    for (int64_t v = 0; v < call.num_values; ++v) places[v] = v <= call.num_arrays ? v : kUniform;
    for (int64_t h = 0; h < call.num_hyper; ++h) uniform[call.num_arrays + 1 + h] = set(call.hyper.elements()[h]);
    for (int64_t f = 0; f < call.constants.size; ++f)
      uniform[call.first_constant + f] = set(static_cast<float>(call.constants[f]));
    int64_t next = call.num_arrays + 1;
    for (int64_t s = 0; s < call.num_steps; ++s) {
      const int64_t *step = call.step(s), v = call.first_result + s;
      if (is_uniform(step[1]) && is_uniform(step[2]) && is_uniform(step[3])) {
        with_kind(call.kind(s), [&]<Step kKind>() {
          uniform[v] = apply<kKind>(uniform[step[1]], uniform[step[2]], uniform[step[3]]);
        });
      } else {
        places[v] = next++;
      }
    }
  }

  bool is_uniform(int64_t value) const { return places[value] == kUniform; }
};

template <class AShape>
bool has_shape(const AShape& shape, const Call& call, const Prepared& ready) {
  if (call.num_states != shape.num_states) return false;
  int n = 0;
  for (int64_t s = 0; s < call.num_steps; ++s) {
    if (ready.is_uniform(call.first_result + s)) continue;
    if (n == shape.num_steps || shape.steps[n].kind != call.kind(s)) return false;
    for (int o = 0; o < num_operands(call.kind(s)); ++o)
      if (ready.places[call.step(s)[1 + o]] != shape.steps[n].operands[o]) return false;
    ++n;
  }
  for (int64_t a = 0; a < call.num_arrays; ++a)
    if (ready.places[call.left[a]] != shape.left[a]) return false;
  return n == shape.num_steps;
}

/// Runs a program of this shape, 16 elements at a time.
template <const auto& kShape, class T>
void run_shape(T* copy, const Call& call, const Prepared& ready) {
  constexpr int kArrays = kShape.num_states + 1;
  Lanes uniforms[kShape.num_uniforms()];
  for (int64_t s = 0, n = 0; s < call.num_steps; ++s) {
    if (ready.is_uniform(call.first_result + s)) continue;
    for (int o = 0; o < num_operands(call.kind(s)); ++o)
      if (const int64_t v = call.step(s)[1 + o]; ready.is_uniform(v)) uniforms[n++] = ready.uniform[v];
  }
  float* arrays[kArrays];
  for (int a = 0; a < kArrays; ++a) arrays[a] = call.array(a);
  const float* gradient = call.grad.elements();
  const Lanes clip = set(call.clip_scale());
  const auto element = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Lanes values[kShape.num_values];
#pragma GCC unroll 8
    for (int a = 0; a < kArrays; ++a) values[a] = load(arrays[a] + i, n);
    values[kArrays] = load(gradient + i, n) * clip;
    run_steps<kShape>(values, uniforms);
#pragma GCC unroll 8
    for (int a = 0; a < kArrays; ++a) store(arrays[a] + i, values[kShape.left[a]], n);
    return values[kShape.left[0]];
  };
  const int64_t count = call.count();
  if constexpr (sizeof(T) == 2) {
    if (copy && call.packed) {
      for (int64_t i = 0; i < count; i += 64)
        for (int64_t j = i; j < i + 32; j += kLanes) {
          const Lanes even = element(j, kLanes), odd = element(j + 32, kLanes);
          put_pair(copy + 2 * j - i, even, odd);
        }
      return;
    }
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes weight = element(i, count - i);
    if (copy) store(copy + i, weight, count - i);
  }
}

template <const auto&... kShapes, class T>
bool run_if_known(T* copy, const Call& call, const Prepared& ready) {
  return ((has_shape(kShapes, call, ready) && (run_shape<kShapes>(copy, call, ready), true)) || ...);
}

void run_step(Step kind, float* __restrict to, const float* a, const float* b, const float* c) {
  with_kind(kind, [&]<Step kKind>() __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kBlock; i += kLanes) store(to + i, apply<kKind>(load(a + i), load(b + i), load(c + i)));
  });
}

/// Loads `count` values of a block; the rest is zero.
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
void put_copy(bf16* to, const float* values, int64_t count, bool packed) {
  if (!packed) {
    for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(values + i), count - i);
    return;
  }
  for (int64_t i = 0; i < count; i += 64)
    for (int64_t j = i; j < i + 32; j += kLanes) put_pair(to + 2 * j - i, load(values + j), load(values + j + 32));
}

/// Runs any program, block by block.
template <class T>
void run_blocks(T* copy, const Call& call, const Prepared& ready, Carver& carver) {
  float** values = carver.take<float*>(call.num_values);
  for (int64_t v = 0; v < call.num_values; ++v) {
    values[v] = carver.take<float>(kBlock);
    if (ready.is_uniform(v))
      for (int64_t i = 0; i < kBlock; i += kLanes) store(values[v] + i, ready.uniform[v]);
  }
  const Lanes clip = set(call.clip_scale());
  float* const scaled = values[call.num_arrays];
  const int64_t count = call.count();
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t n = smaller(kBlock, count - i);
    for (int64_t a = 0; a < call.num_arrays; ++a) fetch(values[a], call.array(a) + i, n);
    fetch(scaled, call.grad.elements() + i, n);
    for (int64_t j = 0; j < kBlock; j += kLanes) store(scaled + j, load(scaled + j) * clip);
    for (int64_t s = 0; s < call.num_steps; ++s) {
      const int64_t *step = call.step(s), v = call.first_result + s;
      if (!ready.is_uniform(v)) run_step(call.kind(s), values[v], values[step[1]], values[step[2]], values[step[3]]);
    }
    for (int64_t a = 0; a < call.num_arrays; ++a) put_copy(call.array(a) + i, values[call.left[a]], n, call.packed);
    if (copy) put_copy(copy + i, values[call.left[0]], n, call.packed);
  }
}

// kernel update  f32 bf16
//   out weight?[m d]
//   inout master:f32[m d], state:f32...[m d]
//   in grad:f32[m d], hyper:f32[1 _], clip:f32[1 2]
//   flag packed
//   int num_states=count(state), num_steps, step...(4*num_steps), left...
//   double constant...
//   flops steps * m * d
//   bytes (8 * states + 12 + item % 4) * m * d
//   let operands_and_ints = 8 + num_states + 4 * num_steps + len(left)
//   let values = hyper.cols + clip.cols + operands_and_ints
//   scratch values * (4 * 64 + 2 * 64) + (1 << 14)
/// `weight` is a copy of the weight in its own dtype. A step is its kind and three operands; `left` is the value that
/// the weight and each of its states become.
template <class T>
void UpdateKernel<T>::run() const {
  const Call call(*this);
  const float scale = call.clip_scale();
  if (master.rows == 0 || master.cols == 0 || scale != scale) return;
  Carver carver(scratch);
  const Prepared ready(call, carver);
  T* const copy = weight.elements();
  if (!run_if_known<kMomentum, kSignOfMean, kTwoMoments>(copy, call, ready)) run_blocks(copy, call, ready, carver);
  finish_streams();
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/update_entries.h"
