// The kinds of steps of an update, and the shapes of programs that the compiler turns into one loop each.
//
// A shape consists of the steps that are done for every element, without those on hyper-parameters and constants only.
// A program with such a shape keeps its values in registers; any other is run step by step (update.cc), with the same
// bits. Shapes are recognized by content: no optimizer is named here, and one with another shape is only slower.
// tests/native/kernels/test_kernel_update.py checks that the optimizers of this package have shapes.
#pragma once
#include "kernels/math.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Numbered as in src/tilewise/kernels/reference.py.
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

constexpr int num_operands(Step kind) {
  if (kind == Step::kFused) return 3;
  return kind == Step::kRoot || kind == Step::kNegate || kind == Step::kAbsolute || kind == Step::kSign ? 1 : 2;
}

TILEWISE_INLINE Lanes sign_of(const Lanes& x) {
  const Lanes zero = set(0.0f);
  Lanes r = select(greater(x, zero), set(1.0f), select(greater(zero, x), set(-1.0f), zero));
  TILEWISE_EACH_PART r.part[p] = x.part[p] == x.part[p] ? r.part[p] : x.part[p];
  return r;
}

/// One step on 16 elements; operands that its kind does not have are ignored.
template <Step kKind>
TILEWISE_INLINE Lanes apply(const Lanes& x, const Lanes& y, const Lanes& z) {
  if constexpr (kKind == Step::kAdd) return x + y;
  if constexpr (kKind == Step::kSubtract) return x - y;
  if constexpr (kKind == Step::kMultiply) return x * y;
  if constexpr (kKind == Step::kDivide) return x / y;
  if constexpr (kKind == Step::kFused) return fused(x, y, z);
  if constexpr (kKind == Step::kRoot) return square_root(x);
  if constexpr (kKind == Step::kNegate) return negate(x);
  if constexpr (kKind == Step::kAbsolute) return maximum(x, negate(x));
  if constexpr (kKind == Step::kSign) return sign_of(x);
  if constexpr (kKind == Step::kMaximum) return maximum(x, y);
  if constexpr (kKind == Step::kMinimum) return minimum(x, y);
}

/// Calls f<kind>() for a kind known at run time.
template <class F>
TILEWISE_INLINE void with_kind(Step kind, const F& f) {
  switch (kind) {
    case Step::kAdd:
      return f.template operator()<Step::kAdd>();
    case Step::kSubtract:
      return f.template operator()<Step::kSubtract>();
    case Step::kMultiply:
      return f.template operator()<Step::kMultiply>();
    case Step::kDivide:
      return f.template operator()<Step::kDivide>();
    case Step::kFused:
      return f.template operator()<Step::kFused>();
    case Step::kRoot:
      return f.template operator()<Step::kRoot>();
    case Step::kNegate:
      return f.template operator()<Step::kNegate>();
    case Step::kAbsolute:
      return f.template operator()<Step::kAbsolute>();
    case Step::kSign:
      return f.template operator()<Step::kSign>();
    case Step::kMaximum:
      return f.template operator()<Step::kMaximum>();
    case Step::kMinimum:
      return f.template operator()<Step::kMinimum>();
  }
}

/// Stands for a value that is the same for all elements.
inline constexpr int kUniform = -1;

/// Values are numbered: weight, states, gradient (scaled), results of the steps. `left` has the new values of
/// weight and states.
template <int kStates, int kSteps>
struct Shape {
  struct Element {
    Step kind;
    int operands[3];
  };
  static constexpr int num_states = kStates, num_steps = kSteps, num_values = kStates + 2 + kSteps;
  Element steps[kSteps];
  int left[kStates + 1];

  /// The number of uniform operands before this one.
  constexpr int uniforms_before(int step, int operand) const {
    int count = 0;
    for (int s = 0; s <= step; ++s)
      for (int o = 0; o < (s < step ? num_operands(steps[s].kind) : operand); ++o)
        count += steps[s].operands[o] == kUniform;
    return count;
  }
  constexpr int num_uniforms() const { return uniforms_before(kSteps - 1, num_operands(steps[kSteps - 1].kind)); }
};

/// A momentum, which is subtracted from the weight.
inline constexpr Shape<1, 3> kMomentum = {{
                                              {Step::kFused, {1, kUniform, 2}},
                                              {Step::kMultiply, {0, kUniform}},
                                              {Step::kFused, {3, kUniform, 4}},
                                          },
                                          {5, 3}};
/// The sign of one mean of momentum and gradient, and a second such mean.
inline constexpr Shape<1, 7> kSignOfMean = {{
                                                {Step::kMultiply, {kUniform, 2}},
                                                {Step::kFused, {1, kUniform, 3}},
                                                {Step::kSign, {4}},
                                                {Step::kMultiply, {0, kUniform}},
                                                {Step::kFused, {5, kUniform, 6}},
                                                {Step::kMultiply, {kUniform, 2}},
                                                {Step::kFused, {1, kUniform, 8}},
                                            },
                                            {7, 9}};
/// Two moments; the first is divided by the root of the second.
inline constexpr Shape<2, 10> kTwoMoments = {{
                                                 {Step::kMultiply, {kUniform, 3}},
                                                 {Step::kFused, {1, kUniform, 4}},
                                                 {Step::kMultiply, {kUniform, 3}},
                                                 {Step::kMultiply, {6, 3}},
                                                 {Step::kFused, {2, kUniform, 7}},
                                                 {Step::kRoot, {8}},
                                                 {Step::kFused, {9, kUniform, kUniform}},
                                                 {Step::kDivide, {5, 10}},
                                                 {Step::kMultiply, {0, kUniform}},
                                                 {Step::kFused, {11, kUniform, 12}},
                                             },
                                             {13, 5, 8}};

template <const auto& kShape, int kStep, int kOperand>
TILEWISE_INLINE const Lanes& operand_of(const Lanes* values, const Lanes* uniforms) {
  constexpr auto& step = kShape.steps[kStep];
  if constexpr (kOperand < num_operands(step.kind) && step.operands[kOperand] == kUniform)
    return uniforms[kShape.uniforms_before(kStep, kOperand)];
  else
    return values[step.operands[kOperand]];
}

/// All steps on 16 elements; uniform values are in the order in which the steps use them.
template <const auto& kShape, int kStep = 0>
TILEWISE_INLINE void run_steps(Lanes* values, const Lanes* uniforms) {
  if constexpr (kStep < kShape.num_steps) {
    values[kShape.num_states + 2 + kStep] = apply<kShape.steps[kStep].kind>(
        operand_of<kShape, kStep, 0>(values, uniforms), operand_of<kShape, kStep, 1>(values, uniforms),
        operand_of<kShape, kStep, 2>(values, uniforms));
    run_steps<kShape, kStep + 1>(values, uniforms);
  }
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
