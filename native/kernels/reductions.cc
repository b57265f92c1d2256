// Trees over batch splits, in one call or resumed over several, and the gradient norm in fp64.
#include "kernels/kernel.h"
#include "kernels/math.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// tiles: out[1, D], partials[L, P * D], carries...; ints: number of carries, the length that k splits are counted
/// over, C, whether rows may be padding. Adds along the tree over the sequence splits of every batch split, then along
/// the tree over the L batch splits, then each carry in front. Padding adds zeros, which can only change the sign of a
/// zero; + 0 removes it.
void split_tree(const KernelArgs& args) {
  const TileView &out = args.tiles[0], &partials = args.tiles[1];
  const SequenceSplits k_splits{args.ints[1], args.ints[2]};
  const Lanes zero = set(args.ints[3] ? 0.0f : -0.0f);
  for (int64_t c = 0; c < out.cols; c += kLanes) {
    const int64_t n = out.cols - c;
    TreeStack batch_splits;
    Lanes sum = set(0.0f);
    for (int64_t split = 0; split < partials.rows; ++split) {
      const float* row = row_of<const float>(partials, split) + c;
      TreeStack inner;
      for (int64_t p = 0; p < k_splits.num_stored(); ++p)
        sum = inner.add(load(row + p * out.cols, n), k_splits.slot(p),
                        p + 1 < k_splits.num_stored() ? k_splits.slot(p + 1) : 0);
      sum = batch_splits.add(sum, split, split + 1 < partials.rows ? split + 1 : 0);
    }
    for (int64_t i = 0; i < args.ints[0]; ++i) sum = load(row_of<const float>(args.tiles[2 + i], 0) + c, n) + sum;
    store(row_of<float>(out, 0) + c, sum + zero, n);
  }
}

/// tiles: out[1, D], x[1, heads * D]; ints: C, and per k split the heads' elements [begin, end), empty for heads on
/// other devices. Heads of a k split are added in order, then k splits along the tree. Without heads the sum is -0, the
/// neutral element of addition.
void head_sum(const KernelArgs& args) {
  const TileView& out = args.tiles[0];
  const auto* x = static_cast<const float*>(args.tiles[1].data);
  const int64_t k_splits = args.ints[0], d = out.cols;
  const int64_t* ranges = args.ints + 1;
  const auto next_local = [&](int64_t k_split) {
    while (k_split < k_splits && ranges[2 * k_split] >= ranges[2 * k_split + 1]) ++k_split;
    return k_split;
  };
  for (int64_t c = 0; c < d; c += kLanes) {
    const int64_t n = d - c;
    TreeStack tree;
    Lanes total = set(-0.0f);
    for (int64_t k_split = next_local(0); k_split < k_splits;) {
      const int64_t next = next_local(k_split + 1);
      Lanes sum = load(x + ranges[2 * k_split] + c, n);
      for (int64_t head = ranges[2 * k_split] + d; head < ranges[2 * k_split + 1]; head += d)
        sum = sum + load(x + head + c, n);
      total = tree.add(sum, k_split, next < k_splits ? next : 0);
      k_split = next;
    }
    store(static_cast<float*>(out.data) + c, total, n);
  }
}

/// tiles: left[m, levels * D], carries[m, levels * D] (or absent), x[m, D]...; ints: slot s, number of x, whether to
/// finish. Pushes the sums of slots s, s + 1, … onto the stack of a binary counter whose value is s; left becomes the
/// resulting stack, or its root. The levels of a stack are adjacent columns, the oldest first. left may be carries.
void tree_resume(const KernelArgs& args) {
  const TileView &left = args.tiles[0], &carries = args.tiles[1], &first = args.tiles[2];
  const int64_t begin = args.ints[0], count = args.ints[1], d = first.cols;
  const int num_carries = __builtin_popcountll(static_cast<uint64_t>(begin));
  for (int64_t r = 0; r < first.rows; ++r)
    for (int64_t c = 0; c < d; c += kLanes) {
      const int64_t n = d - c;
      Lanes stack[64];
      int depth = 0;
      for (; depth < num_carries; ++depth) stack[depth] = load(row_of<const float>(carries, r) + depth * d + c, n);
      for (int64_t i = 0; i < count; ++i) {
        Lanes sum = load(row_of<const float>(args.tiles[2 + i], r) + c, n);
        for (int64_t slot = begin + i; slot & 1; slot >>= 1) sum = stack[--depth] + sum;
        stack[depth++] = sum;
      }
      for (; args.ints[2] && depth > 1; --depth) stack[depth - 2] = stack[depth - 2] + stack[depth - 1];
      for (int level = 0; level < depth; ++level) store(row_of<float>(left, r) + level * d + c, stack[level], n);
    }
}

/// Squares of W's row `r` over columns [begin, end), ascending, one fp64 accumulator.
TILEWISE_INLINE double row_squares(const TileView& w, bool packed, int64_t r, int64_t begin, int64_t end) {
  const auto* data = static_cast<const float*>(w.data);
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

/// tiles: out[N, 1], the gradient's local rows; ints: packed, rows R of the whole gradient, its row where the local
/// ones begin, its entry where out begins, C, and per k split of columns the local range. Entry (c, r), at index
/// c * R + r, is the sum of squares of one row × k split; entries without local elements are zero.
void square_sum(const KernelArgs& args) {
  const TileView &out = args.tiles[0], &w = args.tiles[1];
  const bool packed = args.ints[0] != 0;
  auto* to = static_cast<double*>(out.data);
  for (int64_t i = 0; i < out.rows; ++i) to[i] = 0.0;
  for (int64_t c = 0; c < args.ints[4]; ++c) {
    const int64_t begin = args.ints[5 + 2 * c], end = args.ints[6 + 2 * c];
    if (begin >= end) continue;
    const int64_t first = c * args.ints[1] + args.ints[2] - args.ints[3];  // index of local row 0 in out
    const int64_t last = smaller(w.rows, out.rows - first);
    for (int64_t r = first < 0 ? -first : 0; r < last;) {
      if (packed && r % 32 == 0 && r + 32 <= last) {
        panel_squares(to + first + r, static_cast<const float*>(w.data) + r * w.stride, begin, end);
        r += 32;
      } else {
        to[first + r] = row_squares(w, packed, r, begin, end);
        ++r;
      }
    }
  }
}

void norm_scale(const KernelArgs& args) {
  const TileView& squares = args.tiles[1];
  const double norm = __builtin_sqrt(tree_of(static_cast<const double*>(squares.data), squares.rows)),
               limit = args.floats[0];
  const double factor = limit / (norm + 1e-6);
  auto* out = static_cast<float*>(args.tiles[0].data);
  out[0] = static_cast<float>(norm);
  const float loss = *static_cast<const float*>(args.tiles[2].data);
  const bool is_finite = out[0] - out[0] == 0.0f && loss - loss == 0.0f;
  // NaN makes the update skip this step, whose gradients are not finite.
  out[1] = !is_finite ? __builtin_nanf("") : limit <= 0.0 || factor >= 1.0 ? 1.0f : static_cast<float>(factor);
}

constexpr Entry kEntries[] = {
    {"split_tree_f32", split_tree}, {"head_sum_f32", head_sum}, {"tree_resume_f32", tree_resume},
    {"square_sum_f32", square_sum}, {"norm_scale", norm_scale},
};

}  // namespace

EntryList reductions_entries() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
