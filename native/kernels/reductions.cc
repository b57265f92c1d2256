// Trees over batch splits, in one call or resumed over several, and the gradient norm in fp64.
#include "kernels/declared/reductions.h"

#include "kernels/kernel.h"
#include "kernels/math.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

// kernel split_tree  f32
//   out out:f32[1 d]
//   in partials:f32[_ _], carry:f32...[1 d]
//   int num_carries=count(carry), split_len, num_k_splits
//   flag is_padded
//   flops m * d
//   bytes 4 * m * d
/// A row of `partials` has the sums of a batch split's sequence splits. Adds along the tree over the sequence splits of
/// every batch split, then along the tree over the batch splits, then each carry in front. Padding adds zeros, which
/// can only change the sign of a zero; + 0 removes it.
void SplitTreeKernel::run() const {
  const SequenceSplits k_splits{split_len, num_k_splits};
  const Lanes zero = set(is_padded ? 0.0f : -0.0f);
  for (int64_t c = 0; c < out.cols; c += kLanes) {
    const int64_t n = out.cols - c;
    TreeStack batch_splits;
    Lanes sum = set(0.0f);
    for (int64_t split = 0; split < partials.rows; ++split) {
      const float* row = partials.row(split) + c;
      TreeStack inner;
      for (int64_t p = 0; p < k_splits.num_stored(); ++p)
        sum = inner.add(load(row + p * out.cols, n), k_splits.slot(p),
                        p + 1 < k_splits.num_stored() ? k_splits.slot(p + 1) : 0);
      sum = batch_splits.add(sum, split, split + 1 < partials.rows ? split + 1 : 0);
    }
    for (int64_t i = 0; i < num_carries; ++i) sum = load(carry[i].elements() + c, n) + sum;
    store(out.elements() + c, sum + zero, n);
  }
}

// kernel head_sum  f32
//   out out:f32[1 d]
//   in x:f32[1 _]
//   int num_k_splits, range...(2*num_k_splits)
//   within range x
//   flops m * d
//   bytes 4 * m * d
/// `range` has the elements [begin, end) of every k split's heads, empty for heads on other devices. Heads of a k split
/// are added in order, then k splits along the tree. Without heads the sum is -0, the neutral element of addition.
void HeadSumKernel::run() const {
  const float* heads = x.elements();
  const int64_t d = out.cols;
  const auto next_local = [&](int64_t k_split) {
    while (k_split < num_k_splits && range[2 * k_split] >= range[2 * k_split + 1]) ++k_split;
    return k_split;
  };
  for (int64_t c = 0; c < d; c += kLanes) {
    const int64_t n = d - c;
    TreeStack tree;
    Lanes total = set(-0.0f);
    for (int64_t k_split = next_local(0); k_split < num_k_splits;) {
      const int64_t next = next_local(k_split + 1);
      Lanes sum = load(heads + range[2 * k_split] + c, n);
      for (int64_t head = range[2 * k_split] + d; head < range[2 * k_split + 1]; head += d)
        sum = sum + load(heads + head + c, n);
      total = tree.add(sum, k_split, next < num_k_splits ? next : 0);
      k_split = next;
    }
    store(out.elements() + c, total, n);
  }
}

// kernel tree_resume  f32
//   out left:f32[m _]
//   in carries:f32?[m _], x:f32...[m d]
//   int slot, num_inputs=count(x)
//   flag finish
//   require slot >= 0 and (slot == 0 or carries.rows == m)
//   flops m * d * inputs
//   bytes 4 * m * d * (inputs + 2)
/// Pushes the sums x of slots s, s + 1, … with s = `slot` onto the stack of a binary counter whose value is s; left
/// becomes the resulting stack, or its root. The levels of a stack are adjacent columns, the oldest first. left may be
/// carries.
void TreeResumeKernel::run() const {
  const auto first = x[0];
  const int64_t d = first.cols;
  const int num_carries = __builtin_popcountll(static_cast<uint64_t>(slot));
  for (int64_t r = 0; r < first.rows; ++r)
    for (int64_t c = 0; c < d; c += kLanes) {
      const int64_t n = d - c;
      Lanes stack[64];
      int depth = 0;
      for (; depth < num_carries; ++depth) stack[depth] = load(carries.row(r) + depth * d + c, n);
      for (int64_t i = 0; i < num_inputs; ++i) {
        Lanes sum = load(x[i].row(r) + c, n);
        for (int64_t level = slot + i; level & 1; level >>= 1) sum = stack[--depth] + sum;
        stack[depth++] = sum;
      }
      for (; finish && depth > 1; --depth) stack[depth - 2] = stack[depth - 2] + stack[depth - 1];
      for (int level = 0; level < depth; ++level) store(left.row(r) + level * d + c, stack[level], n);
    }
}

/// Squares of W's row `r` over columns [begin, end), ascending, one fp64 accumulator.
TILEWISE_INLINE double row_squares(const Tile<const float>& w, bool packed, int64_t r, int64_t begin, int64_t end) {
  const float* data = w.elements();
  const float* row = packed ? data + r / 32 * 32 * w.stride + r % 32 : data + r * w.stride;
  const int64_t step = packed ? 32 : 1;
  double sum = 0.0;
  for (int64_t k = begin; k < end; ++k) {
    const double x = row[k * step];
    sum += x * x;
  }
  return sum;
}

/// The same for all 32 rows of a panel; one accumulator per row gives the same bits.
TILEWISE_INLINE void panel_squares(double* to, const float* panel, int64_t begin, int64_t end) {
  double sums[32] = {};
  for (int64_t k = begin; k < end; ++k)
    for (int r = 0; r < 32; ++r) {
      const double x = panel[k * 32 + r];
      sums[r] += x * x;
    }
  for (int r = 0; r < 32; ++r) to[r] = sums[r];
}

/// The left-complete tree in fp64 over entries in order: full groups of eight at once, then a binary counter.
double tree_of(const double* x, int64_t count) {
  double stack[64], rest = 0.0;
  int depth = 0;
  for (int64_t i = 0; i + 8 <= count; i += 8, x += 8) {
    double sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    for (int64_t slot = i / 8; slot & 1; slot >>= 1) sum = stack[--depth] + sum;
    stack[depth++] = sum;
  }
  for (int64_t i = 0; i < count % 8; ++i) {
    double sum = x[i];
    for (int64_t slot = i; slot & 1; slot >>= 1) sum = stack[--depth] + sum;
    stack[depth++] = sum;
  }
  if (depth > 0) rest = stack[--depth];
  while (depth > 0) rest = stack[--depth] + rest;
  return rest;
}

// kernel square_sum  f32
//   out out:f64[_ 1]
//   in grad:f32~[_ _]
//   int packed=packed(grad), rows, first_row, first_entry, num_k_splits, range...(2*num_k_splits)
//   within range grad
//   flops 2 * m * d
//   bytes 4 * m * d
/// `grad` has the local rows of a gradient with `rows` rows, from `first_row` on; out begins with entry `first_entry`;
/// `range` has the local columns of every k split. Entry (c, r), at index c * rows + r, is the sum of squares of one
/// row × k split; entries without local elements are zero.
void SquareSumKernel::run() const {
  double* to = out.elements();
  for (int64_t i = 0; i < out.rows; ++i) to[i] = 0.0;
  for (int64_t c = 0; c < num_k_splits; ++c) {
    const int64_t begin = range[2 * c], end = range[2 * c + 1];
    if (begin >= end) continue;
    const int64_t first = c * rows + first_row - first_entry;  // index of local row 0 in out
    const int64_t last = smaller(grad.rows, out.rows - first);
    for (int64_t r = first < 0 ? -first : 0; r < last;) {
      if (packed && r % 32 == 0 && r + 32 <= last) {
        panel_squares(to + first + r, grad.row(r), begin, end);
        r += 32;
      } else {
        to[first + r] = row_squares(grad, packed, r, begin, end);
        ++r;
      }
    }
  }
}

// kernel norm_scale
//   out out:f32[1 2]
//   in squares:f64[m 1], loss:f32[1 1]
//   double max_norm
//   flops m
//   bytes 8 * m
void NormScaleKernel::run() const {
  const double norm = __builtin_sqrt(tree_of(squares.elements(), squares.rows));
  const double factor = max_norm / (norm + 1e-6);
  float* to = out.elements();
  to[0] = static_cast<float>(norm);
  const float sum = *loss.elements();
  const bool is_finite = to[0] - to[0] == 0.0f && sum - sum == 0.0f;
  // NaN makes the update skip this step, whose gradients are not finite.
  to[1] = !is_finite ? __builtin_nanf("") : max_norm <= 0.0 || factor >= 1.0 ? 1.0f : static_cast<float>(factor);
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/reductions_entries.h"
