// Trees over leaves, and the gradient norm in fp64.
#include "kernels/math.h"
#include "kernels/registry.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// tiles: out[1, D], partials[L, D], carries...; the tree over the L rows, then each carry in front.
void leaf_tree(const KernelArgs& args) {
  const TileView &out = args.tiles[0], &partials = args.tiles[1];
  for (int64_t c = 0; c < out.cols; c += kLanes) {
    const int64_t n = out.cols - c;
    Lanes stack[64], sum = set(0.0f);
    int depth = 0;
    ChunkTree tree;
    for (int64_t leaf = 0; leaf < partials.rows; ++leaf) {
      sum = load(row_of<const float>(partials, leaf) + c, n);
      int pops = tree.add(leaf, leaf + 1);
      if (leaf + 1 == partials.rows) pops += tree.finish();
      for (; pops > 0; --pops) sum = stack[--depth] + sum;
      stack[depth++] = sum;
    }
    for (int64_t i = 0; i < args.ints[0]; ++i) sum = load(row_of<const float>(args.tiles[2 + i], 0) + c, n) + sum;
    store(row_of<float>(out, 0) + c, sum, n);
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

/// The same for the 32 rows of a whole panel at once: one accumulator per row, so the same bits.
TILEWISE_INLINE void panel_squares(double* to, const float* panel, int64_t begin, int64_t end) {
  double sums[32] = {};
  for (int64_t k = begin; k < end; ++k)
    for (int r = 0; r < 32; ++r) {
      const double x = panel[k * 32 + r];
      sums[r] += x * x;
    }
  for (int r = 0; r < 32; ++r) to[r] = sums[r];
}

/// Binary counter in fp64.
class SumTree {
 public:
  void add(double value) {
    for (int64_t slot = count_++; slot & 1; slot >>= 1) value = stack_[--depth_] + value;
    stack_[depth_++] = value;
  }
  double total() {
    if (depth_ == 0) return 0.0;
    double value = stack_[--depth_];
    while (depth_ > 0) value = stack_[--depth_] + value;
    return value;
  }

 private:
  double stack_[64];
  int depth_ = 0;
  int64_t count_ = 0;
};

void square_sum(const KernelArgs& args) {
  const TileView& w = args.tiles[1];
  const bool packed = args.ints[0] != 0, by_rows = args.ints[2] == 0;
  for (int64_t c = 0; c < args.ints[1]; ++c) {
    const int64_t begin = args.ints[3 + 2 * c], end = args.ints[4 + 2 * c];
    const int64_t row_begin = by_rows ? begin : 0, row_end = by_rows ? end : w.rows;
    const int64_t k_begin = by_rows ? 0 : begin, k_end = by_rows ? w.cols : end;
    SumTree tree;
    for (int64_t r = row_begin; r < row_end;) {
      if (packed && r % 32 == 0 && r + 32 <= row_end) {
        double rows[32];
        panel_squares(rows, static_cast<const float*>(w.data) + r * w.stride, k_begin, k_end);
        for (double row : rows) tree.add(row);
        r += 32;
      } else {
        tree.add(row_squares(w, packed, r, k_begin, k_end));
        ++r;
      }
    }
    static_cast<double*>(args.tiles[0].data)[c] = tree.total();
  }
}

void norm_scale(const KernelArgs& args) {
  const TileView& partials = args.tiles[1];
  SumTree tree;
  for (int64_t p = 0; p < partials.rows; ++p)
    for (int64_t c = 0; c < partials.cols; ++c) tree.add(row_of<const double>(partials, p)[c]);
  const double norm = __builtin_sqrt(tree.total()), limit = args.floats[0];
  const double factor = limit / (norm + 1e-6);
  auto* out = static_cast<float*>(args.tiles[0].data);
  out[0] = static_cast<float>(norm);
  const float loss = *static_cast<const float*>(args.tiles[2].data);
  const bool is_finite = out[0] - out[0] == 0.0f && loss - loss == 0.0f;
  // NaN: the step's numbers are lost, and the update must leave every parameter as it is.
  out[1] = !is_finite ? __builtin_nanf("") : limit <= 0.0 || factor >= 1.0 ? 1.0f : static_cast<float>(factor);
}

constexpr Entry kEntries[] = {
    {"leaf_tree_f32", leaf_tree},
    {"square_sum_f32", square_sum},
    {"norm_scale", norm_scale},
};

}  // namespace

EntryList reductions_entries() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
