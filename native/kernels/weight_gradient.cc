// matmul_dw: packed weight gradients over batch splits, with the embedding's scatter-add and earlier carries.
//
// Lanes are along n, so finished blocks are panel rows. Rows of a block are columns of X. If sequences may be padded,
// with dY = 0 in the padding, every sequence begins a new step (a step of bf16 has two tokens), and adding +0 removes
// the sign of a zero. So padding has no effect.
#include "kernels/declared/weight_gradient.h"

#include "kernels/kernel.h"
#include "kernels/product.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

// Up to kWholeSteps are packed at once. A longer contraction is packed half as many steps at a time, for kWindowPanels
// panels together. That fits L2, which has at least 1 MiB on processors with many registers.
template <class Dot>
inline constexpr bool kIsLarge = kMaxRows > 6 && kGroupOf<Dot> == 1;
template <class Dot>
inline constexpr int64_t kWholeSteps = kIsLarge<Dot> ? 1024 : 512;
template <class Dot>
inline constexpr int64_t kWindowPanels = kIsLarge<Dot> ? int64_t{1} << 30 : 8;
inline constexpr int64_t kMaxColumns = 2016;  // columns of k per pass
inline constexpr int64_t kScatterBytes = 1 << 20;
inline constexpr int64_t kPanelAhead = 512;  // prefetch distance in floats within a panel

template <class D>
struct WeightGradient {
  using T = typename D::T;
  using Dot = typename D::Dot;
  static constexpr ALayout kLayout = kGroupOf<Dot> > 1 ? ALayout::kRows : ALayout::kSteps;
  static constexpr bool kPacksPanels = true;
  Tile<float> out;
  Tile<const T> dy, x;
  Tile<const int32_t> ids;
  Tile<const T> de;
  Tiles<const float, 1> carries;
  int64_t num_carries, split_rows, num_splits, first_id;
  int64_t column;  // first column of k in this pass
  int64_t columns;  // columns of a full pass
  float* scatter;  // [panel of the group][split][columns][32]
  bool clears_signs;  // + 0 is added at the end
  int64_t rows, lanes;
  int64_t num_terms = 1;
  int64_t max_group;

  int64_t scatter_floats() const { return num_splits * columns * kPanel; }
  const float* initial(int64_t, int64_t, int64_t, float*) { return nullptr; }
  const float* addend(int64_t row, int64_t panel) {
    return ids.data ? scatter + panel * scatter_floats() + row * kPanel : nullptr;
  }
  /// Scatter-adds the embedding gradient of every batch split for the rows of the group's panels, in token order from
  /// +0.
  void begin_group(int64_t first, int64_t count) {
    if (!ids.data) return;
    const int64_t floats = count * scatter_floats();
    for (int64_t i = 0; i < floats; i += kLanes) store(scatter + i, set(0.0f));
    const int64_t low = first_id + first * kPanel, high = smaller(low + count * kPanel, first_id + lanes);
    for (int64_t t = 0; t < ids.rows; ++t) {
      const int64_t id = *ids.row(t);
      if (id < low || id >= high) continue;
      const int64_t n = id - low;
      float* to = scatter + n / kPanel * scatter_floats() + t / split_rows * columns * kPanel + n % kPanel;
      const T* from = de.row(t) + column;
      for (int64_t r = 0; r < rows; ++r) to[r * kPanel] += widen(from[r]);
    }
  }
  template <class Start>
  void pack_blocks(uint32_t* to, int64_t words, int64_t block, int64_t end, const Start& start, const Copy& c) {
    const TileView pass = {static_cast<T*>(x.data) + column, x.rows, x.cols - column, x.stride};
    if constexpr (kLayout == ALayout::kRows) {
      pack_transposed_columns<D>(to, words, block, end, start, pass, c.begin, c.end);
    } else {
      pack_columns<D>(to, words, block, end, start, pass, c.begin, c.end);
    }
  }
  /// Packs all panels of a token before the next token, so that dY's long rows are read in whole runs.
  void pack_panels(uint32_t* to, int64_t words, int64_t first, int64_t count, const Copy& c) {
    const T* from = dy.elements() + first * kPanel;
    const int64_t columns = lanes - first * kPanel, whole = smaller(count, columns / kPanel);
    const int64_t end = c.end - (c.end - c.begin) % D::kPerStep;
    uint32_t* step = to;
    for (int64_t t = c.begin; t < end; t += D::kPerStep, step += kPanel)
      for (int64_t p = 0; p < whole; ++p) {
        const T* row = from + t * dy.stride + p * kPanel;
        prefetch_step<D, 4>(row, dy.stride);
        whole_step<kPanel>(step + p * words, row, row + (D::kPerStep - 1) * dy.stride);
      }
    for (int64_t p = 0; p < count; ++p) {  // an odd last token, and the panel that ends with padding
      const int64_t begin = p < whole ? end : c.begin;
      pack_panel_along<D, kPanel>(to + p * words + (begin - c.begin) / D::kPerStep * kPanel, from + p * kPanel,
                                  dy.stride, columns - p * kPanel, begin, c.end);
    }
  }
  template <class Start>
  int64_t num_sources(const Copy& c, int64_t, int64_t, const Start&) const {
    return c.end - c.begin;
  }
  template <class Start>
  Run source(const Copy& c, int64_t block, int64_t end, const Start& start, int64_t i) const {
    const T* row = x.row(c.begin + i) + column;
    return {reinterpret_cast<const char*>(row + start(block)),
            static_cast<int64_t>((start(end) - start(block)) * sizeof(T))};
  }
  /// Packed weights have the layout of blocks, so blocks are finished in place, unless a carry may use the same memory.
  float* target(int64_t row, int64_t panel, float* block) const { return num_carries > 0 ? block : place(row, panel); }
  static int64_t pitch() { return kPanel; }
  float* place(int64_t row, int64_t panel) const {
    return out.elements() + (panel * out.stride + column + row) * kPanel;
  }
  void expect(int64_t row, int64_t count, int64_t panel, Rows (&expected)[2]) const {
    expected[0] = {reinterpret_cast<const char*>(place(row, panel)), count, kPanel * 4, kPanel * 4};
  }
  void finish(int64_t row, int64_t count, int64_t panel, const float* block) {
    float* to = place(row, panel);
    const int64_t offset = to - out.elements();
    if (num_carries > 0 || clears_signs)
      for (int64_t i = 0; i < count * kPanel; i += kLanes) {
        Lanes v = load(block + i);
        for (int64_t c = 0; c < num_carries; ++c) v = load(carries[c].elements() + offset + i) + v;
        store(to + i, clears_signs ? v + set(0.0f) : v);
      }
    const int64_t width = lanes - panel * kPanel;
    if (width < kPanel)
      for (int64_t r = 0; r < count; ++r)
        for (int64_t c = width; c < kPanel; ++c) to[r * kPanel + c] = 0.0f;
    if (column + row + count == out.cols && out.stride > out.cols)
      for (int64_t c = 0; c < kPanel; ++c) to[count * kPanel + c] = 0.0f;
  }
};

/// The scatter-add alone. Most panels of a table have no row that a token names; they become zeros, or the sum of the
/// carries. A row that tokens name is summed with contiguous columns before its values are stored in its lane.
template <class D>
class ScatteredRows {
  using T = typename D::T;

 public:
  ScatteredRows(const MatmulDwKernel<D>& call, Carver& carver)
      : out_(call.out),
        ids_(call.ids),
        de_(call.de),
        carries_(call.carry),
        num_carries_(call.num_carries),
        split_rows_(call.split_rows),
        first_id_(call.vocab_begin + call.row_begin),
        columns_(smaller(call.out.cols, kMaxColumns)) {
    const int64_t batch_splits = divide_up(ids_.rows, split_rows_);
    named_ = carver.take<int32_t>(ids_.rows);
    sums_ = carver.take<float>((2 + 64 - __builtin_clzll(static_cast<uint64_t>(batch_splits))) *
                               round_up(columns_, kLanes));
    panel_ = carver.take<float>(num_carries_ > 0 ? columns_ * kPanel : 0);
  }

  void run() {
    for (int64_t row = 0; row < out_.rows; row += kPanel) {
      const uint32_t lanes = find(first_id_ + row, smaller(kPanel, out_.rows - row));
      if (lanes == 0 && out_.rows - row >= kPanel && is_unchanged(row)) continue;
      for (int64_t column = 0; column < out_.cols; column += columns_)
        run_panel(row, lanes, column, smaller(columns_, out_.cols - column));
      float* const end = place(row, out_.cols);
      for (int64_t i = 0; i < (out_.stride - out_.cols) * kPanel; i += kLanes) store(end + i, set(0.0f));
    }
  }

 private:
  float* place(int64_t row, int64_t column) const { return out_.elements() + row * out_.stride + column * kPanel; }
  int64_t id(int64_t token) const { return *ids_.row(token); }

  /// Lists the tokens that name one of the `count` rows from `low` on, ascending. Returns these rows as a bit mask.
  uint32_t find(int64_t low, int64_t count) {
    uint32_t lanes = 0;
    num_named_ = 0;
    for (int64_t t = 0; t < ids_.rows; ++t) {
      const int64_t lane = id(t) - low;
      if (lane < 0 || lane >= count) continue;
      named_[num_named_++] = static_cast<int32_t>(t);
      lanes |= uint32_t{1} << lane;
    }
    return lanes;
  }

  /// Whether a panel that no token names can be left unchanged, without writes: the only carry has the same memory, and
  /// + 0 changes none of its values (it would change -0 and signalling NaN).
  bool is_unchanged(int64_t row) const {
    if (num_carries_ != 1 || carries_[0].data != out_.data) return false;
    const float* from = place(row, 0);
    IntLanes changed = set_int(0);
    for (int64_t i = 0; i < out_.stride * kPanel; i += kLanes) {
      __builtin_prefetch(from + i + kPanelAhead);
      const Lanes v = load(from + i);
      const IntLanes before = as_int(v), after = as_int(v + set(0.0f));
      TILEWISE_EACH_PART changed.part[p] |= before.part[p] ^ after.part[p];
    }
    int32_t bits[kLanes], any = 0;
    __builtin_memcpy(bits, &changed, sizeof bits);
    for (int32_t b : bits) any |= b;
    return any == 0;
  }

  /// Rows without a token are zero: every batch split adds +0.
  void run_panel(int64_t row, uint32_t lanes, int64_t column, int64_t count) {
    float* const to = place(row, column);
    float* const sum = num_carries_ > 0 ? panel_ : to;
    if (num_carries_ == 0 || lanes != 0)
      for (int64_t i = 0; i < count * kPanel; i += kLanes) store(sum + i, set(0.0f));
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      const int64_t lane = __builtin_ctz(left);
      const float* values = sum_row(first_id_ + row + lane, column, count);
      for (int64_t c = 0; c < count; ++c) sum[c * kPanel + lane] = values[c];
    }
    if (num_carries_ == 0) return;
    const int64_t offset = to - out_.elements();
    for (int64_t i = 0; i < count * kPanel; i += kLanes) {
      Lanes v = lanes != 0 ? load(sum + i) : set(0.0f);
      for (int64_t c = 0; c < num_carries_; ++c) v = load(carries_[c].elements() + offset + i) + v;
      store(to + i, v);  // never -0, because the sum begins with +0
    }
    for (int64_t lane = out_.rows - row; lane < kPanel; ++lane)
      for (int64_t c = 0; c < count; ++c) to[c * kPanel + lane] = 0.0f;
  }

  /// A row's sum over all tokens that name it: in order within a batch split, from +0, then the tree over batch splits.
  const float* sum_row(int64_t row_id, int64_t column, int64_t count) {
    const int64_t length = round_up(columns_, kLanes), batch_splits = divide_up(ids_.rows, split_rows_);
    SplitTree tree;
    float* top = sums_;
    for (int64_t split = 0, next = 0; split < batch_splits; ++split) {
      for (int64_t c = 0; c < count; c += kLanes) store(top + c, set(0.0f));
      for (; next < num_named_ && named_[next] < (split + 1) * split_rows_; ++next) {
        if (id(named_[next]) != row_id) continue;
        const T* from = de_.row(named_[next]) + column;
        for (int64_t c = 0; c < count; c += kLanes) store(top + c, load(top + c) + load(from + c, count - c));
      }
      int pops = tree.add(split, split + 1) + (split + 1 == batch_splits ? tree.finish() : 0);
      for (; pops > 0; --pops) {
        float* const below = top - length;
        for (int64_t c = 0; c < count; c += kLanes) store(below + c, load(below + c) + load(top + c));
        top = below;
      }
      top += length;
    }
    return sums_;
  }

  const Tile<float>& out_;
  const Tile<const int32_t>& ids_;
  const Tile<const T>& de_;
  const Tiles<const float, 1> carries_;
  int64_t num_carries_, split_rows_, first_id_, columns_;
  int64_t num_named_ = 0;
  int32_t* named_;
  float *sums_, *panel_;
};

// kernel matmul_dw  f32=F32 bf16=ProductBF16
//   out out:f32![n k]
//   in dy?[t n], x?[t k], ids:i32?[t 1], de?[t k], carry:f32!...[n k]
//   int split_rows, num_carries=count(carry), vocab_begin, padded_len
//   require split_rows > 0 and padded_len >= 0 and (dy.rows > 0 or ids.rows > 0)
//   require (dy.rows > 0) == (x.rows > 0) and (ids.rows > 0) == (de.rows > 0)
//   flops 2 * m * n * k
//   bytes item * m * (n + k) + 4 * n * k
//   let tokens = max(dy.rows, x.rows, ids.rows, de.rows)
//   let runs = -(-tokens // (padded_len or split_rows))
//   let sums_of_splits = -(-tokens // split_rows) * 32 * 4
//   scratch product_scratch(tokens, runs + 1) + (1 << 20) + sums_of_splits
template <class D>
void MatmulDwKernel<D>::run() const {
  if (out.rows == 0 || out.cols == 0) return;
  if (!dy.data && ids.rows > 0) {
    Carver carver(scratch);
    return ScatteredRows<D>(*this, carver).run();
  }
  WeightGradient<D> op = {};
  op.out = out;
  op.dy = dy;
  op.x = x;
  op.ids = ids;
  op.de = de;
  op.carries = carry;
  op.split_rows = split_rows;
  op.num_carries = num_carries;
  op.first_id = vocab_begin + row_begin;
  op.lanes = out.rows;
  const bool contracts = op.dy.data != nullptr;
  const int64_t tokens = contracts ? op.dy.rows : op.ids.data ? op.ids.rows : 0;
  op.num_splits = divide_up(tokens, op.split_rows);
  op.clears_signs = padded_len != 0;
  const int64_t run = padded_len != 0 ? padded_len : split_rows;  // tokens with consecutive steps

  Carver carver(scratch);
  const int64_t steps = contracts ? divide_up(tokens, D::kPerStep) : 0;
  using Dot = typename D::Dot;
  // Pack all steps at once if whole row blocks then fit L2; otherwise use windows that do.
  const int64_t most = steps <= kWholeSteps<Dot> ? kWholeSteps<Dot> : kWholeSteps<Dot> / 2;
  Blocking blocking(carver, StepLayout::of<D>(WeightGradient<D>::kLayout), most, false, steps,
                    (contracts ? divide_up(tokens, run) : op.num_splits) + 1);
  const int64_t widest = smaller(op.out.cols, kMaxColumns);
  int64_t columns = widest;
  if (op.ids.data) {
    const int64_t per_column = op.num_splits * kPanel * 4;
    columns = larger(int64_t{1}, smaller(widest, kScatterBytes / larger(int64_t{1}, per_column)));
  }
  SplitTree tree;
  for (int64_t split = 0; split < op.num_splits; ++split) {
    const bool last = split + 1 == op.num_splits;
    const int64_t end = contracts ? smaller((split + 1) * op.split_rows, tokens) : 0;
    for (int64_t t = split * op.split_rows; t < end; t += run) blocking.add(0, t, smaller(t + run, end));
    const int pops = tree.add(split, split + 1) + (last ? tree.finish() : 0);
    blocking.end_split(pops, last, op.ids.data ? split * columns * kPanel : -1);
  }
  blocking.close();

  op.columns = columns;
  op.max_group = blocking.num_windows > 1 ? kWindowPanels<Dot> : int64_t{1} << 30;
  const int64_t panel_floats = op.num_splits * columns * kPanel;
  if (op.ids.data) {
    op.max_group = larger(int64_t{1}, smaller(8, kScatterBytes / (panel_floats * 4)));
    op.scatter = carver.take<float>(op.max_group * panel_floats);
  }
  for (op.column = 0; op.column < op.out.cols; op.column += columns) {
    op.rows = smaller(columns, op.out.cols - op.column);
    run_product(op, blocking, carver);
  }
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/weight_gradient_entries.h"
